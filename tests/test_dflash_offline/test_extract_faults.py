"""Faults of a real extraction: its launcher and workers as processes, killed, stopped, doubled."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tomli_w

from storage.reader import open_store
from storage.verify import verify_store

pytestmark = pytest.mark.slow

NUM_SEQUENCES = 1_500
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def folder(tiny_target_dir: Path, tmp_path: Path) -> Path:
    """A run file with two workers and data for a dozen shards, some seconds of work."""
    (tmp_path / "target").symlink_to(tiny_target_dir, target_is_directory=True)
    numbers = random.Random(0)
    with (tmp_path / "data.jsonl").open("w") as file:
        for index in range(NUM_SEQUENCES):
            answer = "".join(numbers.choices("abcdefgh ", k=60)) + "."
            file.write(json.dumps({"id": f"c{index}", "prompt": "?", "response": answer}) + "\n")
    run = {
        "run_dir": str(tmp_path / "run"),
        "target": {"model": str(tmp_path / "target"), "dtype": "float32"},
        "data": {"conversations": ["data.jsonl"], "max_sequence_tokens": 128},
        "store": {
            "dir": str(tmp_path / "store"),
            "encoding": "bf16",
            "target_layer_ids": [0, 1],
            "shard_bytes": 1_000_000,
        },
        "extract": {"num_workers": 2, "batch_tokens": 256, "stop_grace_s": 0.0},
        "drafter": [{"name": "one", "num_layers": 1, "block_size": 4, "mask_token_id": 260}],
    }
    (tmp_path / "run.toml").write_text(tomli_w.dumps(run))
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts `dflash-offline extract` and, at the end, kills what is left of it."""
    started: list[subprocess.Popen[str]] = []

    def launch(*settings: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "dflash_offline.cli", "extract", "run.toml"]
        overrides = [part for setting in settings for part in ("--set", setting)]
        process = subprocess.Popen(
            [*command, *overrides],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield launch
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


def wait_for_shards(folder: Path, process: "subprocess.Popen[str]", *, number: int = 1) -> None:
    while len(list((folder / "store").glob("commits/*/*.json"))) < number:
        assert process.poll() is None, "it ended before it could be disturbed"
        time.sleep(0.005)


def workers_of(process: "subprocess.Popen[str]") -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children]


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def check_whole(folder: Path) -> None:
    """Everything is there, once, undamaged."""
    report = verify_store(folder / "store", full=True)
    assert report.problems == []
    snapshot = open_store(folder / "store").snapshot()
    ids = {snapshot.sequence_id(index) for index in range(snapshot.num_sequences)}
    assert snapshot.num_sequences == len(ids) == NUM_SEQUENCES


def test_the_others_finish_what_a_killed_worker_left(folder: Path, start: Start) -> None:
    process = start()
    wait_for_shards(folder, process)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    exit_code, output = ended(process)
    assert "killed by SIGKILL" in output
    assert exit_code == 0, output
    check_whole(folder)


def test_an_extraction_killed_whole_misses_nothing_after_resume(folder: Path, start: Start) -> None:
    process = start()
    wait_for_shards(folder, process)
    for pid in [*workers_of(process), process.pid]:
        os.kill(pid, signal.SIGKILL)
    ended(process)
    exit_code, output = ended(start("extract.num_workers=3"))
    assert exit_code == 0, output
    check_whole(folder)


def test_two_commands_on_one_store_share_it(folder: Path, start: Start) -> None:
    first = start()
    second = start(f'run_dir="{folder / "other"}"')
    (first_code, first_text), (second_code, second_text) = ended(first), ended(second)
    assert first_code == 0, first_text
    assert second_code == 0, second_text
    check_whole(folder)


def test_of_two_commands_of_one_run_one_is_refused(folder: Path, start: Start) -> None:
    ends = sorted(map(ended, [start(), start()]))
    assert [exit_code for exit_code, _ in ends] == [0, 2]
    assert "another extraction is running (process" in ends[1][1]
    check_whole(folder)


def test_ctrl_c_stops_and_says_how_to_go_on(folder: Path, start: Start) -> None:
    process = start()
    wait_for_shards(folder, process)
    process.send_signal(signal.SIGINT)
    exit_code, output = ended(process)
    assert exit_code == 75, output
    assert "stopped early; to go on: dflash-offline extract run.toml" in output
    assert open_store(folder / "store").snapshot().num_sequences < NUM_SEQUENCES
    assert ended(start())[0] == 0
    check_whole(folder)


def test_ctrl_c_twice_stops_at_once(folder: Path, start: Start) -> None:
    """Also when the open shard would get all the time it wants."""
    process = start("extract.stop_grace_s=1000", "store.shard_bytes=20_000_000")
    while not any(line for line in metrics(folder) if line["num_tokens"] > 0):
        assert process.poll() is None, "it ended before it could be disturbed"
        time.sleep(0.005)
    workers = workers_of(process)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    for line in process.stdout:
        if "stopping" in line:
            break
    start_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    exit_code, output = ended(process)
    assert time.monotonic() - start_s < 5
    assert exit_code not in (0, 2), output
    assert "to go on: dflash-offline extract run.toml" in output
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert ended(start("store.shard_bytes=20_000_000"))[0] == 0
    check_whole(folder)


def metrics(folder: Path) -> list[dict[str, int]]:
    """All lines that the workers have written so far."""
    paths = (folder / "run" / "extract").glob("*.metrics.jsonl")
    lines = (line for path in paths for line in path.read_text().splitlines())
    return [json.loads(line) for line in lines if line.endswith("}")]
