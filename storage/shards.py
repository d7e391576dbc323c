"""One committed shard: its token arrays and layer arrays, read by range and verified."""

import errno
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from crc32c import crc32c
from jaxtyping import Bool, Float32, Int32, Shaped

from storage import layout
from storage.arrays import block_checksums, bytes_of, stored_range, unpack_rows
from storage.buffers import BufferPool
from storage.checks import Checks
from storage.commits import (
    TOKEN_BYTES,
    AddedLayers,
    ArrayRecord,
    CommitRecord,
    LayersRecord,
    read_added,
    read_commit,
)
from storage.encodings import EncodedStates
from storage.errors import DamagedShardError, StoreError
from storage.files import Files, RangeReader
from storage.read_cache import CachedRangeReader
from storage.schema import CHUNK_TOKENS, UnitId

OPEN_SHARDS = 32
"""Shards whose files stay open at once."""

Destinations = Mapping[str, Shaped[np.ndarray, "tokens width"]]
"""Caller's memory by layer name: contiguous, of the stored dtype and width."""


class ShardReader:
    """One committed shard; its record and files are opened when first needed. Thread-safe."""

    def __init__(self, files: Files, unit: UnitId, pool: BufferPool):
        self._files, self._pool = files, pool
        self.unit = unit
        self._lock = threading.Lock()
        self._readers: dict[str, RangeReader] = {}
        self._added: list[AddedLayers] = []

    @cached_property
    def commit(self) -> CommitRecord:
        """The commit record; its absence is damage, for a catalog named it."""
        try:
            return read_commit(self._files, self.unit)
        except FileNotFoundError as error:
            raise DamagedShardError(
                f"shard {self.unit} of {self._files} has lost its commit record; "
                "restore it from a copy, or run `store repair`"
            ) from error

    @cached_property
    def _first_token(self) -> list[int]:
        lengths = np.array(self.commit.num_tokens, dtype=np.int64)
        return list((np.cumsum(lengths) - lengths).tolist())

    @cached_property
    def _first_block(self) -> list[int]:
        blocks = -(-np.array(self.commit.num_tokens, dtype=np.int64) // CHUNK_TOKENS)
        return list((np.cumsum(blocks) - blocks).tolist())

    def read_tokens(
        self, place: int
    ) -> tuple[Int32[np.ndarray, " tokens"], Bool[np.ndarray, " tokens"]]:
        """Token ids and loss mask of the sequence at a place of this shard."""
        count = self.commit.num_tokens[place]
        packed = bytearray(count * TOKEN_BYTES)
        path = layout.tokens(self.commit.attempt_dir)
        offset = self._first_token[place] * TOKEN_BYTES
        self._fill(path, offset, [memoryview(packed)], "tokens", place)
        if crc32c(packed) != self.commit.tokens_checksums[place]:
            self._forget(path, offset, [memoryview(packed)])
            raise self._damaged("tokens", place, "its checksum does not match")
        token_ids = np.frombuffer(packed, dtype="<i4", count=count)
        return token_ids, np.frombuffer(packed, dtype=np.bool_, offset=4 * count)

    def read_states(
        self,
        place: int,
        layers: Sequence[str],
        start: int,
        stop: int,
        out: Destinations | None = None,
    ) -> dict[str, EncodedStates]:
        """Encoded states of positions start..stop-1 by layer, into `out` where it is given."""
        states: dict[str, EncodedStates] = {}
        with Checks() as checks:
            for source in self._sources(layers):
                names = [name for name in layers if name in source.layers and name not in states]
                scales = self._read_scales(source, place, names, start, stop)
                for name in names:
                    array = source.layers[name]
                    rows = self._destination(name, array, stop - start, out)
                    path = layout.array(source.attempt_dir, name)
                    checks.add(self._read_array(path, array, name, place, start, rows), rows.nbytes)
                    states[name] = EncodedStates(data=rows, scales=scales.get(name))
        return {name: states[name] for name in layers}

    def _sources(self, layers: Sequence[str]) -> list[LayersRecord]:
        """The records that together hold these layers; StoreError if some are nowhere."""
        wanted = set(layers)
        if wanted <= _names([self.commit]):
            return [self.commit]
        if not wanted <= _names([self.commit, *self._added]):
            # Layers can have been added since this shard was opened.
            self._added = read_added(self._files, self.unit)
        sources = [self.commit, *self._added]
        missing = wanted - _names(sources)
        if missing:
            raise StoreError(
                f"shard {self.unit} of {self._files} lacks layers {', '.join(sorted(missing))}; it "
                f"has {', '.join(sorted(_names(sources)))}: extract into another store, or choose "
                "among these"
            )
        return sources

    def _read_scales(
        self, source: LayersRecord, place: int, layers: Sequence[str], start: int, stop: int
    ) -> dict[str, Float32[np.ndarray, " tokens"]]:
        """Token scales by layer, of those layers that have any."""
        columns = [name for name in layers if name in source.scale_columns]
        if not columns or source.scales is None:
            return {}
        rows = self._destination("scales", source.scales, stop - start, None)
        path = layout.scales(source.attempt_dir)
        self._read_array(path, source.scales, "scales", place, start, rows)()
        by_layer = np.ascontiguousarray(rows.T)
        return {name: by_layer[source.scale_columns.index(name)] for name in columns}

    def _destination(
        self, name: str, array: ArrayRecord, num_tokens: int, out: Destinations | None
    ) -> Shaped[np.ndarray, "tokens width"]:
        shape = (num_tokens, array.width)
        if out is None:
            memory = self._pool.take(num_tokens * array.row_bytes)
            return memory.view(array.dtype).reshape(shape)
        rows = out[name]
        if rows.shape != shape or rows.dtype != array.dtype or not rows.flags.c_contiguous:
            raise ValueError(
                f"layer {name}: the destination must be contiguous {array.dtype} of shape {shape}, "
                f"got {rows.dtype} of shape {rows.shape}"
            )
        return rows

    def _read_array(
        self,
        path: str,
        array: ArrayRecord,
        name: str,
        place: int,
        start: int,
        rows: Shaped[np.ndarray, "tokens width"],
    ) -> Callable[[], None]:
        """Fills `rows` from position `start` of a sequence on; gives what verifies every byte.

        Checksums cover blocks of 256 tokens, so up to 255 tokens before and behind the range
        are read too, into scratch memory beside the destination.
        """
        stop = start + len(rows)
        first, last = start // CHUNK_TOKENS, -(-stop // CHUNK_TOKENS)
        low, high = first * CHUNK_TOKENS, min(last * CHUNK_TOKENS, self.commit.num_tokens[place])
        if start == stop:
            return lambda: None
        before = memoryview(bytearray((start - low) * array.row_bytes))
        behind = memoryview(bytearray((high - stop) * array.row_bytes))
        pieces = stored = [before, bytes_of(rows), behind]
        first_row = self._first_token[place] + low
        offset, num_bytes = stored_range(array, first_row, self._first_token[place] + high)
        if array.chunk_bytes is not None:
            stored = [self._pool.take(num_bytes).data]
        data_path = layout.array_data(path)
        self._fill(data_path, offset, stored, name, place)

        def verify() -> None:
            try:
                if array.chunk_bytes is not None:
                    self._unpack(array, name, place, first_row, stored[0], pieces)
                self._verify(array, name, place, first, last, pieces)
            except DamagedShardError:
                self._forget(data_path, offset, stored)
                raise

        return verify

    def _unpack(
        self,
        array: ArrayRecord,
        name: str,
        place: int,
        first_row: int,
        stored: memoryview,
        pieces: Sequence[memoryview],
    ) -> None:
        try:
            unpack_rows(array, stored, first_row, pieces)
        except DamagedShardError as error:
            raise self._damaged(name, place, str(error), error.chunk) from error

    def _verify(
        self,
        array: ArrayRecord,
        name: str,
        place: int,
        first: int,
        last: int,
        pieces: Sequence[memoryview],
    ) -> None:
        """Raises unless the pieces are checksum blocks first..last-1 of a sequence."""
        found = np.array(list(block_checksums(pieces, array.row_bytes)), dtype=np.uint32)
        block = self._first_block[place] + first
        damaged = np.flatnonzero(found != array.checksums[block : block + last - first])
        if len(damaged):
            token = self._first_token[place] + CHUNK_TOKENS * (first + int(damaged[0]))
            chunk = token // CHUNK_TOKENS
            raise self._damaged(name, place, f"chunk {chunk} does not match its checksum", chunk)

    def _fill(
        self, path: str, offset: int, buffers: Sequence[memoryview], name: str, place: int
    ) -> None:
        try:
            self._reader(path).read_into(offset, buffers)
        except OSError as error:
            why = _why_unreadable(error)
            if why is None:
                raise
            raise self._damaged(name, place, f"{self._files}/{path} {why}") from error

    def _forget(self, path: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Keeps a range that failed its checksum from being read again out of a cache."""
        reader = self._reader(path)
        if isinstance(reader, CachedRangeReader):
            reader.forget(offset, buffers)

    def _reader(self, path: str) -> RangeReader:
        reader = self._readers.get(path)
        if reader is None:
            with self._lock:
                if path not in self._readers:
                    self._readers[path] = self._files.range_reader(path)
                reader = self._readers[path]
        return reader

    def _damaged(
        self, name: str, place: int, why: str, chunk: int | None = None
    ) -> DamagedShardError:
        sequence_id = self.commit.sequence_ids[place]
        error = DamagedShardError(
            f"shard {self.unit} of {self._files} is damaged: layer {name}, sequence "
            f"{sequence_id!r}: {why}; run `store verify`, then `store repair`"
        )
        error.shard, error.layer, error.chunk = str(self.unit), name, chunk
        error.sequence_id = sequence_id
        return error


def _names(records: Sequence[LayersRecord]) -> set[str]:
    return {name for record in records for name in record.layers}


def _why_unreadable(error: OSError) -> str | None:
    """What is wrong with a file of a shard; None if the error is not the file's fault."""
    if isinstance(error, FileNotFoundError):
        return "is missing"
    if isinstance(error, DamagedShardError):
        return "is too short"
    if error.errno in (errno.EIO, errno.ESTALE):
        return f"cannot be read ({error.strerror})"
    return None


class OpenShards:
    """The shards used last, kept open; the oldest is let go when there are too many."""

    def __init__(self, files: Files):
        self._files = files
        self._pool = BufferPool()
        self._lock = threading.Lock()
        self._open: OrderedDict[Any, ShardReader] = OrderedDict()

    def get(self, unit: UnitId) -> ShardReader:
        """The shard of a unit, opened if need be."""
        with self._lock:
            reader = self._open.get(unit)
            if reader is None:
                reader = self._open[unit] = ShardReader(self._files, unit, self._pool)
                if len(self._open) > OPEN_SHARDS:
                    self._open.popitem(last=False)
            self._open.move_to_end(unit)
            return reader
