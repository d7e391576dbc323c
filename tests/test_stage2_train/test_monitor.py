"""Reports: one JSON line each, forgotten where a resumed run will say it again."""

import json

import torch

from stage2_train.monitor import Interval, Monitor, forget_after, scalars, time_shares


def test_the_store_must_give_its_bytes_while_the_drafter_computes():
    done = Interval(num_state_bytes=600, wait_s=4.0, copy_s=1.0)
    assert time_shares(done, elapsed_s=10.0) == {
        "wait_fraction": 0.4,
        "compute_fraction": 0.6,
        "copy_fraction": 0.1,
        "read_bytes_per_s": 60.0,
        "read_bytes_per_s_needed": 100.0,
    }


def test_scalars_spread_lists_over_offsets():
    flat = scalars(
        {"kind": "train", "step": 120, "accuracy_by_offset": [1.0, 0.5], "execution": "eager"}
    )
    assert flat["accuracy_by_offset/2"] == 0.5
    assert "execution" not in flat
    assert "step" not in flat


def test_records_after_the_checkpoint_and_torn_lines_are_forgotten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s}) + "\n" for s in (1, 2, 3)) + '{"step": 2, "lo')
    forget_after(path, step=2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
    forget_after(tmp_path / "none.jsonl", step=2)


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
