"""Try out whether a place keeps what a store needs of it, before a store trusts it."""

import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from storage.errors import StoreError
from storage.files import Files
from storage.layout import TEMPORARY
from storage.places import files_at

NUM_RACERS = 8
_MARK = "mark"


def probe_place(place: str | Path) -> list[str]:
    """What is wrong with a folder or object-store prefix as a place for a store; empty if nothing.

    Writes a few small files under a name that no reader looks at, and removes them. Visibility
    between two hosts: run it on one with `leave_mark`, then `check_mark` on the other.
    """
    files = files_at(place)
    folder = f"{TEMPORARY}probe-{uuid.uuid4().hex}"
    problems: list[str] = []
    try:
        for check in (_creates_exclusively, _names_what_it_holds, _reads_ranges):
            problems += check(files, folder)
    except (StoreError, OSError) as error:
        problems.append(str(error))
    try:
        files.remove_tree(folder)
    except (StoreError, OSError) as error:
        problems += [] if problems else [str(error)]
    return problems


def _creates_exclusively(files: Files, folder: str) -> Iterator[str]:
    """Of several creations of one name exactly one may succeed, at once and later."""
    path = f"{folder}/exclusive"

    def create(racer: int) -> bool:
        return files.create(path, b"racer %d" % racer)

    with ThreadPoolExecutor(NUM_RACERS) as pool:
        winners = [racer for racer, won in enumerate(pool.map(create, range(NUM_RACERS))) if won]
    if len(winners) != 1 or files.read(path) != b"racer %d" % winners[0]:
        yield (
            f"{files}: {len(winners)} of {NUM_RACERS} writers created the same file; it does not "
            "keep creation exclusive, so use one writer only, or another place"
        )


def _names_what_it_holds(files: Files, folder: str) -> Iterator[str]:
    """A file that was closed is listed, with its size, at once."""
    files.create(f"{folder}/listed/name", b"12345")
    if files.names(f"{folder}/listed") != ["name"] or files.size(f"{folder}/listed/name") != 5:
        yield f"{files}: a new file is not listed at once; readers would miss committed shards"


def _reads_ranges(files: Files, folder: str) -> Iterator[str]:
    """Bytes come back from the middle and the end, and not from behind it."""
    stream = files.append_stream(f"{folder}/ranges")
    stream.write(bytes(range(256)) * 1024)
    stream.close()
    reader = files.range_reader(f"{folder}/ranges")
    for offset in (0, 1000, 256 * 1024 - 3):
        got = bytearray(3)
        reader.read_into(offset, [memoryview(got)])
        if bytes(got) != bytes((offset + i) % 256 for i in range(3)):
            yield f"{files}: a read at byte {offset} gave other bytes than were written"
    if not _refuses(lambda: reader.read_into(256 * 1024 - 1, [memoryview(bytearray(2))])):
        yield f"{files}: a read behind the end of a file did not fail"
    reader.close()


def _refuses(action: Callable[[], None]) -> bool:
    try:
        action()
    except StoreError:
        return True
    return False


def leave_mark(place: str | Path) -> str:
    """Leaves a mark for `check_mark` on another host and returns its name."""
    name = f"{TEMPORARY}mark-{uuid.uuid4().hex}"
    files_at(place).create(f"{name}/{_MARK}", name.encode())
    return name


def check_mark(
    place: str | Path,
    name: str,
    *,
    wait_s: float = 90.0,
    sleep: Callable[[float], None] = time.sleep,
) -> list[str]:
    """What is wrong between the host that left a mark and this one; removes the mark.

    What was closed there must be visible here, and what was created there must not be created
    here a second time, even by a client that remembers it as missing.

    Args:
        place: the same place as on the other host.
        name: what `leave_mark` returned there.
        wait_s: seconds after which a mark counts as invisible; NFS may take a minute.
        sleep: for tests.
    """
    files = files_at(place)
    path = f"{name}/{_MARK}"
    problems = []
    if files.create(path, b"another host"):
        problems.append(
            f"{files}: a file that another host created was created here again, or is another "
            "place there; several hosts must not write one store here"
        )
    waited_s = 0.0
    while not problems and not _is_visible(files, path, name.encode()):
        if waited_s >= wait_s:
            problems.append(
                f"{files}: a file that another host wrote is not visible here after {wait_s:.0f} s"
            )
            break
        sleep(1.0)
        waited_s += 1.0
    files.remove_tree(name)
    return problems


def _is_visible(files: Files, path: str, data: bytes) -> bool:
    try:
        return files.read(path) == data
    except FileNotFoundError:
        return False
