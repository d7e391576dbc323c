"""Lock: at most one process at work in a folder, for as long as that process lives."""

import errno
import fcntl
import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_FILE = ".lock"
_HOLDER = re.compile(r"process (\d+) on (\S+)")
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def only_process_in(folder: Path, *, work: str) -> Iterator[None]:
    """Holds a folder's lock inside the block, so that no second process does the same work there.

    The system drops the lock when the process ends, however it ends: nothing is ever left to clean
    up. It holds between the machines that share a file system where that file system knows locks
    (NFS does, Lustre only when mounted with `flock`); elsewhere one line says that it does not.

    Args:
        folder: Made if it does not exist.
        work: What the process does, for the message: `training of drafter small`.

    Raises:
        ValueError: Another live process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Opened to append: a process that is refused must not wipe the holder's name.
    with (folder / LOCK_FILE).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "an unknown process"
            raise ValueError(
                f"{folder}: another {work} is running ({holder}); wait for it or stop it first"
            ) from error
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            print(f"{folder}: no locks on this file system; start one {work} only", file=sys.stderr)
        else:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield


def is_holder_gone(folder: Path) -> bool:
    """Whether the process that held a folder's lock last was one of this machine and has ended.

    Looks at the name that it left, not at the lock: whoever tried that could be in the way of a
    process that is just starting.
    """
    try:
        found = _HOLDER.match((folder / LOCK_FILE).read_text(encoding="utf-8"))
    except OSError:
        return False
    if found is None or found[2] != socket.gethostname():
        return False
    try:
        os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def held_since_s(folder: Path) -> float | None:
    """Unix time at which a folder's lock was last taken; None if it never was."""
    try:
        status = (folder / LOCK_FILE).stat()
    except OSError:
        return None
    # Empty: no process got the lock, or the file system has none.
    return status.st_mtime if status.st_size else None
