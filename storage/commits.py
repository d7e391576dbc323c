"""The commit record of a shard: what exists, how large, with which checksums."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import UInt32

from storage import layout
from storage.files import Files
from storage.records import read_record
from storage.schema import UnitId, ids_digest

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

    Chunk i of the raw profile lies at byte `i * chunk_tokens * width * itemsize` of the data file.
    """

    dtype: str
    num_tokens: int
    width: int
    chunk_tokens: int
    file_bytes: int
    checksums: UInt32[np.ndarray, " blocks"]
    """CRC-32C of each checksum block: 256 tokens counted from the start of each sequence."""
    tail_crc32c: int
    """CRC-32C of what follows the last token: the last chunk's padding and the index."""
    metadata_crc32c: int
    """CRC-32C of `zarr.json`."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return self.width * np.dtype(self.dtype).itemsize

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values."""
        return {**self.__dict__, "profile": "raw", "checksums": pack_uint32(self.checksums)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "ArrayRecord":
        """The record read back from a commit."""
        known = {k: v for k, v in value.items() if k != "profile"}
        return cls(**{**known, "checksums": unpack_uint32(value["checksums"])})


@dataclass(frozen=True, kw_only=True)
class CommitRecord:
    """One committed shard. Sequences are listed in the order of their tokens in the arrays."""

    unit: UnitId
    attempt: str
    sequence_ids: list[str]
    num_tokens: list[int]
    num_supervised: list[int]
    greedy: list[bool]
    tokens_checksums: UInt32[np.ndarray, " sequences"]
    skipped: dict[str, str]
    """Reason by id, of planned sequences that hold no states."""
    layers: dict[str, ArrayRecord]
    scales: ArrayRecord | None
    """Token scales, float32 [tokens, scale_columns]; None if no layer has any."""
    scale_columns: list[str]
    """Layer of each column of `scales`."""

    @property
    def attempt_dir(self) -> str:
        """Folder of the shard's data, relative to the store."""
        return layout.attempt(self.unit, self.attempt)

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values."""
        return {
            **self.__dict__,
            "unit": str(self.unit),
            "ids_sha256": ids_digest([*self.sequence_ids, *self.skipped]),
            "greedy": [int(flag) for flag in self.greedy],
            "tokens_checksums": pack_uint32(self.tokens_checksums),
            "layers": {name: array.to_json() for name, array in self.layers.items()},
            "scales": None if self.scales is None else self.scales.to_json(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "CommitRecord":
        """The record read back from `commits/`."""
        known = {k: v for k, v in value.items() if k != "ids_sha256"}
        known["unit"] = UnitId.parse(value["unit"])
        known["greedy"] = [bool(flag) for flag in value["greedy"]]
        known["tokens_checksums"] = unpack_uint32(value["tokens_checksums"])
        known["layers"] = {n: ArrayRecord.from_json(a) for n, a in value["layers"].items()}
        known["scales"] = None if not value["scales"] else ArrayRecord.from_json(value["scales"])
        return cls(**known)


def read_commit(files: Files, unit: UnitId) -> CommitRecord:
    """The commit of a unit; FileNotFoundError if it has none."""
    return CommitRecord.from_json(read_record(files, layout.commit(unit)))


def committed_units(files: Files) -> set[UnitId]:
    """Every unit that has a commit record, tombstoned ones included."""
    return {
        UnitId.parse(name.removesuffix(".json"))
        for fan_out in files.names(layout.COMMITS)
        for name in files.names(f"{layout.COMMITS}/{fan_out}")
    }


def tombstoned_units(files: Files) -> set[UnitId]:
    """Every unit taken out of new snapshots because its shard is damaged."""
    return {UnitId.parse(name.removesuffix(".json")) for name in files.names(layout.TOMBSTONES)}
