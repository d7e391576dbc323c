"""The whole path through an S3 server: workers, a kill, training, a copy to disk."""

import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w

from storage.reader import open_store
from storage.writer import open_for_writing

pytestmark = pytest.mark.slow

LIMIT_S = 120.0
"""Longest wait for anything."""


@pytest.fixture(scope="module")
def tiny_run() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("tiny_run.py"))))


@pytest.fixture
def dflash(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run a command of `dflash-offline` to its end; give what it printed."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*arguments: str | Path) -> str:
        command = [sys.executable, "-m", "dflash_offline.cli", *map(str, arguments)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    return run


def write_run_file(path: Path, tables: dict[str, Any], **changes: dict[str, Any]) -> Path:
    """The tables with some settings changed, as a run file."""
    merged = {name: {**tables[name], **changes.get(name, {})} for name in changes}
    path.write_text(tomli_w.dumps({**tables, **merged}))
    return path


def wait_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def num_committed(place: str) -> int:
    try:
        return len(open_for_writing(place).committed())
    except FileNotFoundError:
        return 0


def test_three_workers_a_kill_training_and_a_copy(
    tiny_run: SimpleNamespace,
    s3_server: Any,
    dflash: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = tiny_run.make_inputs(tmp_path)
    place = s3_server.make_bucket()
    cache = {"read_cache_dir": str(tmp_path / "cache"), "read_cache_bytes": 100_000_000}
    tables = tiny_run.run_tables(tmp_path / "far", inputs)
    far = write_run_file(tmp_path / "far.toml", tables, store={"dir": place}, train=cache)

    # Three workers of one store; one, which has two of the four units, is killed at work.
    monkeypatch.setenv("NAPS", str(tmp_path))
    (tmp_path / "extract").write_text("0.5")
    command = [sys.executable, tiny_run.SLOW_CLI, "extract", far, "--num-workers", "3", "--worker"]
    workers = [subprocess.Popen([*command, str(index)]) for index in range(3)]
    wait_for(lambda: num_committed(place) > 0)
    workers[0].kill()
    (tmp_path / "extract").write_text("0")
    assert [worker.wait(LIMIT_S) for worker in workers] == [-9, 0, 0]
    assert open_store(place).is_complete()
    assert "nothing to extract" in dflash("extract", far)
    assert "whole" in dflash("store", "verify", place, "--full")

    # Trained from there, once through the cache.
    dflash("train", far)
    assert any((tmp_path / "cache").glob("*/*"))

    # On disk it is the same store, and the same as one that was extracted there.
    print(dflash("store", "copy", place, tmp_path / "near"))
    assert "0 of them new" in dflash("store", "copy", place, tmp_path / "near")
    tables = tiny_run.run_tables(tmp_path / "plain", inputs)
    plain = write_run_file(tmp_path / "plain.toml", tables)
    dflash("extract", plain)
    dflash("train", plain)
    digests = {
        open_store(where).content_digest()
        for where in (place, tmp_path / "near", tmp_path / "plain" / "store")
    }
    assert len(digests) == 1

    # What was trained is the same, too, bit for bit.
    weights = {
        (tmp_path / run / "drafters/one/checkpoints/step-00000020/model.safetensors").read_bytes()
        for run in ("far", "plain")
    }
    assert len(weights) == 1
