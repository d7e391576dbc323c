"""Every path inside a store, relative to its root, with forward slashes."""

import hashlib
from collections.abc import Iterable

from storage.schema import UnitId

IDENTITY = "store.json"
JOINED = "joined.json"
"""Of a joined store, which has no other file: its members."""
LAYERS = "layers"
PENDING_LAYERS = "pending_layers"
HEAD = "head"
HEAD_RECORDS = "head_records"
GENERATIONS = "generations"
COMMITS = "commits"
SHARDS = "shards"
CATALOG = "catalog"
TOMBSTONES = "tombstones"
ADDED = "added"
PLANS = "plans"
ORIGINS = "origins"

TOKENS = "tokens.bin"
SCALES = "scales"
TEMPORARY = ".tmp-"
"""Names that start so are unfinished; nobody reads them."""


def layer_record(name: str) -> str:
    """The record of one layer."""
    return f"{LAYERS}/{name}.json"


def pending_layer_record(name: str) -> str:
    """The record of a layer that is being added: shards may hold it, readers do not see it yet."""
    return f"{PENDING_LAYERS}/{name}.json"


def head_file(name: str) -> str:
    """A file that stage 2 needs beside hidden states, for example the LM head."""
    return f"{HEAD}/{name}"


def head_record(name: str) -> str:
    """Size and checksum of a head file; `/` in its name is written `%2F`."""
    return f"{HEAD_RECORDS}/{name.replace('%', '%25').replace('/', '%2F')}.json"


def generation(number: int) -> str:
    """The plan of one data generation."""
    return f"{GENERATIONS}/{number:05d}.json"


def planned_ids(digest: str) -> str:
    """The sorted ids of a generation, one a line, under their SHA-256."""
    return f"{PLANS}/{digest}.ids"


def origin(digest: str) -> str:
    """A record of settings and versions that filled the store, under its SHA-256."""
    return f"{ORIGINS}/{digest}.json"


def catalog(name: str) -> str:
    """A catalog file."""
    return f"{CATALOG}/{name}"


def fan_out(unit: UnitId) -> str:
    """Two hex digits that spread units over 256 folders."""
    return hashlib.sha256(str(unit).encode()).hexdigest()[:2]


def commit(unit: UnitId) -> str:
    """The record whose existence makes a shard exist."""
    return f"{COMMITS}/{fan_out(unit)}/{unit}.json"


def added_folder(unit: UnitId) -> str:
    """Folder of the records of layers that were added to a unit."""
    return f"{ADDED}/{fan_out(unit)}/{unit}"


def added_layers(unit: UnitId, names: Iterable[str]) -> str:
    """The record whose existence adds these layers to a shard."""
    return f"{added_folder(unit)}/{'+'.join(sorted(names))}.json"


def attempt(unit: UnitId, attempt_id: str) -> str:
    """The folder one attempt writes its data to; final if the commit names this attempt."""
    return f"{SHARDS}/{fan_out(unit)}/{unit}.{attempt_id}"


def tombstone(unit: UnitId) -> str:
    """The record that takes a damaged unit out of new snapshots."""
    return f"{TOMBSTONES}/{unit}.json"


def array(attempt_dir: str, name: str) -> str:
    """The Zarr array of one layer."""
    return f"{attempt_dir}/{LAYERS}/{name}"


def scales(attempt_dir: str) -> str:
    """The Zarr array of token scales of all layers."""
    return f"{attempt_dir}/{SCALES}"


def tokens(attempt_dir: str) -> str:
    """Token ids and loss masks of a shard."""
    return f"{attempt_dir}/{TOKENS}"


def array_data(array_dir: str) -> str:
    """The one file that holds all chunks of an array."""
    return f"{array_dir}/c/0/0"


def array_metadata(array_dir: str) -> str:
    """The Zarr metadata of an array or group."""
    return f"{array_dir}/zarr.json"
