"""Files in an object store (S3 and compatible ones, Google Cloud, Azure) through obstore.

Objects appear whole or not at all and need no flush; exclusive creation is a conditional put. On a
server that ignores the condition a store is not safe for several writers.
"""

from collections.abc import Sequence
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import from_url

from storage.errors import DamagedShardError
from storage.files import Buffer
from storage.layout import TEMPORARY

WRITE_BYTES = 16 * 2**20
"""Size of one part of an upload, in bytes."""


class ObjectAppendStream:
    """An AppendStream that uploads in parts; the object appears when it is closed."""

    def __init__(self, store: Any, path: str):
        self._writer: Any = obstore.open_writer(store, path, buffer_size=WRITE_BYTES)

    def write(self, data: Buffer) -> None:
        """Appends all of `data`."""
        if len(data):
            self._writer.write(bytes(data))

    def close(self) -> None:
        """Completes the upload."""
        self._writer.close()
        self._writer = None

    def abandon(self) -> None:
        """Leaves the upload incomplete: no object appears."""
        self._writer = None


class ObjectRangeReader:
    """A RangeReader; each call is one request."""

    def __init__(self, store: Any, path: str):
        self._store, self._path = store, path

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fills the buffers from `offset` on."""
        wanted = sum(len(buffer) for buffer in buffers)
        if not wanted:
            return
        got = self._get(offset, wanted)
        if len(got) < wanted:
            raise DamagedShardError(f"{self._path} ends at byte {offset + len(got)}, too early")
        for buffer in buffers:
            buffer[:] = got[: len(buffer)]
            got = got[len(buffer) :]

    def _get(self, offset: int, num_bytes: int) -> memoryview:
        try:
            got = obstore.get_range(self._store, self._path, start=offset, length=num_bytes)
        except BaseError as error:
            # Servers answer a range behind the end in different ways; the size tells.
            size = obstore.head(self._store, self._path)["size"]
            if size < offset + num_bytes:
                raise DamagedShardError(f"{self._path} ends at byte {size}, too early") from error
            raise
        return memoryview(got)

    def close(self) -> None:
        """Nothing is held open."""


class ObjectFiles:
    """Files below a prefix of an object store."""

    def __init__(self, store: Any, *, name: str):
        self._store, self._name = store, name

    @classmethod
    def at(cls, url: str) -> "ObjectFiles":
        """The files at `s3://bucket/prefix` or another URL that obstore knows."""
        return cls(from_url(url), name=url)

    def __repr__(self) -> str:
        return self._name

    def create(self, path: str, data: Buffer) -> bool:
        """Puts an object if none is there; True if it now holds exactly `data`."""
        try:
            obstore.put(self._store, path, bytes(data), mode="create")
        except (AlreadyExistsError, PreconditionError):
            return self.read(path) == bytes(data)
        return True

    def read(self, path: str) -> bytes:
        """The whole object."""
        return bytes(obstore.get(self._store, path).bytes())

    def size(self, path: str) -> int:
        """Its size in bytes."""
        return int(obstore.head(self._store, path)["size"])

    def names(self, folder: str) -> list[str]:
        """Sorted names under a prefix, one level deep."""
        found = obstore.list_with_delimiter(self._store, folder or None)
        paths = [*found["common_prefixes"], *(entry["path"] for entry in found["objects"])]
        names = [path.rstrip("/").rpartition("/")[2] for path in paths]
        return sorted(name for name in names if not name.startswith(TEMPORARY))

    def append_stream(self, path: str) -> ObjectAppendStream:
        """Starts an upload."""
        return ObjectAppendStream(self._store, path)

    def range_reader(self, path: str) -> ObjectRangeReader:
        """Reads by range; a missing object raises FileNotFoundError at the first read."""
        return ObjectRangeReader(self._store, path)

    def sync_tree(self, folder: str) -> None:
        """Objects are durable when they appear."""

    def remove_tree(self, folder: str) -> None:
        """Deletes all objects below a prefix."""
        for page in obstore.list(self._store, f"{folder}/"):
            obstore.delete(self._store, [entry["path"] for entry in page])
