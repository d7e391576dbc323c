"""Zarr v3 sharded arrays, written as one stream and read by byte range. The only user of zarr.

Raw profile: one Zarr shard file holds the whole array, its inner chunks of 256 tokens one after
another without a codec, then the index. So the file is the tensor itself, padded to whole chunks,
and any Zarr v3 reader opens it, while a token range is one `preadv` for us. In the packed profile
each chunk is compressed by itself; where it lies stands in the commit record, too.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c
from jaxtyping import Shaped, UInt32

from storage import layout
from storage.commits import ArrayRecord
from storage.errors import DamagedShardError
from storage.files import Files, RangeReader
from storage.packing import pack, packing_codecs, unpack
from storage.schema import CHUNK_TOKENS

_EMPTY_CHUNK = 2**64 - 1


def num_chunks(num_tokens: int) -> int:
    """Inner chunks of an array; at least one, for Zarr knows no shard without chunks."""
    return max(1, -(-num_tokens // CHUNK_TOKENS))


def chunk_index(chunk_bytes: Sequence[int]) -> bytes:
    """The shard index: offset and length of each chunk, little-endian uint64, then CRC-32C."""
    entries = np.full((max(1, len(chunk_bytes)), 2), _EMPTY_CHUNK, dtype="<u8")
    if len(chunk_bytes):
        sizes = np.array(chunk_bytes, dtype=np.uint64)
        entries[:, 0], entries[:, 1] = np.cumsum(sizes) - sizes, sizes
    raw = entries.tobytes()
    checksum: int = crc32c(raw)
    return raw + checksum.to_bytes(4, "little")


def array_metadata(
    num_tokens: int,
    width: int,
    dtype: str,
    *,
    axes: tuple[str, str],
    attributes: dict[str, Any],
    packing: str | None = None,
) -> bytes:
    """The `zarr.json` of an array [tokens, width]; in the raw profile without a packing."""
    little_endian = {"name": "bytes", "configuration": {"endian": "little"}}
    sharding = {
        "chunk_shape": [CHUNK_TOKENS, width],
        "codecs": [little_endian, *(packing_codecs(packing, dtype) if packing else [])],
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

    def __init__(
        self, files: Files, array_dir: str, *, dtype: str, width: int, packing: str | None = None
    ):
        self._files, self._dir = files, array_dir
        self._dtype, self._width = np.dtype(dtype), width
        self._packer = None if packing is None else _Packer(packing, self._dtype, width)
        self._packing = packing
        self._stream = files.append_stream(layout.array_data(array_dir))
        self._checksums: list[int] = []
        self._num_tokens = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return self._width * self._dtype.itemsize

    def append(self, rows: Shaped[np.ndarray, "tokens width"]) -> None:
        """Appends one whole sequence with one write, its checksums computed on the way.

        Packed, it is one write for each chunk that becomes full.
        """
        data = bytes_of(rows)
        self._checksums += block_checksums([data], self.row_bytes)
        if self._packer is None:
            self._stream.write(data)
        else:
            for packed in self._packer.add(rows):
                self._stream.write(packed)
        self._num_tokens += len(rows)

    def finish(self, *, axes: tuple[str, str], attributes: dict[str, Any]) -> ArrayRecord:
        """Writes padding, index and metadata, flushed to disk, and says what lies there."""
        data_bytes, chunk_bytes, tail = self._end_of_data()
        self._stream.write(tail)
        self._stream.close()
        metadata = array_metadata(
            self._num_tokens,
            self._width,
            self._dtype.name,
            axes=axes,
            attributes=attributes,
            packing=self._packing,
        )
        stream = self._files.append_stream(layout.array_metadata(self._dir))
        stream.write(metadata)
        stream.close()
        return ArrayRecord(
            dtype=self._dtype.name,
            num_tokens=self._num_tokens,
            width=self._width,
            chunk_tokens=CHUNK_TOKENS,
            file_bytes=data_bytes + len(tail),
            checksums=np.array(self._checksums, dtype=np.uint32),
            tail_crc32c=crc32c(tail),
            metadata_crc32c=crc32c(metadata),
            chunk_bytes=chunk_bytes,
        )

    def _end_of_data(self) -> tuple[int, UInt32[np.ndarray, " chunks"] | None, bytes]:
        """(bytes before the tail, stored bytes of each chunk if packed, the tail)."""
        if self._packer is None:
            data_bytes = self._num_tokens * self.row_bytes
            padding = bytes(-self._num_tokens % CHUNK_TOKENS * self.row_bytes)
            count = -(-self._num_tokens // CHUNK_TOKENS)
            return data_bytes, None, padding + chunk_index([CHUNK_TOKENS * self.row_bytes] * count)
        for packed in self._packer.rest():
            self._stream.write(packed)
        sizes = np.array(self._packer.sizes, dtype=np.uint32)
        return int(sizes.sum(dtype=np.int64)), sizes, chunk_index(self._packer.sizes)

    def abandon(self) -> None:
        """Closes the file; what was written is going to be removed."""
        self._stream.abandon()


class _Packer:
    """Gathers rows into chunks and packs each that is full."""

    def __init__(self, packing: str, dtype: np.dtype[Any], width: int):
        self.sizes: list[int] = []
        """Stored bytes of each chunk so far."""
        self._packing = packing
        self._chunk = np.zeros((CHUNK_TOKENS, width), dtype=dtype)
        self._num_tokens = 0

    def add(self, rows: Shaped[np.ndarray, "tokens width"]) -> Iterator[bytes]:
        """Takes rows in, gives the chunks that they fill."""
        while len(rows):
            room = CHUNK_TOKENS - self._num_tokens
            part, rows = rows[:room], rows[room:]
            self._chunk[self._num_tokens : self._num_tokens + len(part)] = part
            self._num_tokens += len(part)
            if self._num_tokens == CHUNK_TOKENS:
                yield self._packed()

    def rest(self) -> Iterator[bytes]:
        """The last chunk, filled up with zeros, if rows are left for one."""
        if self._num_tokens:
            self._chunk[self._num_tokens :] = 0
            yield self._packed()

    def _packed(self) -> bytes:
        packed = pack(self._packing, self._chunk)
        self.sizes.append(len(packed))
        self._num_tokens = 0
        return packed


def stored_range(array: ArrayRecord, start: int, stop: int) -> tuple[int, int]:
    """(offset, bytes) of what has to be read for rows start..stop-1 of an array."""
    if array.chunk_bytes is None:
        return start * array.row_bytes, (stop - start) * array.row_bytes
    first, last = start // CHUNK_TOKENS, -(-stop // CHUNK_TOKENS)
    sizes = array.chunk_bytes.astype(np.int64)
    return int(sizes[:first].sum()), int(sizes[first:last].sum())


def read_rows(reader: RangeReader, array: ArrayRecord, start: int, out: memoryview) -> None:
    """Fills `out` with rows from `start` on, whichever way they lie."""
    offset, num_bytes = stored_range(array, start, start + len(out) // array.row_bytes)
    if array.chunk_bytes is None:
        reader.read_into(offset, [out])
        return
    stored = memoryview(bytearray(num_bytes))
    reader.read_into(offset, [stored])
    unpack_rows(array, stored, start, [out])


def end_of_data(array: ArrayRecord) -> int:
    """Where the tail of an array's file begins."""
    if array.chunk_bytes is None:
        return array.num_tokens * array.row_bytes
    return int(array.chunk_bytes.sum(dtype=np.int64))


