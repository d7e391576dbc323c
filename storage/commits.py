"""The commit record of a shard: what exists, how large, with which checksums."""

import base64
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from jaxtyping import UInt32

from storage import layout
from storage.errors import DamagedShardError, StoreError
from storage.files import Files
from storage.losses import EncodingLoss
from storage.records import read_record
from storage.schema import UnitId, ids_digest

RAW, PACKED = "raw", "packed"
"""How chunks lie in an array's file, one after another: as they are, or packed without loss."""

PARALLEL_LISTINGS = 16

TOKEN_BYTES = 5
"""Bytes of one token in the tokens file: int32 id and uint8 loss mask."""


def pack_uint32(values: UInt32[np.ndarray, " count"]) -> str:
    """Base64 of little-endian uint32 values, for JSON."""
    return base64.b64encode(np.ascontiguousarray(values, dtype="<u4").data).decode()


def unpack_uint32(text: str) -> UInt32[np.ndarray, " count"]:
    """The values that `pack_uint32` wrote."""
    return np.frombuffer(base64.b64decode(text, validate=True), dtype="<u4")


@dataclass(frozen=True, kw_only=True)
class ArrayRecord:
    """One Zarr array of a shard, so that readers never open its `zarr.json`.

    Chunk i of the raw profile lies at byte `i * chunk_tokens * width * itemsize` of the data file,
    in the packed one behind the chunks before it.
    """

    dtype: str
    num_tokens: int
    width: int
    chunk_tokens: int
    file_bytes: int
    checksums: UInt32[np.ndarray, " blocks"]
    """CRC-32C of each checksum block: 256 tokens counted from the start of each sequence, as they
    are when unpacked."""
    tail_crc32c: int
    """CRC-32C of what follows the last token: the last chunk's padding and the index; in the
    packed profile what follows the last chunk."""
    metadata_crc32c: int
    """CRC-32C of `zarr.json`."""
    chunk_bytes: UInt32[np.ndarray, " chunks"] | None = None
    """Stored bytes of each chunk of the packed profile; None in the raw one."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return self.width * np.dtype(self.dtype).itemsize

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values."""
        value = {**self.__dict__, "profile": RAW, "checksums": pack_uint32(self.checksums)}
        del value["chunk_bytes"]
        if self.chunk_bytes is None:
            return value
        return {**value, "profile": PACKED, "chunk_bytes": pack_uint32(self.chunk_bytes)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "ArrayRecord":
        """The record read back from a commit; members that this version does not know are left."""
        profile = value["profile"]
        if profile not in (RAW, PACKED):
            raise StoreError(
                f"an array has profile {profile!r}, this program reads {RAW!r} and {PACKED!r}; "
                "use a newer one"
            )
        names = {each.name for each in fields(cls)}
        known = {name: member for name, member in value.items() if name in names}
        known["checksums"] = unpack_uint32(value["checksums"])
        if profile == PACKED:
            known["chunk_bytes"] = unpack_uint32(value["chunk_bytes"])
        return cls(**known)


@dataclass(frozen=True, kw_only=True)
class LayersRecord:
    """Layer arrays that one attempt at a unit wrote."""

    unit: UnitId
    attempt: str
    layers: dict[str, ArrayRecord]
    scales: ArrayRecord | None
    """Token scales, float32 [tokens, scale_columns]; None if no layer has any."""
    scale_columns: list[str]
    """Layer of each column of `scales`."""
    losses: dict[str, EncodingLoss] = field(default_factory=dict)
    """What encoding lost, by layer; empty where nobody measured."""

    @property
    def attempt_dir(self) -> str:
        """Folder of the data, relative to the store."""
        return layout.attempt(self.unit, self.attempt)

    def arrays(self) -> Iterator[tuple[str, str, ArrayRecord]]:
        """(name, folder, record) of each layer's array, then of the scales."""
        for name, array in self.layers.items():
            yield name, layout.array(self.attempt_dir, name), array
        if self.scales is not None:
            yield "scales", layout.scales(self.attempt_dir), self.scales

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values."""
        return {
            **self.__dict__,
            "unit": str(self.unit),
            "layers": {name: array.to_json() for name, array in self.layers.items()},
            "scales": None if self.scales is None else self.scales.to_json(),
            "losses": {name: loss.to_json() for name, loss in self.losses.items()},
        }


def _layers_from_json(kind: type[LayersRecord], value: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a record; members that this version does not know are left out."""
    known = {each.name for each in fields(kind)}
    return {
        **{name: member for name, member in value.items() if name in known},
        "unit": UnitId.parse(value["unit"]),
        "layers": {name: ArrayRecord.from_json(a) for name, a in value["layers"].items()},
        "scales": None if value["scales"] is None else ArrayRecord.from_json(value["scales"]),
        "losses": {name: EncodingLoss(**loss) for name, loss in value.get("losses", {}).items()},
    }


@dataclass(frozen=True, kw_only=True)
class AddedLayers(LayersRecord):
    """Layers added to a committed unit; sequences and their order are the commit's."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "AddedLayers":
        """The record read back from `added/`."""
        return cls(**_layers_from_json(cls, value))


@dataclass(frozen=True, kw_only=True)
class CommitRecord(LayersRecord):
    """One committed shard. Sequences are listed in the order of their tokens in the arrays."""

    sequence_ids: list[str]
    num_tokens: list[int]
    num_supervised: list[int]
    greedy: list[bool]
    tokens_checksums: UInt32[np.ndarray, " sequences"]
    """CRC-32C of each sequence's bytes in the tokens file."""
    skipped: dict[str, str]
    """Reason by id, of planned sequences that hold no states."""

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values."""
        return {
            **super().to_json(),
            "ids_sha256": ids_digest([*self.sequence_ids, *self.skipped]),
            "greedy": [int(flag) for flag in self.greedy],
            "tokens_checksums": pack_uint32(self.tokens_checksums),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "CommitRecord":
        """The record read back from `commits/`."""
        known = _layers_from_json(cls, value)
        known["greedy"] = [bool(flag) for flag in value["greedy"]]
        known["tokens_checksums"] = unpack_uint32(value["tokens_checksums"])
        return cls(**known)


def read_commit(files: Files, unit: UnitId) -> CommitRecord:
    """The commit of a unit; FileNotFoundError if it has none."""
    return CommitRecord.from_json(read_commit_values(files, unit))


def read_commit_values(files: Files, unit: UnitId) -> dict[str, Any]:
    """The commit record of a unit as it is written; FileNotFoundError if there is none."""
    path = layout.commit(unit)
    try:
        return read_record(files, path)
    except DamagedShardError as error:
        raise DamagedShardError(
            f"{files}/{path} is damaged (its checksum does not match); restore this file from a"
            " copy, or give its shard up with `store repair`"
        ) from error


def read_added(files: Files, unit: UnitId) -> list[AddedLayers]:
    """The records of layers added to a unit."""
    folder = layout.added_folder(unit)
    return [
        AddedLayers.from_json(read_record(files, f"{folder}/{name}"))
        for name in files.names(folder)
    ]


def layers_of(files: Files, unit: UnitId) -> set[str]:
    """Names of all layers that a committed unit holds."""
    records = [read_commit(files, unit), *read_added(files, unit)]
    return {name for record in records for name in record.layers}


def committed_units(files: Files) -> set[UnitId]:
    """Every unit that has a commit record, tombstoned ones included."""
    folders = [f"{layout.COMMITS}/{fan_out}" for fan_out in files.names(layout.COMMITS)]
    # Side by side: up to 256 requests of an object store, which take their time.
    with ThreadPoolExecutor(PARALLEL_LISTINGS) as pool:
        listings = list(pool.map(files.names, folders))
    return {UnitId.parse(name.removesuffix(".json")) for names in listings for name in names}


def tombstoned_units(files: Files) -> set[UnitId]:
    """Every unit taken out of new snapshots because its shard is damaged."""
    return {UnitId.parse(name.removesuffix(".json")) for name in files.names(layout.TOMBSTONES)}
