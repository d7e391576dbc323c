"""The read cache: same bytes, fewer requests, never too large, never wrong, several processes."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from obstore.store import MemoryStore

from storage import read_cache
from storage.errors import DamagedShardError
from storage.object_files import ObjectFiles
from storage.read_cache import CachedFiles, ReadCache
from storage.reader import Store, open_store

PLACE = "memory://test"


@pytest.fixture(autouse=True)
def bucket(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    bucket = MemoryStore()
    monkeypatch.setattr(ObjectFiles, "at", lambda url: ObjectFiles(bucket, name=url))
    return bucket


@pytest.fixture
def cache(tmp_path: Path) -> ReadCache:
    return ReadCache(tmp_path / "cache", limit_bytes=1_000_000_000)


def read_all(store: Store) -> list[bytes]:
    snapshot, layers = store.snapshot(), list(store.layers)
    read = (snapshot.read(i, layers=layers) for i in range(snapshot.num_sequences))
    return [states.data.tobytes() for sequence in read for states in sequence.states.values()]


def gets(store: Store) -> int:
    assert isinstance(store.files, CachedFiles)
    return store.files.far.requests["get"]


def kept_bytes(folder: Path) -> int:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "total_bytes")
    return sum(path.stat().st_size for path in files)


def filled(cache: ReadCache, key: str, size: int) -> bytes | None:
    got = bytearray(size)
    return bytes(got) if cache.read_into(key, [memoryview(got)]) else None


def test_what_was_read_once_is_not_asked_for_again(
    making: SimpleNamespace, cache: ReadCache
) -> None:
    making.fill(making.make_store(PLACE))
    first = open_store(PLACE, cache=cache)
    states = read_all(first)
    assert states == read_all(open_store(PLACE))
    # Another process, say another drafter, begins with nothing but the folder.
    second = open_store(PLACE, cache=ReadCache(cache.folder, limit_bytes=cache.limit_bytes))
    assert read_all(second) == states
    # A layer, the scales and the tokens of each sequence are one request each.
    num_sequences = second.snapshot().num_sequences
    assert gets(first) == gets(second) + num_sequences * (len(second.layers) + 2)


def test_ranges_are_kept_as_they_are_asked_for(tmp_path: Path, cache: ReadCache) -> None:
    far = ObjectFiles.at(PLACE)
    far.create("shards/x", bytes(range(100)))
    far.create("head/x", b"head")
    files = CachedFiles(far, cache)
    for _ in range(2):
        first, second = bytearray(3), bytearray(4)
        files.range_reader("shards/x").read_into(5, [memoryview(first), memoryview(second)])
        assert bytes(first + second) == bytes(range(5, 12))
        files.range_reader("head/x").read_into(0, [memoryview(bytearray(4))])
    assert far.requests["get"] == 1 + 2


def test_a_damaged_piece_is_read_anew(making: SimpleNamespace, cache: ReadCache) -> None:
    making.fill(making.make_store(PLACE))
    states = read_all(open_store(PLACE, cache=cache))
    pieces = [path for path in cache.folder.glob("*/*") if path.is_file()]
    for number, path in enumerate(pieces):
        data = bytearray(path.read_bytes())
        data[number % len(data)] ^= 1
        path.write_bytes(data[: len(data) - number % 2])
    assert read_all(open_store(PLACE, cache=cache)) == states
    again = open_store(PLACE, cache=cache)
    read_all(again)
    assert gets(again) < len(pieces)


def test_the_oldest_make_room_and_the_limit_holds(tmp_path: Path) -> None:
    cache = ReadCache(tmp_path, limit_bytes=1000)
    for number in range(100):
        cache.put(f"piece {number}", [bytes(96)])
        os.utime(cache._path(f"piece {number}"), (number, number))
        assert kept_bytes(tmp_path) <= 1000
        if number >= 10 and number % 9:
            assert filled(cache, f"piece {number - 1}", 96) is not None
            os.utime(cache._path(f"piece {number - 1}"), (number, number))
    assert filled(cache, "piece 0", 96) is None
    assert kept_bytes(tmp_path) > 500
    cache.put("too large", [bytes(1000)])
    assert filled(cache, "too large", 1000) is None


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    cache = ReadCache(tmp_path, limit_bytes=1000)
    cache.put("old", [bytes(96)])
    left = cache._path("old").with_name(".tmp-left")
    left.write_bytes(bytes(900))
    os.utime(left, (0, 0))
    (tmp_path / "total_bytes").write_bytes(b"123456")
    cache.put("new", [bytes(96)])
    assert not left.exists()
    assert filled(cache, "old", 96) is not None
    assert kept_bytes(tmp_path) == 200


def test_a_folder_that_vanishes_is_made_anew(tmp_path: Path) -> None:
    cache = ReadCache(tmp_path / "cache", limit_bytes=1000)
    cache.put("piece", [b"data"])
    cache._path("piece").unlink()
    assert filled(cache, "piece", 4) is None
    cache.put("piece", [b"data"])
    assert filled(cache, "piece", 4) == b"data"


WRITER = """
import sys
import numpy as np
from storage.read_cache import ReadCache
cache = ReadCache(sys.argv[1], limit_bytes=200_000)
rng = np.random.default_rng(int(sys.argv[2]))
for _ in range(400):
    number = int(rng.integers(100))
    wanted, got = bytes([number]) * (1000 + number * 50), bytearray(1000 + number * 50)
    if cache.read_into(str(number), [memoryview(got)]):
        assert got == wanted
    else:
        cache.put(str(number), [wanted])
