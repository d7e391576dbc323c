"""Files in an object store (S3 and compatible ones, Google Cloud, Azure) through obstore.

Objects appear whole or not at all and need no flush; exclusive creation is a conditional put. On a
server that ignores the condition a store is not safe for several writers: `doctor` finds it out.
"""

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from storage.errors import DamagedShardError, StoreError, StoreWriteError
from storage.files import Buffer
from storage.layout import TEMPORARY
from storage.object_access import RETRY_S, first_line, open_object_store

PART_BYTES = 16 * 2**20
"""Size of one part of an upload, in bytes; S3 takes 10,000 parts, which makes 168 GB."""
PARTS_AT_ONCE = 4
"""Parts of one file on their way at the same time: a file being written holds 80 MB."""
SINGLE_PUT_BYTES = 4 * PART_BYTES
"""Largest object that is put by one request."""
PAGE_NAMES = 1000
"""Names that one request lists or deletes."""

CREATE_TRIES = 8
CREATE_WAIT_S = 0.1
"""Wait before a conditional put is tried again; doubled each time, with jitter."""


class ObjectAppendStream:
    """An AppendStream that uploads in parts; the object appears when it is closed."""

    def __init__(self, files: "ObjectFiles", path: str, *, is_replacing: bool = False):
        self._files, self._path = files, path
        self._num_bytes = 0
        self._old_tag = files.tag(path) if is_replacing else None
        self._writer: Any = obstore.open_writer(
            files.store, path, buffer_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE
        )

    def write(self, data: Buffer) -> None:
        """Appends all of `data`."""
        if len(data):
            with self._files.explained("write", self._path):
                self._writer.write(bytes(data))
            self._num_bytes += len(data)

    def close(self) -> None:
        """Completes the upload."""
        self._files.requests["put"] += _num_puts(self._num_bytes)
        with self._files.explained("write", self._path):
            try:
                self._writer.close()
            except (GenericError, NotFoundError, FileNotFoundError):
                # The answer to the last request may be what was lost; its repetition then fails.
                if not self._is_there():
                    raise
        self._writer = None

    def _is_there(self) -> bool:
        """Whether an object of this size is there that was not there before."""
        try:
            tag = self._files.tag(self._path)
            return tag != self._old_tag and self._files.size(self._path) == self._num_bytes
        except (OSError, StoreError):
            return False

    def abandon(self) -> None:
        """Leaves the upload incomplete: no object appears.

        Parts already sent stay invisible until the bucket's rule for incomplete uploads, which
        every bucket should have, removes them.
        """
        self._writer = None


