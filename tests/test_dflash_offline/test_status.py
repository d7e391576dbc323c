"""`status` says how far, how fast, what sets the pace and how long still, from records alone."""

import json
import time
from typing import Any

import pytest
from click.testing import CliRunner

from dflash_offline.cli import main
from dflash_offline.config import RunConfig, as_toml_tables
from dflash_offline.run_records import DrafterRecords, RunRecords, StoreRecords
from dflash_offline.status import (
    drafter_state,
    extraction_left_s,
    status_as_json,
    status_lines,
    training_left_s,
    training_pace,
    worker_pace,
    worker_state,
)

PARTS = ("tokenize", "forward", "encode", "copy", "write", "wait", "idle")


def worker(*, silent_s: float = 1.0, **changes: Any) -> dict[str, Any]:
    line = {
        "time_s": time.time() - silent_s,
        "event": "progress",
        "worker_index": 0,
        "num_workers": 1,
        "num_units": 2,
        "num_sequences": 90,
        "num_tokens": 9000,
        "num_bytes": 10**9,
        "skipped": {"no supervised pair": 10},
        "elapsed_s": 50.0,
        "tokens_per_s": 180.0,
        **{f"{part}_fraction": 0.0 for part in PARTS},
    }
    return line | changes


def record(step: int, *, time_s: float, **changes: Any) -> dict[str, Any]:
    line = {
        "kind": "train",
        "time_s": time_s,
        "step": step,
        "total_steps": 100,
        "step_s": 0.5,
        "loss": 3.25,
        "tokens_per_s": 31_300.0,
        "num_tokens_seen": 4_560_000,
        "wait_fraction": 0.003,
        "compute_fraction": 0.997,
        "read_bytes_per_s": 0.4e9,
        "read_bytes_per_s_needed": 0.9e9,
    }
    return line | changes


def drafter(*train: dict[str, Any], **changes: Any) -> DrafterRecords:
    fields = {"name": "small", "validation": None, "step": 0, "is_done": False, "evaluation": None}
    process = {"is_gone": False, "started_s": None}
    return DrafterRecords(train=train, **(process | fields | changes))


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ({"forward": 0.97, "copy": 0.02, "write": 0.99}, "the target's forward pass 97%"),
        ({"forward": 0.7, "wait": 0.28, "copy": 0.1}, "the store: the GPU waits 28%"),
        ({"forward": 0.6, "idle": 0.35, "wait": 0.06, "copy": 0.1}, "the CPU: the GPU idles 35%"),
        ({"tokenize": 0.6, "forward": 0.3, "write": 0.1}, "tokenizing 60%"),
        ({"tokenize": 0.1, "forward": 0.3, "write": 0.6}, "writing 60%"),
        ({}, ""),
    ],
)
def test_the_part_that_sets_a_workers_pace_is_named(shares: dict[str, float], words: str) -> None:
    line = worker(**{f"{part}_fraction": share for part, share in shares.items()})
    assert worker_pace(line) == words
    assert worker_pace(line | {"num_sequences": 0}) == ""


def test_a_drafter_computes_or_waits_for_the_store() -> None:
    assert training_pace(record(1, time_s=0.0)) == "computing 100%"
    slow = record(1, time_s=0.0, wait_fraction=0.31)
    assert training_pace(slow) == "the store: waits 31%, has 0.4 GB/s of 0.9 GB/s"


def test_time_left_of_an_extraction_is_that_of_its_live_workers() -> None:
    store = StoreRecords(num_units=10, num_committed=4, num_sequences_left=600)
    # Two live workers of two sequences a second each; what the others did does not help.
    workers = [worker(), worker(), worker(silent_s=500.0), worker(event="end")]
    assert extraction_left_s(RunRecords(store=store, workers=workers, drafters=[])) == 150.0
    dead = RunRecords(store=store, workers=workers[2:], drafters=[])
    assert extraction_left_s(dead) is None
    assert [worker_state(each) for each in workers] == ["running"] * 2 + [
        "silent for 8 min",
        "ended",
    ]


