"""Read any sequence, any token range, any layers of a store; never needs write access."""

import hashlib
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, UInt64

from storage import layout
from storage.catalog import Catalog, read_catalog, select
from storage.commits import CommitRecord, read_added, read_commit, tombstoned_units
from storage.encodings import EncodedStates, decode
from storage.errors import DamagedShardError, StoreError, StoreNotFoundError
from storage.files import Files, LocalFiles, replace_whole
from storage.head import check_head_file, head_files, read_head_file
from storage.identity import read_identity, read_layers
from storage.losses import EncodingLoss, total_losses
from storage.origins import read_origins
from storage.places import files_at
from storage.plan import planned_counts
from storage.read_cache import CachedFiles, ReadCache
from storage.schema import (
    LayerRecord,
    StoreIdentity,
    UnitId,
    among_units,
    format_units,
    hash_id,
    unit_keys,
)
from storage.shards import Destinations, OpenShards, ShardReader

SHARDS_AT_ONCE = 65_536
"""Shards over whose sequences a running sum is taken at a time."""


def open_store(store_dir: str | Path, *, cache: ReadCache | None = None) -> "Store":
    """Opens a store for reading.

    Args:
        store_dir: a folder or URL, of a store or of a joined one.
        cache: keeps what is read of shards on a local disk; None reads everything from the store.

    Raises:
        StoreNotFoundError: there is no store at this place.
    """
    files = files_at(store_dir)
    try:
        return _open_one(files, cache)
    except StoreNotFoundError:
        # Imported here, for it builds on this module.
        from storage.joined import open_joined

        return open_joined(files, lambda place: _open_one(files_at(place), cache))


def _open_one(files: Files, cache: ReadCache | None) -> "Store":
    if cache is not None:
        files = CachedFiles(files, cache)
    return Store(files, read_identity(files))


@dataclass
class SequenceStates:
    """A sequence, or a token range of it, as it was written."""

    sequence_id: str
    token_ids: Int32[np.ndarray, " tokens"]
    loss_mask: Bool[np.ndarray, " tokens"]
    greedy: bool
    states: dict[str, EncodedStates]


def _decoded(record: LayerRecord, encoded: EncodedStates) -> Float32[np.ndarray, "tokens hidden"]:
    return decode(record.encoding, encoded, channel_scales=record.channel_scale_array)


class Store:
    """A store open for reading."""

    def __init__(self, files: Files, identity: StoreIdentity):
        self.files = files
        self.identity = identity
        self._catalog: Catalog | None = None

    @property
    def layers(self) -> dict[str, LayerRecord]:
        """The stored layers by name, decoder layers in order, as they are recorded now."""
        return read_layers(self.files)

    def origins(self) -> list[dict[str, Any]]:
        """Settings and versions that filled the store; for people."""
        return read_origins(self.files)

    def head_names(self) -> list[str]:
        """Names of all files of head/."""
        return head_files(self.files)

    def head_bytes(self, name: str) -> bytes:
        """A file of head/, its checksum verified."""
        return read_head_file(self.files, name)

    def head_path(self, name: str) -> Path:
        """Where a file or folder of head/ lies, every byte of it verified just now.

        Of an object store it is a copy, which lasts as long as this Store.
        """
        names = [file for file in self.head_names() if f"{file}/".startswith(f"{name}/")]
        if not names:
            raise StoreError(
                f"{self.files} has no head file {name!r}; run `extract` to complete it"
            )
        if isinstance(self.files, LocalFiles):
            for file in names:
                check_head_file(self.files, file)
            return self.files.root / layout.head_file(name)
        for file in names:
            replace_whole(Path(self._head_copy.name, file), read_head_file(self.files, file))
        return Path(self._head_copy.name, name)

    @cached_property
    def _head_copy(self) -> "TemporaryDirectory[str]":
        """Where head files of an object store are copied to; removed with the Store."""
        return TemporaryDirectory(prefix="dflash-head-")

    def snapshot(self, snapshot_id: str | None = None) -> "Snapshot":
        """The sequences committed now, or those of an earlier snapshot.

        Args:
            snapshot_id: `id` of an earlier snapshot of this store; it is given again exactly,
                whatever was committed or repaired since. None takes all shards of now.
        """
        dead = sorted(tombstoned_units(self.files))
        if snapshot_id is not None:
            units = snapshot_id.partition(":")[2]
            unwanted = ~among_units(units, *_columns_of(dead))
            without = {unit for unit, no in zip(dead, unwanted, strict=True) if no}
            catalog = self._committed(without=without)
            keep = among_units(units, catalog.generation, catalog.unit_index)
        else:
            catalog = self._committed(without=set(dead))
            keys = unit_keys(catalog.generation, catalog.unit_index)
            keep = ~np.isin(keys, unit_keys(*_columns_of(dead)))
        catalog = catalog if keep.all() else select([catalog], keep=keep)
        snapshot = Snapshot(self, catalog)
        if snapshot_id is not None and snapshot.id != snapshot_id:
            raise StoreError(
                f"{self.files} does not hold snapshot {snapshot_id}: shards are missing, or the "
                "store is another one; give the store it was taken from"
            )
        return snapshot

    def _committed(self, *, without: Set[UnitId]) -> Catalog:
        self._catalog = read_catalog(self.files, self._catalog, without=without)
        return self._catalog

    def is_complete(self) -> bool:
        """Whether every planned unit is committed; False while nothing is planned."""
        dead = tombstoned_units(self.files)
        planned = sum(planned_counts(self.files)) - len(dead)
        catalog = self._committed(without=dead)
        alive = len(set(catalog.units()) - dead) if dead else len(catalog)
        return 0 < planned <= alive

    def sequence(self, sequence_id: str) -> "StoredSequence":
        """One sequence by its id, for looking around."""
        snapshot = self.snapshot()
        return StoredSequence(snapshot, snapshot.index_of(sequence_id))

    def content_digest(self) -> str:
        """SHA-256 over ids, tokens, masks and encoded states of all sequences, sorted by id.

        Equal for equal data, whatever workers, attempts, shards or generations made it.
        """
        snapshot = self.snapshot()
        digest = hashlib.sha256()
        layers = sorted(self.layers)
        for index in sorted(range(snapshot.num_sequences), key=snapshot.sequence_id):
            _digest_sequence(digest, snapshot.read(index, layers=layers))
        return digest.hexdigest()


