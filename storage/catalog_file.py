"""A catalog in a file: a header, then columns with a checksum each, read when they are needed.

So opening a store of 100 M sequences reads what planning an epoch takes, not every id.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from crc32c import crc32c
from jaxtyping import Bool, Shaped, UInt8

from storage import layout
from storage.arrays import bytes_of
from storage.catalog import Catalog, read_catalog, select
from storage.errors import DamagedShardError
from storage.files import Files, RangeReader
from storage.schema import held_out_mask, unit_keys

MAGIC = b"DFLCAT02"
FIRST_MAGIC = b"DFLCAT01"
"""Of files with one checksum at their end, which are still read, whole."""
START_BYTES = len(MAGIC) + 8
"""Magic and the length of the header's text."""
CHECKSUM_BYTES = 4
ALIGNMENT = 64
"""Columns start at multiples of this, in bytes."""
WHOLE_BYTES = 32 * 2**20
"""Size up to which a catalog file is read whole, by one request."""
HEAD_BYTES = 4096
"""Bytes in which the start and header of any catalog file lie."""
READ_BYTES = 16 * 2**20
"""Bytes of one read of a large column; a multiple of ALIGNMENT."""
FEW_TEXTS = 64
"""Single ids read from a large file, after which all of them are read at once."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """Where a column lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    crc32c: int

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


class StoredCatalog(Catalog):
    """A catalog whose columns are read from its file, and checked, when they are first used.

    Where `store gc` removed an old file meanwhile, as an object store lets it, what was not read
    yet comes from the commits of now: they say the same of the same shards.
    """

    def __init__(
        self,
        reader: RangeReader,
        columns: dict[str, Column],
        *,
        place: str,
        files: Files | None = None,
    ):
        # The base is frozen.
        for name, value in (
            ("_reader", reader),
            ("_columns", columns),
            ("_place", place),
            ("_files", files),
            ("_num_texts", 0),
        ):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """Reads a column; called for what the instance does not hold yet."""
        columns: dict[str, Column] = object.__getattribute__(self, "_columns")
        if name not in columns:
            raise AttributeError(name)
        try:
            column = self._read(columns[name], name)
        except FileNotFoundError:
            self._take_from_commits()
            return self.__dict__[name]
        object.__setattr__(self, name, column)
        return column

    def _take_from_commits(self) -> None:
        """Takes all columns from the catalog of now; DamagedShardError if it is of other shards."""
        if self._files is None or not {"generation", "unit_index"} <= self.__dict__.keys():
            raise DamagedShardError(f"{self._place} was removed; start again, for nothing is lost")
        now = read_catalog(self._files)
        wanted = unit_keys(self.generation, self.unit_index)
        keep = np.isin(unit_keys(now.generation, now.unit_index), wanted)
        found = select([now], keep=keep)
        shapes = {each.name: getattr(found, each.name).shape for each in fields(Catalog)}
        if any(shapes[name] != column.shape for name, column in self._columns.items()):
            raise DamagedShardError(
                f"{self._place} was removed, and commit records of its shards are missing; "
                "run `store verify`"
            )
        for each in fields(Catalog):
            object.__setattr__(self, each.name, getattr(found, each.name))

    def _read(self, column: Column, name: str) -> Shaped[np.ndarray, "..."]:
        memory = np.empty(_padded(column.num_bytes), dtype=np.uint8)
        start = 0
        for piece in self._pieces(column, name):
            memory[start : start + len(piece)] = piece
            start += len(piece)
        return memory[: column.num_bytes].view(column.dtype).reshape(column.shape)

    def _pieces(self, column: Column, name: str) -> Iterator[UInt8[np.ndarray, " bytes"]]:
        """The bytes of a column, each piece overwritten by the next; raises behind the last."""
        size = _padded(column.num_bytes)
        memory = np.empty(min(size, READ_BYTES), dtype=np.uint8)
        checksum = 0
        for start in range(0, size, READ_BYTES):
            piece = memory[: size - start]
            self._reader.read_into(column.offset + start, [piece.data])
            checksum = crc32c(piece.data, checksum)
            yield piece
        if checksum != column.crc32c:
            raise DamagedShardError(
                f"{self._place} is damaged: column {name} does not match its checksum; remove this "
                "file, for commit records say the same"
            )

    def held_out(self, fraction: float) -> Bool[np.ndarray, " sequences"]:
        """Which sequences are kept from training; the hashes are read, but not kept."""
        if "id_hash" in self.__dict__:
            return super().held_out(fraction)
        column = self._columns["id_hash"]
        pieces = self._pieces(column, "id_hash")
        try:
            masks = [held_out_mask(piece.view(column.dtype), fraction) for piece in pieces]
        except FileNotFoundError:
            self._take_from_commits()
            return super().held_out(fraction)
        return np.concatenate(masks)[: column.shape[0]] if masks else np.zeros(0, dtype=np.bool_)

    def text(self, start: int, stop: int) -> bytes:
        """A piece of `id_text`: a few are read alone, unchecked (an id is checked by its hash)."""
        if "id_text" in self.__dict__ or self._num_texts >= FEW_TEXTS:
            return super().text(start, stop)
        object.__setattr__(self, "_num_texts", self._num_texts + 1)
        memory = bytearray(stop - start)
        try:
            self._reader.read_into(self._columns["id_text"].offset + start, [memoryview(memory)])
        except FileNotFoundError:
            self._take_from_commits()
            return super().text(start, stop)
        return bytes(memory)


