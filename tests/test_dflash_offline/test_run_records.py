"""What a run's files say: the newest whole lines, of the newest extraction and process only."""

import json
import runpy
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_offline.config import RunConfig, load_run_file
from dflash_offline.run_records import (
    StoreRecords,
    last_checkpoint,
    newest_workers,
    read_drafter,
    read_lines,
    read_run,
)
from storage.repair import bury_damaged
from storage.verify_report import Problem


def write_lines(path: Path, *lines: dict[str, Any] | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines]
    path.write_text("".join(texts))


def test_a_torn_line_is_left_out_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    # A process was killed in the middle of a line; its successor went on behind it.
    write_lines(path, {"a": 1}, '{"a": 2', '{"a": 3}\n', "7\n", {"a": 4}, '{"a": 5')
    assert [line["a"] for line in read_lines(path)] == [1, 4]
    assert list(read_lines(tmp_path / "none")) == []


@pytest.mark.parametrize("tail_bytes", range(1, 40))
def test_a_tail_gives_whole_lines_only(tmp_path: Path, tail_bytes: int) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, *({"number": number} for number in range(9)))
    numbers = [line["number"] for line in read_lines(path, tail_bytes=tail_bytes)]
    assert numbers == list(range(9))[len(range(9)) - len(numbers) :]


def test_workers_of_an_earlier_extraction_do_not_count(tmp_path: Path) -> None:
    for index, (time_s, num_workers) in enumerate([(20.0, 2), (21.0, 2), (5.0, 3)]):
        line = {"time_s": time_s, "worker_index": index, "num_workers": num_workers}
        write_lines(tmp_path / f"worker-{index:05d}.metrics.jsonl", line)
    assert [line["worker_index"] for line in newest_workers(tmp_path)] == [0, 1]
    assert newest_workers(tmp_path / "none") == []


def test_records_are_those_of_the_last_process(tmp_path: Path) -> None:
    steps = [
        {"kind": "train", "step": step, "total_steps": 9, "time_s": time_s}
        for step, time_s in ((1, 1.0), (2, 2.0), (3, 1000.0), (4, 1001.0))
    ]
    steps[0]["first_report_s"] = steps[2]["first_report_s"] = 7.0
    validation = {"kind": "validation", "step": 2, "loss": 5.0}
    write_lines(tmp_path / "metrics.jsonl", *steps[:2], validation, *steps[2:])
    found = read_drafter(tmp_path)
    assert [line["step"] for line in found.train] == [3, 4]
    assert found.validation == validation
    assert (found.step, found.is_done, found.evaluation) == (0, False, None)


def test_a_validation_is_found_behind_many_lines_of_steps(tmp_path: Path) -> None:
    validation = {"kind": "validation", "step": 0, "loss": 5.0}
    words = "x" * 1500
    steps = [
        {"kind": "train", "step": step, "total_steps": 900, "time_s": 1.0 * step, "words": words}
        for step in range(1, 500)
    ]
    write_lines(tmp_path / "metrics.jsonl", validation, *steps)
    found = read_drafter(tmp_path)
    assert found.validation == validation
    # A pace is that of now, not of hours ago.
    assert [line["step"] for line in found.train] == list(range(440, 500))


def test_a_training_that_goes_on_behind_its_last_step_is_not_done(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-00000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text('{"step": 4, "is_done": true}')
    steps = [
        {"kind": "train", "step": step, "total_steps": total, "time_s": 1.0 * step}
        for step, total in ((4, 4), (5, 8))
    ]
    write_lines(tmp_path / "metrics.jsonl", *steps[:1])
    assert read_drafter(tmp_path).is_done
    write_lines(tmp_path / "metrics.jsonl", *steps)
    assert not read_drafter(tmp_path).is_done


def test_a_torn_checkpoint_is_passed_over(tmp_path: Path) -> None:
    for step, text in ((3, '{"step": 3, "is_done": false}'), (6, '{"step": 6'), (9, "{}")):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(text)
    assert last_checkpoint(tmp_path) == (3, False)


def test_a_run_that_has_not_begun_is_empty(tiny_run: RunConfig, tmp_path: Path) -> None:
    found = read_run(tiny_run.model_copy(update={"run_dir": str(tmp_path / "nothing")}))
    assert found.store == StoreRecords()
    assert found.workers == []
    assert [drafter.train for drafter in found.drafters] == [[]]


def test_a_store_that_fills_is_counted_without_its_ids(tmp_path: Path) -> None:
    path = Path(__file__).parents[1] / "test_storage" / "fill_store.py"
    making = SimpleNamespace(**runpy.run_path(str(path)))
    store = making.make_store(tmp_path / "store", num_sequences=40, num_units=4)
    making.fill_unit(store, store.units()[0])
    buried = store.units()[1]
    making.fill_unit(store, buried)
    problem = Problem(str(buried), layer=None, chunk=None, sequence_ids=(), message="lost")
    bury_damaged(tmp_path / "store", [problem])
    for ids in (tmp_path / "store" / "plans").iterdir():
        ids.unlink()
    text = f"""
        run_dir = "{tmp_path}"
        [target]
        model = "some/model"
        [data]
        conversations = ["x.jsonl"]
        [[drafter]]
        name = "one"
    """
    (tmp_path / "run.toml").write_text(text)
    found = read_run(load_run_file(tmp_path / "run.toml")).store
    assert (found.num_units, found.num_committed) == (3, 1)
    assert 20 <= found.num_sequences_left <= 30


def test_a_finished_run_is_read_whole(tiny_run: RunConfig) -> None:
    found = read_run(tiny_run)
    assert found.store.num_committed == found.store.num_units == 1
    assert found.store.num_sequences_left == 0
    (worker,), (drafter,) = found.workers, found.drafters
    assert worker["event"] == "end"
    assert worker["time_s"] < time.time()
    assert drafter.is_done
    assert drafter.train[-1]["step"] == drafter.step == 4
