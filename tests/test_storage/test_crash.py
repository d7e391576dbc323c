"""Processes killed at random moments lose their open shard and nothing else."""

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from storage.reader import open_store
from storage.repair import collect_garbage
from storage.verify import verify_store


def start(making: SimpleNamespace, store_dir: Path, num_units: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, str(making.path), str(store_dir), str(num_units)])


def commits(store_dir: Path) -> set[str]:
    return {path.name for path in store_dir.glob("commits/*/*.json")}


def wait_for_commits(store_dir: Path, number: int, process: "subprocess.Popen[bytes]") -> None:
    while process.poll() is None and len(commits(store_dir)) < number:
        time.sleep(0.0005)


def check_whole(store_dir: Path, expected: set[str]) -> set[str]:
    """Asserts that what was committed is there, once and whole; returns what is there now."""
    now = commits(store_dir)
    assert expected <= now
    if not (store_dir / "store.json").exists():
        return now
    report = verify_store(store_dir, full=True)
    assert report.problems == []
    assert report.num_shards == len(now)
    snapshot = open_store(store_dir).snapshot()
    ids = [snapshot.sequence_id(i) for i in range(snapshot.num_sequences)]
    assert len(set(ids)) == len(ids)
    return now


def check_completion(
    store_dir: Path, other_dir: Path, making: SimpleNamespace, num_writers: int, num_units: int
) -> None:
    """Asserts that writers left alone finish, and that the content is an uninterrupted run's."""
    writers = [start(making, store_dir, num_units) for _ in range(num_writers)]
    assert [writer.wait() for writer in writers] == [0] * num_writers
    assert verify_store(store_dir, full=True).ok
    collect_garbage(store_dir, older_than_s=-1.0)
    assert len(list(store_dir.glob("shards/*/*"))) == len(commits(store_dir))
    store = making.make_store(other_dir, num_sequences=4 * num_units, num_units=num_units)
    making.fill(store)
    assert open_store(store_dir).is_complete()
    digest = open_store(other_dir).content_digest()
    assert open_store(store_dir).content_digest() == digest


def kill_and_check(
    store_dir: Path, making: SimpleNamespace, *, num_writers: int, num_kills: int, num_units: int
) -> None:
    rng = random.Random(num_writers)
    committed: set[str] = set()
    killed = 0
    while killed < num_kills:
        writers = [start(making, store_dir, num_units) for _ in range(num_writers)]
        # The first kills of a store hit its creation, later ones the writing of shards.
        wait_for_commits(store_dir, len(committed) + rng.randrange(4), writers[0])
        time.sleep(rng.random() * 0.02)
        for writer in writers:
            writer.kill()
            killed += writer.wait() == -signal.SIGKILL
        committed = check_whole(store_dir, committed)
        if len(committed) == num_units:
            committed = set()
            shutil.rmtree(store_dir)


@pytest.mark.parametrize("num_writers", [1, 2])
def test_killed_writers_lose_nothing_committed(
    store_dir: Path, tmp_path: Path, making: SimpleNamespace, num_writers: int
) -> None:
    kill_and_check(store_dir, making, num_writers=num_writers, num_kills=3, num_units=10)
    check_completion(store_dir, tmp_path / "other", making, num_writers, num_units=10)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hundred_kills_lose_nothing_committed(
    store_dir: Path, tmp_path: Path, making: SimpleNamespace
) -> None:
    kill_and_check(store_dir, making, num_writers=3, num_kills=200, num_units=60)
    check_completion(store_dir, tmp_path / "other", making, num_writers=3, num_units=60)
