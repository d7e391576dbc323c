"""Errors of the store: each is one clear line saying what is wrong and what to do."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager


class StoreError(ValueError):
    """Something about the store that its user, not its programmer, has to mend."""


class StoreNotFoundError(StoreError, FileNotFoundError):
    """There is no store at this place."""


class IdentityMismatchError(StoreError):
    """The store was made with another target, template, split or arithmetic."""


class DamagedShardError(StoreError, OSError):
    """Committed data is missing, short or does not match its checksum."""

    shard: str | None = None
    """The shard's unit, as text."""
    layer: str | None = None
    """Layer name, `scales` or `tokens`."""
    chunk: int | None = None
    """Zarr chunk of the layer's array; None when a whole file is concerned."""
    sequence_id: str | None = None
    """The sequence that was being read."""


class StoreWriteError(StoreError, OSError):
    """The disk refused a write: full, read-only or not permitted."""


class NonFiniteStatesError(StoreError):
    """Hidden states hold NaN or infinity; they never enter a store."""


_ADVICE = {
    errno.ENOSPC: "the disk is full; free space there, then run the same command again",
    errno.EDQUOT: "the disk quota is used up; free space there, then run the same command again",
    errno.EROFS: "the file system is read-only; mount it writable or choose another folder",
    errno.EACCES: "permission denied; change the folder's owner or mode, or choose another one",
    errno.EPERM: "not permitted; change the folder's owner or mode, or choose another one",
    errno.EMLINK: "the file system allows no more links there",
    errno.EOPNOTSUPP: "the file system has no hard links, which the commit protocol needs",
    errno.ENOTDIR: "a part of this path is a file, not a folder; choose another folder",
    errno.EFBIG: "the limit of a file's size is reached; raise `ulimit -f`",
    errno.EIO: "the disk reports an error; check it, then run the same command again",
    errno.ENAMETOOLONG: "the path is too long; choose a shorter one",
    errno.EMFILE: "too many open files; raise `ulimit -n`",
}


_RUST_CODE = re.compile(r"\(os error (\d+)\)")


@contextmanager
def explain_os_errors(action: str, path: object) -> Iterator[None]:
    """Turns the operating system's refusals into one line with advice; other errors pass.

    Those that a library written in Rust hands on as errors of its own are known by their text.
    """
    try:
        yield
    except Exception as error:
        advice = advice_on(error)
        if advice is None or isinstance(error, StoreError):
            raise
        raise StoreWriteError(f"cannot {action} {path}: {advice}") from error


def advice_on(error: Exception) -> str | None:
    """What is wrong and what to do, where the operating system refused; None for other errors."""
    if isinstance(error, OSError):
        return _ADVICE.get(error.errno or 0)
    found = _RUST_CODE.search(str(error))
    return None if found is None else _ADVICE.get(int(found[1]))