def _digest_sequence(digest: "hashlib._Hash", sequence: SequenceStates) -> None:
    parts = [sequence.token_ids, sequence.loss_mask, np.array(sequence.greedy)]
    for name, states in sequence.states.items():
        parts += [np.frombuffer(name.encode(), dtype=np.uint8), states.data]
        parts += [] if states.scales is None else [states.scales]
    digest.update(f"{sequence.sequence_id}\n{len(sequence.token_ids)}\n".encode())
    for part in parts:
        digest.update(np.ascontiguousarray(part).data)


@dataclass(frozen=True)
class StoredSequence:
    """One sequence of a store, for notebooks."""

    snapshot: "Snapshot"
    index: int

    def hidden_states(
        self, *, layers: Sequence[str], tokens: slice = slice(None)
    ) -> Float32[np.ndarray, "tokens layers hidden"]:
        """Decoded states, float32 [tokens, layers, hidden]."""
        records = self.snapshot.store.layers
        read = self.snapshot.read(self.index, layers=layers, tokens=tokens)
        return np.stack([_decoded(records[name], read.states[name]) for name in layers], axis=1)


def _columns_of(
    units: Iterable[UnitId],
) -> tuple[Int64[np.ndarray, " units"], Int64[np.ndarray, " units"]]:
    """Generation and index of some units."""
    pairs = [(unit.generation, unit.index) for unit in units]
    generation, index = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return generation, index


