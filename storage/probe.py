"""Try out whether a place keeps what a store needs of it, before a store trusts it."""

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from storage.errors import StoreError
from storage.files import Files
from storage.layout import TEMPORARY
from storage.places import files_at

NUM_RACERS = 8


def probe_place(place: str | Path) -> list[str]:
    """What is wrong with a folder or object-store prefix as a place for a store; empty if nothing.

    Writes a few small files under a name that no reader looks at, and removes them. Visibility
    between two hosts: run it on one with `leave_mark`, then `find_mark` on the other.
    """
    files = files_at(place)
    folder = f"{TEMPORARY}probe-{uuid.uuid4().hex}"
    problems: list[str] = []
    try:
        for check in (_creates_exclusively, _names_what_it_holds, _reads_ranges):
            problems += check(files, folder)
    except (StoreError, OSError) as error:
        problems.append(str(error))
    finally:
        files.remove_tree(folder)
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
    """Writes a mark for `find_mark` on another host and returns its name."""
    name = f"{TEMPORARY}mark-{uuid.uuid4().hex}"
    files_at(place).create(name, name.encode())
    return name


def find_mark(place: str | Path, name: str) -> bool:
    """Whether a mark that another host left is visible here, whole."""
    try:
        return files_at(place).read(name) == name.encode()
    except FileNotFoundError:
        return False