def test_time_left_of_a_drafter_counts_its_pauses() -> None:
    now_s = time.time()
    # Ten steps in 20 s by the clock, though a step itself takes half a second.
    found = drafter(record(30, time_s=now_s - 21), record(40, time_s=now_s - 1))
    assert training_left_s(found) == pytest.approx(120.0)
    assert drafter_state(found) == "running"
    silent = drafter(record(30, time_s=now_s - 1020), record(40, time_s=now_s - 1000))
    assert (drafter_state(silent), training_left_s(silent)) == ("silent for 17 min", None)


def test_a_drafter_of_long_steps_is_not_taken_for_dead() -> None:
    now_s = time.time()
    found = drafter(record(30, time_s=now_s - 900), record(40, time_s=now_s - 300))
    assert drafter_state(found) == "running"


def test_a_drafter_that_is_done_or_waits_says_so() -> None:
    assert drafter_state(drafter(is_done=True, step=9)) == "done"
    assert drafter_state(drafter()) == "not started"
    assert drafter_state(drafter(step=9)) == "stopped at step 9"
    newest = record(40, time_s=time.time())
    assert drafter_state(drafter(newest, step=39, is_gone=True)) == "stopped, checkpoint at step 39"


def test_a_drafter_that_waits_for_the_store_or_compiles_is_starting() -> None:
    now_s = time.time()
    assert drafter_state(drafter(started_s=now_s - 40)) == "starting for 40 s"
    assert drafter_state(drafter(started_s=now_s, is_gone=True)) == "stopped before its first step"
    # Resumed: the records are those of the process before.
    resumed = drafter(record(40, time_s=now_s - 9000), step=39, started_s=now_s - 40)
    assert (drafter_state(resumed), training_left_s(resumed)) == ("starting for 40 s", None)
    trains = drafter(record(40, time_s=now_s - 1), step=39, started_s=now_s - 40)
    assert drafter_state(trains) == "running"


def test_the_lines_say_what_matters() -> None:
    now_s = time.time()
    records = RunRecords(
        store=StoreRecords(num_units=10, num_committed=4, num_sequences_left=600),
        workers=[worker(forward_fraction=0.9)],
        drafters=[
            drafter(
                record(30, time_s=now_s - 21),
                record(40, time_s=now_s - 1),
                validation={"loss": 2.5, "acceptance_length": 2.61},
                evaluation={"suites": {"gsm8k": {"acceptance_length": 2.9}}},
            )
        ],
    )
    assert status_lines(records) == [
        "extraction: 4 of 10 units committed (40%), 1 workers, 180 tok/s, 5 min left",
        "  worker 0: running | 2 shards, 90 sequences, 10 skipped | 180 tok/s, 20 MB/s"
        " | pace: the target's forward pass 90%",
        "drafter small: running, step 40 of 100, 2 min left | 31.3k tok/s, 4.6 M tokens seen"
        " | pace: computing 100% | loss 3.250"
        " | held out: loss 2.500, acceptance length 2.61 by the walk | decoded: gsm8k 2.90",
    ]
    assert json.loads(json.dumps(status_as_json(records)))["drafters"][0]["left_s"] > 100


def test_many_workers_are_summed_up() -> None:
    store = StoreRecords(num_units=10, num_committed=4, num_sequences_left=600)
    records = RunRecords(store=store, workers=[worker()] * 1000, drafters=[])
    lines = status_lines(records)
    assert "1000 workers, 180.0k tok/s" in lines[0]
    assert lines[-1] == "  and 984 more workers"


def test_the_command_shows_a_finished_run(tiny_run: RunConfig, tmp_path: Any) -> None:
    import tomli_w

    run_file = tmp_path / "run.toml"
    run_file.write_text(tomli_w.dumps(as_toml_tables(tiny_run)))
    shown = CliRunner().invoke(main, ["status", str(run_file)])
    assert shown.exit_code == 0
    assert "extraction: 1 of 1 units committed (100%)" in shown.output
    assert "drafter small: done, step 4 of 4" in shown.output
    found = json.loads(CliRunner().invoke(main, ["status", str(run_file), "--json"]).output)
    assert found["extract"]["workers"][0]["state"] == "ended"
    assert found["drafters"][0]["state"] == "done"
