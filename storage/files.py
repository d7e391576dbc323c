"""Files written whole or not at all, on a local or shared file system."""

import contextlib
import ctypes
import errno
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from storage.errors import DamagedShardError, StoreWriteError, explain_os_errors
from storage.layout import TEMPORARY

_WRITE_BACK_BYTES = 16 * 2**20
_SYNC_FILE_RANGE_WRITE = 2

Buffer = memoryview | bytes | bytearray
T = TypeVar("T")


@runtime_checkable
class AppendStream(Protocol):
    """A file being written from start to end, under a name that nobody reads yet."""

    def write(self, data: Buffer) -> None:
        """Appends all of `data`."""

    def close(self) -> None:
        """Ends the file and returns once its bytes survive a power loss."""

    def abandon(self) -> None:
        """Closes without any promise; the file is going to be removed."""


@runtime_checkable
class RangeReader(Protocol):
    """A committed file read by byte range, from any thread."""

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fills the buffers, one after another, from `offset` on; short files raise."""

    def close(self) -> None:
        """Gives the file back."""


@runtime_checkable
class Files(Protocol):
    """What a store needs of its medium; paths are relative to the root, with `/`."""

    def create(self, path: str, data: Buffer) -> bool:
        """Creates a durable file at once and exclusively; False if other bytes are there."""

    def read(self, path: str) -> bytes:
        """The whole file; FileNotFoundError if there is none."""

    def size(self, path: str) -> int:
        """Its size in bytes; FileNotFoundError if there is none."""

    def names(self, folder: str) -> list[str]:
        """Sorted names in a folder, unfinished files left out; empty if there is no folder."""

    def append_stream(self, path: str) -> AppendStream:
        """Starts a new file (and its folders)."""

    def replacing_stream(self, path: str) -> AppendStream:
        """Starts a file that appears when it is closed, in place of an equal one if need be."""

    def range_reader(self, path: str) -> RangeReader:
        """Opens a file for reads by range."""

    def sync_tree(self, folder: str) -> None:
        """Makes the names in a folder, below it and up to the root survive a power loss."""

    def remove_tree(self, folder: str) -> None:
        """Removes a folder and all below it, if it is there."""

    def remove(self, path: str) -> None:
        """Removes a file, if it is there."""

    def last_written(self, path: str) -> float:
        """When a file, or anything below a folder, was last written, in seconds since 1970."""


def sync_folder(folder: Path) -> None:
    """Makes the names inside a folder survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # File systems that keep names on a server refuse to flush folders, for there is no need.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it, each durable."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def write_all(descriptor: int, data: Buffer) -> None:
    """Writes all of `data`, whatever the system takes at a time."""
    view = memoryview(data).cast("B")
    while len(view):
        view = view[os.write(descriptor, view) :]


def begin_write_back(descriptor: int, *, offset: int, num_bytes: int) -> None:
    """Lets the system write a range of a file to disk from now on, without waiting for it.

    A hint and no promise: where the system knows no such thing, the flush at the end does it all.
    """
    sync_file_range = _sync_file_range()
    if sync_file_range is not None:
        sync_file_range(descriptor, offset, num_bytes, _SYNC_FILE_RANGE_WRITE)


@cache
def _sync_file_range() -> Any:
    """Linux's function of that name, which Python's `os` lacks; None elsewhere."""
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


def replace_whole(path: Path, data: Buffer) -> None:
    """Writes a local file so that a reader sees the old bytes or the new ones, never a part.

    For files beside a store (run settings, `eval.json`); the store's own are created exclusively.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}.{uuid.uuid4().hex}")
    with explain_os_errors("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        except BaseException:
            temporary.unlink()
            raise
        finally:
            os.close(descriptor)
        temporary.replace(path)
        sync_folder(path.parent)


class LocalAppendStream:
    """An AppendStream on a file system; each `write` is one system call without the GIL.

    What was written goes to disk while more is being written, so that little is left to `close`.
    """

    def __init__(self, path: Path):
        self._path = path
        self._num_bytes = self._num_begun_bytes = 0
        with explain_os_errors("create", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, data: Buffer) -> None:
        """Appends all of `data`."""
        with explain_os_errors("write", self._path):
            write_all(self._descriptor, data)
        self._num_bytes += memoryview(data).nbytes
        num_new = self._num_bytes - self._num_begun_bytes
        if num_new >= _WRITE_BACK_BYTES:
            begin_write_back(self._descriptor, offset=self._num_begun_bytes, num_bytes=num_new)
            self._num_begun_bytes = self._num_bytes

    def close(self) -> None:
        """Flushes to disk and closes."""
        with explain_os_errors("write", self._path):
            os.fsync(self._descriptor)
        self._release()

    def abandon(self) -> None:
        """Closes without flushing; harmless when closed already."""
        self._release()

    def _release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class LocalReplacingStream(LocalAppendStream):
    """A stream whose file gets its name when it is closed; equal ones may race for it."""

    def __init__(self, path: Path):
        self._final = path
        super().__init__(path.with_name(f"{TEMPORARY}{path.name}.{uuid.uuid4().hex}"))

    def close(self) -> None:
        """Flushes to disk, closes and gives the file its name."""
        super().close()
        self._path.replace(self._final)

    def abandon(self) -> None:
        """Closes without a name; the unfinished file is removed."""
        self._release()
        self._path.unlink(missing_ok=True)


class LocalRangeReader:
    """A RangeReader on a file system: `preadv` straight into the caller's memory."""

    def __init__(self, path: Path):
        self._path = path
        self._descriptor = -1
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fills the buffers from `offset` on."""
        remaining = [buffer for buffer in buffers if len(buffer)]
        while remaining:
            got = os.preadv(self._descriptor, remaining, offset)
            if got == 0:
                raise DamagedShardError(f"{self._path} ends at byte {offset}, too early")
            offset += got
            remaining = _drop_filled(remaining, got)

    def close(self) -> None:
        """Closes the file; harmless when closed already."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()