def unpack_rows(
    array: ArrayRecord, stored: memoryview, start: int, buffers: Sequence[memoryview]
) -> None:
    """Fills the buffers, one after another, with rows from `start` on of a packed array.

    Args:
        array: the array.
        stored: the bytes of `stored_range` of these rows.
        start: the first row.
        buffers: whole rows together.

    Raises:
        DamagedShardError: a chunk does not match its checksum.
    """
    assert array.chunk_bytes is not None
    chunk_bytes = CHUNK_TOKENS * array.row_bytes
    scratch: memoryview | None = None
    left = memoryview(b"")  # What a chunk that was unpacked into scratch memory still has to give.
    chunk, skipped = divmod(start * array.row_bytes, chunk_bytes)
    for buffer in buffers:
        while len(buffer):
            if not len(left):
                is_straight = skipped == 0 and len(buffer) >= chunk_bytes
                scratch = scratch or memoryview(bytearray(chunk_bytes))
                unpacked = buffer[:chunk_bytes] if is_straight else scratch
                stored = _unpack_next(array, chunk, stored, unpacked)
                left, skipped, chunk = unpacked[skipped:], 0, chunk + 1
                if is_straight:
                    buffer, left = buffer[chunk_bytes:], left[:0]
                    continue
            count = min(len(buffer), len(left))
            buffer[:count] = left[:count]
            buffer, left = buffer[count:], left[count:]


def _unpack_next(array: ArrayRecord, chunk: int, stored: memoryview, out: memoryview) -> memoryview:
    """Unpacks the chunk that comes first in `stored`; gives what is stored behind it."""
    assert array.chunk_bytes is not None
    size = int(array.chunk_bytes[chunk])
    try:
        unpack(stored[:size], out)
    except DamagedShardError as error:
        error.chunk = chunk
        raise
    return stored[size:]


def bytes_of(rows: Shaped[np.ndarray, "..."]) -> memoryview:
    """The bytes of an array, copied only if they do not lie in one piece."""
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data


def open_with_zarr(array_dir: str | Path) -> Any:
    """The array opened by zarr-python, read-only: for notebooks and for checking the format."""
    import zarr

    return zarr.open_array(array_dir, mode="r")
