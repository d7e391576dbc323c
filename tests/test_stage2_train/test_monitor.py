"""Reports: one JSON line each, forgotten where a resumed run will say it again."""

import json

import pytest
import torch

from stage2_train.monitor import (
    Interval,
    Monitor,
    forget_after,
    live_line,
    scalars,
    thousands,
    time_shares,
    validation_line,
    warning_words,
)

RECORD = {
    "kind": "train",
    "step": 120,
    "step_s": 0.25,
    "loss": 3.21,
    "accuracy_by_offset": [1.0, 0.5, 0.25],
    "simulated_acceptance_length": 1.45,
    "tokens_per_s": 12_345.0,
    "block_tokens_per_s": 900.0,
    "execution": "eager",
    "wait_fraction": 0.003,
    "copy_fraction": 0.04,
    "compute_fraction": 0.997,
    "read_bytes_per_s": 0.41e9,
    "read_bytes_per_s_needed": 0.9e9,
    "token_fill_fraction": 0.98,
    "block_fill_fraction": 1.0,
}


def test_live_line_says_what_matters():
    line = live_line(RECORD, total_steps=800)
    assert line == (
        "step 120/800 250ms loss 3.210 acc 1.00 .50 .25 sim 1.45 | "
        "12.3k tok/s 900 block tok/s | eager | wait 0.3% copy 4.0% compute 99.7% read 0.41 GB/s"
    )


def test_waiting_for_data_is_said_in_words():
    slow = live_line(RECORD | {"wait_fraction": 0.31}, total_steps=800)
    assert (
        "waiting for data 31%: the store gives 0.41 GB/s, this drafter needs 0.9 GB/s: a faster"
        in slow
    )
    first = live_line(RECORD | {"wait_fraction": 0.31, "first_report_s": 41.3}, total_steps=800)
    assert first.endswith("| 41 s after start")


def test_padding_is_said_in_words():
    assert "only 60% of the blocks are real" in warning_words(RECORD | {"block_fill_fraction": 0.6})
    assert "only 60% of a batch are tokens" in warning_words(RECORD | {"token_fill_fraction": 0.6})
    assert warning_words(RECORD) == ""


def test_the_store_must_give_its_bytes_while_the_drafter_computes():
    done = Interval(num_state_bytes=600, wait_s=4.0, copy_s=1.0)
    assert time_shares(done, elapsed_s=10.0) == {
        "wait_fraction": 0.4,
        "compute_fraction": 0.6,
        "copy_fraction": 0.1,
        "read_bytes_per_s": 60.0,
        "read_bytes_per_s_needed": 100.0,
    }


def test_memory_is_shown_on_a_gpu():
    memory = {"memory_peak_bytes": 2**30, "memory_total_bytes": 2**32, "memory_retries": 2}
    assert "mem 1/4 GiB retries 2" in live_line(RECORD | memory, total_steps=800)


def test_validation_line():
    found = {"loss": 2.0, "accuracy": 0.5, "simulated_acceptance_length": 1.5}
    assert "nothing is held out" in validation_line(3, {})
    assert "acceptance length" not in validation_line(3, found)
    walked = found | {"acceptance_length": 1.75, "num_walked": 4}
    assert "acceptance length 1.750 on 4 greedy answers" in validation_line(3, walked)


def test_scalars_spread_lists_over_offsets():
    flat = scalars(RECORD)
    assert flat["accuracy_by_offset/2"] == 0.5
    assert "execution" not in flat
    assert "step" not in flat


@pytest.mark.parametrize(("value", "text"), [(12.4, "12"), (999.0, "999"), (1500.0, "1.5k")])
def test_rates_are_short(value, text):
    assert thousands(value) == text


def test_records_after_the_checkpoint_and_torn_lines_are_forgotten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s}) + "\n" for s in (1, 2, 3)) + '{"step": 2, "lo')
    forget_after(path, step=2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
    forget_after(tmp_path / "none.jsonl", step=2)


def test_compilations_and_use_of_the_gpu_are_shown():
    found = {
        "execution": "compiled",
        "num_compiles": 0,
        "num_compiles_cold": 1,
        "num_compiles_cached": 2,
        "num_graph_breaks": 0,
        "mfu_fraction": 0.784,
    }
    line = live_line(RECORD | found, total_steps=800)
    assert "| compiled, compiles 0 (cold 1 disk 2) breaks 0 | MFU 0.78 | wait" in line


def test_time_of_a_pause_is_charged_to_no_step(tmp_path, monkeypatch, architecture):
    clock = [0.0]
    monkeypatch.setattr("stage2_train.monitor.time.perf_counter", lambda: clock[0])
    monitor = Monitor(tmp_path, device=torch.device("cpu"), architecture=architecture)
    monitor.start(first_step=0)
    clock[0] = 1.0
    with monitor.pause():
        clock[0] = 101.0
    clock[0] = 102.0
    assert clock[0] - monitor._start_s == 2.0
    monitor.close()