class _Bytes:
    """A RangeReader over bytes in memory."""

    def __init__(self, data: bytes):
        self._data = data

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fills the buffers from `offset` on."""
        for buffer in buffers:
            piece = self._data[offset : offset + len(buffer)]
            if len(piece) < len(buffer):
                raise DamagedShardError("it ends too early")
            buffer[:] = piece
            offset += len(buffer)

    def close(self) -> None:
        """Nothing is held open."""


def _padded(num_bytes: int) -> int:
    return num_bytes + -num_bytes % ALIGNMENT


def _padding(num_bytes: int) -> bytes:
    """Zeros after a column, up to where the next may start; its checksum holds them, too."""
    return bytes(_padded(num_bytes) - num_bytes)


def write_catalog(files: Files, catalog: Catalog, *, num_generations: int) -> str:
    """Writes a catalog file piece by piece and returns its name; an equal one may be there."""
    columns = {field.name: bytes_of(getattr(catalog, field.name)) for field in fields(Catalog)}
    head = _head(catalog, columns, num_generations)
    name = f"{len(catalog):08d}-{crc32c(head):08x}.bin"
    stream = files.replacing_stream(layout.catalog(name))
    try:
        stream.write(head)
        for data in columns.values():
            for start in range(0, len(data), READ_BYTES):
                stream.write(data[start : start + READ_BYTES])
            stream.write(_padding(len(data)))
        stream.close()
    except BaseException:
        stream.abandon()
        raise
    files.sync_tree(layout.CATALOG)
    return name


def _head(catalog: Catalog, columns: dict[str, memoryview], num_generations: int) -> bytes:
    """Magic, length, header as JSON and its checksum, filled up with spaces to HEAD_BYTES."""
    offset = HEAD_BYTES
    described = {}
    for name, data in columns.items():
        array = getattr(catalog, name)
        described[name] = {
            "dtype": array.dtype.str,
            "shape": list(array.shape),
            "offset": offset,
            "crc32c": crc32c(_padding(len(data)), crc32c(data)),
        }
        offset += _padded(len(data))
    header = {"num_generations_complete": num_generations, "columns": described}
    text = json.dumps(header).encode().ljust(HEAD_BYTES - START_BYTES - CHECKSUM_BYTES)
    head = MAGIC + len(text).to_bytes(8, "little") + text
    checksum: int = crc32c(head)
    return head + checksum.to_bytes(CHECKSUM_BYTES, "little")


def open_catalog(files: Files, name: str) -> tuple[Catalog, int]:
    """The catalog in a file and how many generations it holds completely.

    Raises:
        DamagedShardError: it is damaged, or of another format.
    """
    path = layout.catalog(name)
    place = f"{files}/{path}"
    if files.size(path) > WHOLE_BYTES:
        reader = files.range_reader(path)
        magic = bytearray(len(MAGIC))
        reader.read_into(0, [memoryview(magic)])
        if magic != FIRST_MAGIC:
            return _parse(reader, place=place, files=files)
    return parse_catalog(files.read(path), place=place)


def parse_catalog(data: bytes, *, place: str = "the catalog") -> tuple[Catalog, int]:
    """The catalog in the bytes of a file, every column checked."""
    if data.startswith(FIRST_MAGIC):
        return _parse_first_format(data, place=place)
    catalog, num_generations = _parse(_Bytes(data), place=place)
    for field in fields(Catalog):
        getattr(catalog, field.name)
    return catalog, num_generations


def _parse(reader: RangeReader, *, place: str, files: Files | None = None) -> tuple[Catalog, int]:
    head = bytearray(HEAD_BYTES)
    reader.read_into(0, [memoryview(head)])
    body, checksum = head[:-CHECKSUM_BYTES], head[-CHECKSUM_BYTES:]
    if head[: len(MAGIC)] != MAGIC or crc32c(body).to_bytes(CHECKSUM_BYTES, "little") != checksum:
        raise DamagedShardError(f"{place}: its header does not match its checksum")
    header = json.loads(body[START_BYTES:])
    columns = {
        name: Column(**{**value, "shape": tuple(value["shape"])})
        for name, value in header["columns"].items()
    }
    stored = StoredCatalog(reader, columns, place=place, files=files)
    return stored, header["num_generations_complete"]


def _parse_first_format(data: bytes, *, place: str) -> tuple[Catalog, int]:
    """Magic, header length, header, columns, CRC-32C of all."""
    if crc32c(memoryview(data)[:-CHECKSUM_BYTES]).to_bytes(CHECKSUM_BYTES, "little") != data[-4:]:
        raise DamagedShardError(f"{place}: its checksum does not match")
    start = START_BYTES + int.from_bytes(data[len(FIRST_MAGIC) : START_BYTES], "little")
    header = json.loads(data[START_BYTES:start])
    columns = {}
    for name, dtype, shape in header["columns"]:
        count = int(np.prod(shape))
        columns[name] = np.frombuffer(data, dtype, count, start).reshape(shape)
        start += columns[name].nbytes
    return Catalog(**columns), header["num_generations_complete"]