def _num_puts(num_bytes: int) -> int:
    """Requests of one upload: a single one, or start, parts and completion."""
    return 1 if num_bytes < PART_BYTES else 2 + -(-num_bytes // PART_BYTES)


class ObjectRangeReader:
    """A RangeReader; each call is one request."""

    def __init__(self, files: "ObjectFiles", path: str):
        self._files, self._path = files, path

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fills the buffers from `offset` on."""
        wanted = sum(len(buffer) for buffer in buffers)
        if not wanted:
            return
        with self._files.explained("read", self._path):
            got = self._get(offset, wanted)
        if len(got) < wanted:
            raise DamagedShardError(f"{self._path} ends at byte {offset + len(got)}, too early")
        for buffer in buffers:
            buffer[:] = got[: len(buffer)]
            got = got[len(buffer) :]

    def _get(self, offset: int, num_bytes: int) -> memoryview:
        self._files.requests["get"] += 1
        try:
            got = obstore.get_range(self._files.store, self._path, start=offset, length=num_bytes)
        except BaseError as error:
            # Servers answer a range behind the end in different ways; the size tells.
            size = self._files.size(self._path)
            if size < offset + num_bytes:
                raise DamagedShardError(f"{self._path} ends at byte {size}, too early") from error
            raise
        return memoryview(got)

    def close(self) -> None:
        """Nothing is held open."""


class ObjectFiles:
    """Files below a prefix of an object store."""

    def __init__(self, store: Any, *, name: str):
        self.store, self._name = store, name
        self.requests: Counter[str] = Counter()
        """Requests made so far, by kind: get, head, list, put, delete; obstore's repetitions
        after a failure are not counted. (Threads may lose a count to each other.)"""

    @classmethod
    def at(cls, url: str) -> "ObjectFiles":
        """The files at `s3://bucket/prefix` or another URL that obstore knows.

        Credentials, region and endpoint come from the usual AWS variables; `AWS_PROFILE` and
        other sources that only the AWS SDK knows need the package boto3.
        """
        try:
            return cls(open_object_store(url), name=url)
        except (BaseError, ValueError) as error:
            raise StoreError(f"{url} is no place for a store: {first_line(error)}") from error

    def __repr__(self) -> str:
        return self._name

    def create(self, path: str, data: Buffer) -> bool:
        """Puts an object if none is there; True if it now holds exactly `data`.

        Safe to repeat, so it is tried again after any failure: if a put succeeded and only its
        answer was lost, the next one finds `data` there. Above `SINGLE_PUT_BYTES` the object is
        uploaded in parts, which S3 cannot make conditional; only head files are as large, and
        their checksums lie in records that are created exclusively.
        """
        data = bytes(data)
        if len(data) > SINGLE_PUT_BYTES:
            return self._create_large(path, data)
        start_s = time.monotonic()
        with self.explained("write", path):
            for attempt in range(CREATE_TRIES):
                if attempt:
                    time.sleep(CREATE_WAIT_S * 2**attempt * random.uniform(0.5, 1.0))
                is_late = time.monotonic() - start_s > RETRY_S / 3
                is_last = is_late or attempt + 1 == CREATE_TRIES
                if (created := self._try_to_create(path, data, is_last=is_last)) is not None:
                    return created
        raise StoreWriteError(
            f"cannot create {self}/{path}: the object store refuses it as taken, and has nothing "
            "there; run `dflash-offline doctor` on this place"
        )

    def _try_to_create(self, path: str, data: bytes, *, is_last: bool) -> bool | None:
        """One conditional put; None if its outcome is open and it should be tried again."""
        self.requests["put"] += 1
        try:
            obstore.put(self.store, path, data, mode="create", use_multipart=False)
        except (AlreadyExistsError, PreconditionError):
            try:
                return self.read(path) == data
            except FileNotFoundError:
                return None  # 409: several raced and this one lost, but the winner may fail too.
        except GenericError:
            if is_last:
                raise
            return None
        return True

    def _create_large(self, path: str, data: bytes) -> bool:
        try:
            return self.size(path) == len(data) and self.read(path) == data
        except FileNotFoundError:
            stream = self.append_stream(path)
            for start in range(0, len(data), PART_BYTES):
                stream.write(memoryview(data)[start : start + PART_BYTES])
            stream.close()
            return True

    def read(self, path: str) -> bytes:
        """The whole object."""
        self.requests["get"] += 1
        with self.explained("read", path):
            return bytes(obstore.get(self.store, path).bytes())

    def size(self, path: str) -> int:
        """Its size in bytes."""
        self.requests["head"] += 1
        with self.explained("read", path):
            return int(obstore.head(self.store, path)["size"])

    def tag(self, path: str) -> str | None:
        """What changes with every new object of a name; None if there is no object."""
        self.requests["head"] += 1
        try:
            with self.explained("read", path):
                found = obstore.head(self.store, path)
        except FileNotFoundError:
            return None
        return f"{found['e_tag']} {found['last_modified']}"

    def names(self, folder: str) -> list[str]:
        """Sorted names under a prefix, one level deep."""
        with self.explained("list", folder):
            found = obstore.list_with_delimiter(self.store, folder or None)
        paths = [*found["common_prefixes"], *(entry["path"] for entry in found["objects"])]
        self.requests["list"] += 1 + max(0, len(paths) - 1) // PAGE_NAMES
        names = [path.rstrip("/").rpartition("/")[2] for path in paths]
        return sorted(name for name in names if not name.startswith(TEMPORARY))

    def append_stream(self, path: str) -> ObjectAppendStream:
        """Starts an upload."""
        return ObjectAppendStream(self, path)

    def replacing_stream(self, path: str) -> ObjectAppendStream:
        """Starts an upload that takes the place of an object that is there."""
        return ObjectAppendStream(self, path, is_replacing=True)

    def range_reader(self, path: str) -> ObjectRangeReader:
        """Reads by range; a missing object raises FileNotFoundError at the first read."""
        return ObjectRangeReader(self, path)

    def sync_tree(self, folder: str) -> None:
        """Objects are durable when they appear."""

    def remove_tree(self, folder: str) -> None:
        """Deletes all objects below a prefix."""
        with self.explained("remove", folder):
            for page in obstore.list(self.store, f"{folder}/", chunk_size=PAGE_NAMES):
                self.requests["list"] += 1
                self.requests["delete"] += 1
                obstore.delete(self.store, [entry["path"] for entry in page])

    def remove(self, path: str) -> None:
        """Deletes an object, if it is there."""
        self.requests["delete"] += 1
        with self.explained("remove", path):
            obstore.delete(self.store, path)

    def last_written(self, path: str) -> float:
        """When an object, or any below a prefix, was last written."""
        times = []
        with self.explained("list", path):
            for page in obstore.list(self.store, f"{path}/", chunk_size=PAGE_NAMES):
                self.requests["list"] += 1
                times += [entry["last_modified"].timestamp() for entry in page]
            if not times:
                self.requests["head"] += 1
                times = [obstore.head(self.store, path)["last_modified"].timestamp()]
        return float(max(times))

    @contextmanager
    def explained(self, action: str, path: str) -> Iterator[None]:
        """Turns obstore's errors into one line with advice; a missing object passes."""
        kind = StoreError if action in ("read", "list") else StoreWriteError
        try:
            yield
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise kind(
                f"cannot {action} {self}/{path}: the object store does not let you: "
                f"{first_line(error)}; check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the "
                "bucket's policy, or set AWS_SKIP_SIGNATURE=true for a public bucket"
            ) from error
        except BaseError as error:
            raise kind(
                f"cannot {action} {self}/{path}: {first_line(error)}; check AWS_ENDPOINT_URL and "
                "credentials, then run the same command again"
            ) from error
        except FileNotFoundError as error:
            if action == "write":
                raise kind(
                    f"cannot write {self}/{path}: there is no such bucket: {first_line(error)}"
                ) from error
            raise