def _drop_filled(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    while buffers and num_bytes >= len(buffers[0]):
        num_bytes -= len(buffers[0])
        buffers = buffers[1:]
    return [buffers[0][num_bytes:], *buffers[1:]] if buffers else []


def _link(source: Path, name: Path) -> bool:
    """Gives a file another name, if that name is free."""
    try:
        os.link(source, name)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        raise StoreWriteError(
            f"cannot create {name}: its file system has no hard links, which commits need; "
            "put the store on another file system or into an object store"
        ) from error
    return True


class LocalFiles:
    """Files below a folder of a local or shared file system with hard links."""

    def __init__(self, root: str | Path):
        self.root = Path(root).absolute()

    def __repr__(self) -> str:
        return str(self.root)

    def create(self, path: str, data: Buffer) -> bool:
        """Creates a file exclusively by linking a flushed temporary one to its name.

        Returns True when the file now holds exactly `data`: also when a retried link of
        ours succeeded unnoticed, as network file systems can do, or an equal file was there.
        """
        final = self.root / path
        if final.exists():
            return final.read_bytes() == bytes(data)
        with explain_os_errors("write", final):
            make_folder(final.parent)
            return self._link_new(final, data)

    def _link_new(self, final: Path, data: Buffer) -> bool:
        temporary = final.parent / f"{TEMPORARY}{uuid.uuid4().hex}"
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                write_all(descriptor, data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            linked = _link(temporary, final)
            self._sync_up(final.parent)
            return linked or final.read_bytes() == bytes(data)
        finally:
            temporary.unlink(missing_ok=True)

    def _sync_up(self, folder: Path) -> None:
        for parent in (folder, *folder.parents):
            sync_folder(parent)
            if parent == self.root:
                # The folder above may be one that we may not look into; it is not ours.
                with contextlib.suppress(PermissionError):
                    sync_folder(parent.parent)
                return

    def read(self, path: str) -> bytes:
        """The whole file."""
        return self._asked_twice(path, Path.read_bytes)

    def size(self, path: str) -> int:
        """Its size in bytes."""
        return (self.root / path).stat().st_size

    def names(self, folder: str) -> list[str]:
        """Sorted names in a folder, unfinished files left out."""
        try:
            names = os.listdir(self.root / folder)
        except FileNotFoundError:
            return []
        return sorted(name for name in names if not name.startswith(TEMPORARY))

    def append_stream(self, path: str) -> LocalAppendStream:
        """Starts a new file and its folders."""
        return LocalAppendStream(self.root / path)

    def replacing_stream(self, path: str) -> LocalReplacingStream:
        """Starts a file that gets its name when it is closed."""
        return LocalReplacingStream(self.root / path)

    def range_reader(self, path: str) -> LocalRangeReader:
        """Opens a file for reads by range."""
        return self._asked_twice(path, LocalRangeReader)

    def _asked_twice(self, path: str, use: Callable[[Path], T]) -> T:
        """Uses a file; where there is none, once more after its folder was listed.

        NFS and Lustre clients remember for seconds that a file was not there. Listing the folder
        makes them ask the server again, so that a record just written elsewhere is found.
        """
        try:
            return use(self.root / path)
        except FileNotFoundError:
            self.names(path.rpartition("/")[0])
            return use(self.root / path)

    def sync_tree(self, folder: str) -> None:
        """Flushes the folders in `folder`, itself and those above it up to the root."""
        top = self.root / folder
        with explain_os_errors("flush", top):
            for parent, _, _ in os.walk(top, topdown=False):
                sync_folder(Path(parent))
            self._sync_up(top.parent)

    def remove_tree(self, folder: str) -> None:
        """Removes a folder and all below it, if it is there."""
        top = self.root / folder
        with explain_os_errors("remove", top):
            while top.exists():
                # Another process may be removing the same.
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(top)

    def remove(self, path: str) -> None:
        """Removes a file, if it is there."""
        (self.root / path).unlink(missing_ok=True)

    def last_written(self, path: str) -> float:
        """When a file, or anything below a folder, was last written."""
        top = self.root / path
        below = [Path(folder, name) for folder, _, names in os.walk(top) for name in names]
        return max(entry.stat().st_mtime for entry in (top, *below))
