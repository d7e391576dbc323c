"""Keep what was read from a far store on a near disk, up to a size, shared by all processes."""

import contextlib
import errno
import fcntl
import hashlib
import os
import time
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from crc32c import crc32c

from storage.files import AppendStream, Buffer, Files, RangeReader, write_all
from storage.layout import SHARDS, TEMPORARY

CHECKSUM_BYTES = 4
KEPT_FRACTION = 0.9
"""Share of the limit that is kept when room is made, so that it need not be made often."""
FORGOTTEN_AFTER_S = 3600.0
"""Age from which an unfinished file is taken for one that a killed process left."""
TOTAL = "total_bytes"


@dataclass
class _Total:
    num_bytes: int


class ReadCache:
    """Pieces of immutable files in a folder of a local disk; those used longest ago go first.

    Any number of processes share a folder: a piece appears whole or not at all, carries its own
    checksum, and may vanish at any time. Together they exceed the limit by no more than the pieces
    being written. The folder may be removed whenever no process uses it.
    """

    def __init__(self, folder: str | Path, *, limit_bytes: int):
        self.folder, self.limit_bytes = Path(folder), limit_bytes
        self.folder.mkdir(parents=True, exist_ok=True)

    def read_into(self, key: str, buffers: Sequence[memoryview]) -> bool:
        """Fills the buffers with the piece of a key; False if it cannot be had whole."""
        path = self._path(key)
        checksum = bytearray(CHECKSUM_BYTES)
        parts = [*buffers, memoryview(checksum)]
        try:
            with path.open("rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != sum(len(part) for part in parts):
                    return False
                for part in parts:
                    _fill(file.fileno(), part)
                os.utime(file.fileno())  # Used just now.
        except OSError:  # Not there, cut short, another user's, or its disk fails.
            return False
        return _checksum(buffers) == checksum

    def forget(self, key: str) -> None:
        """Removes the piece of a key, if it is there."""
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def put(self, key: str, buffers: Sequence[Buffer]) -> None:
        """Keeps a piece, and lets old ones go if need be; OSError if the disk does not take it.

        On a disk that is full below the limit the oldest pieces make room for those to come.
        """
        size = sum(len(buffer) for buffer in buffers) + CHECKSUM_BYTES
        if size > self.limit_bytes:
            return
        path = self._path(key)
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
        with self._total() as total:
            if total.num_bytes + size > self.limit_bytes:
                total.num_bytes = self._make_room(size)
            total.num_bytes += size
        try:
            # Not flushed: after a power loss the checksum tells.
            with temporary.open("xb", buffering=0) as file:
                for buffer in (*buffers, _checksum(buffers)):
                    write_all(file.fileno(), buffer)
            temporary.replace(path)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            if not is_full or not self._shrink():
                raise

    def _path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()
        return self.folder / name[:2] / name[2:]

    @contextmanager
    def _total(self) -> Iterator[_Total]:
        """Bytes of all pieces, a number in a file that one process at a time may change.

        It is too large after a piece was replaced or a process died; making room counts anew.
        """
        descriptor = os.open(self.folder / TOTAL, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            total = _Total(int(os.read(descriptor, 32) or b"0"))
            yield total
            os.pwrite(descriptor, b"%-31d" % total.num_bytes, 0)
        finally:
            os.close(descriptor)

    def _make_room(self, wanted_bytes: int) -> int:
        """Removes the pieces used longest ago until enough is free; returns the bytes kept."""
        goal = min(int(self.limit_bytes * KEPT_FRACTION), self.limit_bytes - wanted_bytes)
        return self._keep_newest(sorted(self._pieces()), goal)

    def _shrink(self) -> bool:
        """Removes the pieces used longest ago, a tenth of all bytes; False if there are none."""
        with self._total() as total:
            pieces = sorted(self._pieces())
            kept = sum(size for _, size, _ in pieces)
            total.num_bytes = self._keep_newest(pieces, int(kept * KEPT_FRACTION))
            return total.num_bytes < kept

    def _keep_newest(self, pieces: Sequence[tuple[float, int, Path]], goal: int) -> int:
        """Removes pieces from the first on until at most `goal` bytes are left; gives these."""
        left = sum(size for _, size, _ in pieces)
        for _, size, path in pieces:
            if left <= goal:
                break
            if not path.name.startswith(TEMPORARY):  # Another process still writes it.
                path.unlink(missing_ok=True)
                left -= size
        return left

    def _pieces(self) -> Iterator[tuple[float, int, Path]]:
        """(time of last use, bytes, path) of each; young unfinished ones count."""
        for folder in self.folder.iterdir():
            if folder.name == TOTAL:
                continue
            for path in folder.iterdir():
                try:
                    found = path.stat()
                except FileNotFoundError:
                    continue  # Finished just now, under its other name.
                is_unfinished = path.name.startswith(TEMPORARY)
                if is_unfinished and found.st_mtime < time.time() - FORGOTTEN_AFTER_S:
                    path.unlink(missing_ok=True)
                else:
                    yield found.st_mtime, found.st_size, path


def _fill(descriptor: int, buffer: memoryview) -> None:
    while len(buffer):
        got = os.readv(descriptor, [buffer])
        if got == 0:
            raise FileNotFoundError("a cached piece was cut short")
        buffer = buffer[got:]


def _checksum(buffers: Sequence[Buffer]) -> bytes:
    value = 0
    for buffer in buffers:
        value = crc32c(buffer, value)
    return value.to_bytes(CHECKSUM_BYTES, "little")


class CachedRangeReader:
    """A RangeReader that asks the cache first. What is read again is the same range as a rule:
    the states of one sequence.

    A cache that cannot be read or written costs time, never the read: one warning tells.
    """

    def __init__(self, files: "CachedFiles", path: str):
        self._files, self._path = files, path
        self._far: RangeReader | None = None

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fills the buffers from `offset` on."""
        cache, key = self._files.cache, self._key(offset, buffers)
        if cache.read_into(key, buffers):
            return
        if self._far is None:
            self._far = self._files.far.range_reader(self._path)
        self._far.read_into(offset, buffers)
        try:
            cache.put(key, buffers)
        except OSError as error:
            warnings.warn(
                f"the read cache {cache.folder} cannot be written ({error.strerror}); reading goes "
                "on without it: make room there, or lower train.read_cache_bytes",
                stacklevel=2,
            )

    def forget(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Takes a range that failed its checksum out of the cache, for the store may be mended."""
        self._files.cache.forget(self._key(offset, buffers))

    def _key(self, offset: int, buffers: Sequence[memoryview]) -> str:
        return f"{self._files}/{self._path}@{offset}+{sum(len(buffer) for buffer in buffers)}"

    def close(self) -> None:
        """Gives the far file back, if it was opened."""
        if self._far is not None:
            self._far.close()


class CachedFiles:
    """Files of a far store whose shards are read through a cache; all else goes straight on.

    Shards never change, and no two have a path in common. Records are not kept: a new store at
    the same place would be taken for the old one.
    """

    def __init__(self, far: Files, cache: ReadCache):
        self.far, self.cache = far, cache

    def __repr__(self) -> str:
        return repr(self.far)

    def range_reader(self, path: str) -> RangeReader:
        """Reads a shard's file through the cache, any other straight."""
        if path.startswith(f"{SHARDS}/"):
            return CachedRangeReader(self, path)
        return self.far.range_reader(path)

    def create(self, path: str, data: Buffer) -> bool:
        """As the far store does it."""
        return self.far.create(path, data)

    def read(self, path: str) -> bytes:
        """As the far store does it."""
        return self.far.read(path)

    def size(self, path: str) -> int:
        """As the far store does it."""
        return self.far.size(path)

    def names(self, folder: str) -> list[str]:
        """As the far store does it."""
        return self.far.names(folder)

    def append_stream(self, path: str) -> AppendStream:
        """As the far store does it."""
        return self.far.append_stream(path)

    def replacing_stream(self, path: str) -> AppendStream:
        """As the far store does it."""
        return self.far.replacing_stream(path)

    def sync_tree(self, folder: str) -> None:
        """As the far store does it."""
        self.far.sync_tree(folder)

    def remove_tree(self, folder: str) -> None:
        """As the far store does it."""
        self.far.remove_tree(folder)

    def remove(self, path: str) -> None:
        """Removes a file, if it is there."""
        self.far.remove(path)

    def last_written(self, path: str) -> float:
        """When a file, or anything below a folder, was last written."""
        return self.far.last_written(path)