"""


def test_processes_share_a_folder(tmp_path: Path) -> None:
    def work(seed: int) -> int:
        return subprocess.run([sys.executable, "-c", WRITER, tmp_path, str(seed)]).returncode

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, range(3))) == [0, 0, 0]
    assert 100_000 < kept_bytes(tmp_path) <= 200_000 + 3 * 6_000
    assert not list(tmp_path.rglob(".tmp-*"))


def test_several_threads_read_the_same(making: SimpleNamespace, cache: ReadCache) -> None:
    making.fill(making.make_store(PLACE))
    store = open_store(PLACE, cache=cache)
    snapshot = store.snapshot()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            read = pool.map(lambda i: snapshot.read(i, layers=["9"]), [0, 0, 1, 1, 2, 2])
            data = [sequence.states["9"].data.copy() for sequence in read]
            np.testing.assert_array_equal(data[0], data[1])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.ENOENT])
def test_a_failing_cache_disk_stops_no_read(
    making: SimpleNamespace, cache: ReadCache, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    making.fill(making.make_store(PLACE))
    states = read_all(open_store(PLACE))

    def fails(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("storage.read_cache.write_all", fails)
    with pytest.warns(UserWarning, match="cannot be written"):
        assert read_all(open_store(PLACE, cache=cache)) == states
    monkeypatch.setattr("storage.read_cache.os.utime", fails)
    with pytest.warns(UserWarning, match="cannot be written"):
        assert read_all(open_store(PLACE, cache=cache)) == states


@pytest.mark.parametrize("pattern", ["shards/*/*/layers/*/c/0/0", "shards/*/*/tokens.bin"])
def test_damage_is_not_kept(
    filled_dir: Path, cache: ReadCache, flip_bit: Callable[..., Any], pattern: str
) -> None:
    states = read_all(open_store(filled_dir))
    path = min(filled_dir.glob(pattern))
    whole = path.read_bytes()
    flip_bit(path, 1000)
    for _ in range(2):
        with pytest.raises(DamagedShardError):
            read_all(open_store(filled_dir, cache=cache))
    path.write_bytes(whole)  # Restored from a copy.
    assert read_all(open_store(filled_dir, cache=cache)) == states


def test_on_a_disk_smaller_than_the_limit_old_pieces_make_room(
    cache: ReadCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    capacity = 10_500
    plain = read_cache.write_all

    def write(descriptor: int, data: Any) -> None:
        if kept_bytes(cache.folder) + len(data) > capacity:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(descriptor, data)

    monkeypatch.setattr(read_cache, "write_all", write)
    for number in range(40):
        cache.put(f"piece-{number}", [bytes([number]) * 1000])
    kept = [number for number in range(40) if filled(cache, f"piece-{number}", 1000)]
    assert kept
    assert min(kept) > 20
    assert max(kept) >= 38
    assert kept_bytes(cache.folder) <= capacity
