"""Zarr v3 sharded arrays, written as one stream and read by byte range. The only user of zarr.

Raw profile: one Zarr shard file holds the whole array, its inner chunks of 256 tokens one after
another without a codec, then the index. So the file is the tensor itself, padded to whole chunks,
and any Zarr v3 reader opens it, while a token range is one `preadv` for us.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c
from jaxtyping import Shaped

from storage import layout
from storage.commits import ArrayRecord
from storage.files import Files
from storage.schema import CHUNK_TOKENS

_EMPTY_CHUNK = 2**64 - 1


def num_chunks(num_tokens: int) -> int:
    """Inner chunks of an array; at least one, for Zarr knows no shard without chunks."""
    return max(1, -(-num_tokens // CHUNK_TOKENS))


def chunk_index(num_tokens: int, row_bytes: int) -> bytes:
    """The shard index: offset and length of each chunk, little-endian uint64, then CRC-32C."""
    chunk_bytes = CHUNK_TOKENS * row_bytes
    entries = np.full((num_chunks(num_tokens), 2), chunk_bytes, dtype="<u8")
    entries[:, 0] = np.arange(len(entries)) * chunk_bytes
    if num_tokens == 0:
        entries[:] = _EMPTY_CHUNK
    raw = entries.tobytes()
    checksum: int = crc32c(raw)
    return raw + checksum.to_bytes(4, "little")


def array_metadata(
    num_tokens: int, width: int, dtype: str, *, axes: tuple[str, str], attributes: dict[str, Any]
) -> bytes:
    """The `zarr.json` of an array [tokens, width] in the raw profile."""
    little_endian = {"name": "bytes", "configuration": {"endian": "little"}}
    sharding = {
        "chunk_shape": [CHUNK_TOKENS, width],
        "codecs": [little_endian],
        "index_codecs": [little_endian, {"name": "crc32c"}],
        "index_location": "end",
    }
    shard_shape = [num_chunks(num_tokens) * CHUNK_TOKENS, width]
    value = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [num_tokens, width],
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard_shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "dimension_names": list(axes),
        "attributes": attributes,
        "storage_transformers": [],
    }
    return json.dumps(value).encode()


def block_checksums(pieces: Iterable[memoryview], row_bytes: int) -> Iterator[int]:
    """CRC-32C of each run of 256 tokens of the bytes that the pieces make up together."""
    step = CHUNK_TOKENS * row_bytes
    value, room = 0, step
    for piece in pieces:
        while len(piece):
            part, piece = piece[:room], piece[room:]
            value, room = crc32c(part, value), room - len(part)
            if room == 0:
                yield value
                value, room = 0, step
    if room < step:
        yield value


class ArrayWriter:
    """Appends sequences to a new array; memory use does not grow with the array."""

    def __init__(self, files: Files, array_dir: str, *, dtype: str, width: int):
        self._files, self._dir = files, array_dir
        self._dtype, self._width = np.dtype(dtype), width
        self._stream = files.append_stream(layout.array_data(array_dir))
        self._checksums: list[int] = []
        self._num_tokens = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return self._width * self._dtype.itemsize

    def append(self, rows: Shaped[np.ndarray, "tokens width"]) -> None:
        """Appends one whole sequence with one write, its checksums computed on the way."""
        data = bytes_of(rows)
        self._checksums += block_checksums([data], self.row_bytes)
        self._stream.write(data)
        self._num_tokens += len(rows)

    def finish(self, *, axes: tuple[str, str], attributes: dict[str, Any]) -> ArrayRecord:
        """Writes padding, index and metadata, flushed to disk, and says what lies there."""
        padding_tokens = -self._num_tokens % CHUNK_TOKENS
        tail = bytes(padding_tokens * self.row_bytes)
        tail += chunk_index(self._num_tokens, self.row_bytes)
        self._stream.write(tail)
        self._stream.close()
        metadata = array_metadata(
            self._num_tokens, self._width, self._dtype.name, axes=axes, attributes=attributes
        )
        stream = self._files.append_stream(layout.array_metadata(self._dir))
        stream.write(metadata)
        stream.close()
        return ArrayRecord(
            dtype=self._dtype.name,
            num_tokens=self._num_tokens,
            width=self._width,
            chunk_tokens=CHUNK_TOKENS,
            file_bytes=self._num_tokens * self.row_bytes + len(tail),
            checksums=np.array(self._checksums, dtype=np.uint32),
            tail_crc32c=crc32c(tail),
            metadata_crc32c=crc32c(metadata),
        )

    def abandon(self) -> None:
        """Closes the file; what was written is going to be removed."""
        self._stream.abandon()


def bytes_of(rows: Shaped[np.ndarray, "..."]) -> memoryview:
    """The bytes of an array, copied only if they do not lie in one piece."""
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data


def open_with_zarr(array_dir: str | Path) -> Any:
    """The array opened by zarr-python, read-only: for notebooks and for checking the format."""
    import zarr

    return zarr.open_array(array_dir, mode="r")
