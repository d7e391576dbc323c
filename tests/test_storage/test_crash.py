"""Processes killed at random moments lose their open shard and nothing else."""

import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from storage.reader import open_store
from storage.repair import collect_garbage
from storage.verify import verify_store


def start(making: SimpleNamespace, store_dir: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, str(making.path), str(store_dir)])


def wait_for_commits(store_dir: Path, number: int, process: "subprocess.Popen[bytes]") -> None:
    while process.poll() is None:
        if len(list(store_dir.glob("commits/*/*.json"))) >= number:
            return
        time.sleep(0.0005)


@pytest.mark.parametrize("num_writers", [1, 2])
def test_killed_writers_lose_nothing_committed(
    store_dir: Path, tmp_path: Path, making: SimpleNamespace, num_writers: int
) -> None:
    rng = random.Random(num_writers)
    committed: set[str] = set()
    for number in (0, 3, 6):
        writers = [start(making, store_dir) for _ in range(num_writers)]
        wait_for_commits(store_dir, number, writers[0])
        time.sleep(rng.random() * 0.02)
        for writer in writers:
            writer.kill()
            writer.wait()
        if not (store_dir / "store.json").exists():
            continue
        now = {path.name for path in store_dir.glob("commits/*/*.json")}
        assert committed <= now
        committed = now
        report = verify_store(store_dir, full=True)
        assert report.problems == []
        assert report.num_shards == len(now)
        snapshot = open_store(store_dir).snapshot()
        ids = [snapshot.sequence_id(i) for i in range(snapshot.num_sequences)]
        assert len(set(ids)) == len(ids)
    writers = [start(making, store_dir) for _ in range(num_writers)]
    assert [writer.wait() for writer in writers] == [0] * num_writers
    assert verify_store(store_dir, full=True).ok
    collect_garbage(store_dir, older_than_s=-1.0)
    assert len(list(store_dir.glob("shards/*/*"))) == 10

    uninterrupted = making.make_store(tmp_path / "other", num_sequences=40, num_units=10)
    making.fill(uninterrupted)
    digest = open_store(tmp_path / "other").content_digest()
    assert open_store(store_dir).content_digest() == digest