class Snapshot:
    """The sequences committed at one moment; immutable, usable from several threads."""

    def __init__(self, store: Store, catalog: Catalog):
        self.store = store
        self._catalog = catalog
        self._shards = OpenShards(store.files)
        counts = catalog.num_sequences.astype(np.int64)
        self._first_sequence = np.cumsum(counts) - counts

    @cached_property
    def shard_index(self) -> Int32[np.ndarray, " sequences"]:
        """Shard of each sequence, in this snapshot."""
        return np.repeat(np.arange(self.num_shards, dtype=np.int32), self._catalog.num_sequences)

    @cached_property
    def num_tokens(self) -> Int32[np.ndarray, " sequences"]:
        """Tokens of each sequence."""
        return self._catalog.num_tokens

    @cached_property
    def num_supervised(self) -> Int32[np.ndarray, " sequences"]:
        """Positions of each sequence that can be anchors."""
        return self._catalog.num_supervised

    @cached_property
    def greedy(self) -> Bool[np.ndarray, " sequences"]:
        """Whether each sequence's answer is the target's own greedy output."""
        return self._catalog.greedy.view(np.bool_)

    @cached_property
    def held_out(self) -> Bool[np.ndarray, " sequences"]:
        """Whether each sequence is kept from training."""
        return self._catalog.held_out(self.store.identity.held_out_fraction)

    @cached_property
    def id(self) -> str:
        """Digest and units of this set of shards: enough to take the same snapshot again."""
        generation, index = self._catalog.generation, self._catalog.unit_index
        # As `str(UnitId)` writes them, without making millions of those.
        pairs = zip(generation.tolist(), index.tolist(), strict=True)
        units = "\n".join([f"{number:05d}-{place:05d}" for number, place in pairs])
        attempts = self._catalog.attempt.tobytes().hex()
        digest = hashlib.sha256((units + attempts).encode()).hexdigest()
        return f"{digest[:16]}:{format_units(generation, index)}"

    @property
    def id_hash(self) -> UInt64[np.ndarray, " sequences"]:
        """`hash_id` of each sequence's id."""
        return self._catalog.id_hash

    @property
    def num_shards(self) -> int:
        """Committed shards."""
        return len(self._catalog)

    @property
    def num_sequences(self) -> int:
        """Committed sequences, held-out ones included, skipped ones not."""
        return (
            int(self._first_sequence[-1] + self._catalog.num_sequences[-1])
            if self.num_shards
            else 0
        )

    def sequence_id(self, index: int) -> str:
        """The id of a sequence."""
        shard = self._shard_of(index)
        first = int(self._first_sequence[shard])
        lengths = self._catalog.id_bytes[first : index + 1]
        start = int(self._first_text[shard]) + int(lengths[:-1].sum())
        text = self._catalog.text(start, start + int(lengths[-1]))
        name = text.decode(errors="replace")
        if hash_id(name) != int(self._catalog.id_hash[index]):
            raise DamagedShardError(
                f"the id of sequence {index} does not match its hash: remove the folder "
                f"{self.store.files}/{layout.CATALOG}, for commit records say the same"
            )
        return name

    @cached_property
    def _first_text(self) -> Int64[np.ndarray, " shards"]:
        """Where the ids of each shard begin in the text of all ids."""
        # Summed over pieces: a running sum over all sequences would take 8 bytes for each.
        bounds = np.append(self._first_sequence, self.num_sequences)
        starts = np.zeros(len(bounds), dtype=np.int64)
        for low in range(0, self.num_shards, SHARDS_AT_ONCE):
            high = min(low + SHARDS_AT_ONCE, self.num_shards)
            lengths = self._catalog.id_bytes[bounds[low] : bounds[high]]
            sums = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            starts[low : high + 1] = starts[low] + sums[bounds[low : high + 1] - bounds[low]]
        return starts[:-1]

    def index_of(self, sequence_id: str) -> int:
        """The index of a sequence; StoreError if the snapshot does not hold it."""
        index = self.find(sequence_id)
        if index is None:
            raise StoreError(f"{self.store.files} holds no committed sequence {sequence_id!r}")
        return index

    def find(self, sequence_id: str) -> int | None:
        """The index of a sequence; None if the snapshot does not hold it."""
        wanted = hash_id(sequence_id)
        hashes = self._catalog.id_hash
        place = int(np.searchsorted(hashes, np.uint64(wanted), sorter=self._by_hash))
        while place < len(hashes) and int(hashes[self._by_hash[place]]) == wanted:
            index = int(self._by_hash[place])
            if self.sequence_id(index) == sequence_id:
                return index
            place += 1
        return None

    @cached_property
    def _by_hash(self) -> Int64[np.ndarray, " sequences"]:
        return np.argsort(self._catalog.id_hash, kind="stable")

    def read_tokens(
        self, index: int
    ) -> tuple[Int32[np.ndarray, " tokens"], Bool[np.ndarray, " tokens"]]:
        """Token ids and loss mask of a sequence; no states are touched."""
        shard, place = self._locate(index)
        return shard.read_tokens(place)

    def read(
        self,
        index: int,
        *,
        layers: Sequence[str],
        tokens: slice = slice(None),
        out: Destinations | None = None,
    ) -> SequenceStates:
        """A sequence with the states of some layers, every byte verified.

        Args:
            index: of the sequence in this snapshot.
            layers: names of stored layers, any subset.
            tokens: positions to read, step 1.
            out: memory to read the states into, by layer name: contiguous [tokens, width] of the
                stored dtype. None takes reused memory, which returns to the snapshot by itself
                when no array looks at it any more.

        Raises:
            DamagedShardError: data is missing, short or fails its checksum; names the shard.
            StoreError: the shard lacks a layer.
        """
        start, stop, step = tokens.indices(int(self.num_tokens[index]))
        if step != 1:
            raise ValueError(f"token ranges have step 1, got {step}")
        stop = max(start, stop)
        shard, place = self._locate(index)
        token_ids, loss_mask = shard.read_tokens(place)
        return SequenceStates(
            sequence_id=shard.commit.sequence_ids[place],
            token_ids=token_ids[start:stop],
            loss_mask=loss_mask[start:stop],
            greedy=bool(self.greedy[index]),
            states=shard.read_states(place, layers, start, stop, out),
        )

    def skipped(self) -> dict[str, str]:
        """Reason by id of the sequences that were skipped; reads every commit record."""
        commits = map(self.commit_of_shard, range(self.num_shards))
        return {name: why for commit in commits for name, why in commit.skipped.items()}

    def unit_of_shard(self, shard: int) -> UnitId:
        """The unit that a shard index stands for."""
        return self._catalog.unit(shard)

    def commit_of_shard(self, shard: int) -> CommitRecord:
        """The commit record of a shard, read now."""
        return read_commit(self.store.files, self._catalog.unit(shard))

    def losses_of_shard(self, shard: int) -> dict[str, EncodingLoss]:
        """What encoding lost in a shard, by layer, those added later included."""
        unit = self._catalog.unit(shard)
        records = [read_commit(self.store.files, unit), *read_added(self.store.files, unit)]
        return total_losses(record.losses for record in records)

    def _locate(self, index: int) -> tuple[ShardReader, int]:
        shard = self._shard_of(index)
        reader = self._shards.get(self._catalog.unit(shard))
        return reader, index - int(self._first_sequence[shard])

    def _shard_of(self, index: int) -> int:
        return int(np.searchsorted(self._first_sequence, index, side="right")) - 1
