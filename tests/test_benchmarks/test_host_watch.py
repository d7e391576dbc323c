"""Windows of a whole-host run: what counts inside them is exactly what happened inside them."""

import importlib
import math

import pytest


@pytest.fixture
def watch():
    return importlib.import_module("host_watch")


def worker_line(time_s: float, num_tokens: int, *, forward: float = 0.9, wait: float = 0.0):
    return {
        "time_s": time_s,
        "elapsed_s": time_s,
        "num_tokens": num_tokens,
        "num_bytes": 10 * num_tokens,
        "forward_fraction": forward,
        "encode_fraction": 0.0,
        "wait_fraction": wait,
    }


def train_record(time_s: float, step: int, *, step_s: float = 0.5, tok_s: float = 1000.0):
    return {
        "time_s": time_s,
        "step": step,
        "step_s": step_s,
        "tokens_per_s": tok_s,
        "wait_fraction": 0.1,
        "compute_fraction": 0.9,
        "read_bytes_per_s": 5.0,
        "execution": "compiled",
        "num_compiles": 0,
    }


def test_a_workers_rate_lies_between_its_first_and_last_line_of_the_window(watch):
    lines = [worker_line(t, 100 * t) for t in range(6)] + [worker_line(100.0, 10**6)]
    # Sealing a shard is logged, too, somewhere between two batches.
    lines.insert(5, worker_line(4.9, 400))
    pace = watch.worker_pace(lines, start_s=1.5, stop_s=5.5)
    assert pace.tok_s == pytest.approx(100.0)
    assert pace.bytes_s == pytest.approx(1000.0)
    assert pace.busy == pytest.approx(0.9)


def test_shares_of_a_window_are_not_those_of_all_the_time_so_far(watch):
    lines = [
        worker_line(0.1, 0),
        worker_line(10.0, 1, forward=1.0),
        worker_line(20.0, 100, forward=0.75, wait=0.25),
    ]
    pace = watch.worker_pace(lines, start_s=0.0, stop_s=30.0)
    assert pace.busy == pytest.approx(0.5)
    assert pace.waiting == pytest.approx(0.5)


@pytest.mark.parametrize("lines", [[], [2.0], [2.0, 30.0]])
def test_one_line_tells_no_rate(watch, lines):
    assert watch.worker_pace([worker_line(t, 1) for t in lines], start_s=1.0, stop_s=9.0) is None


def test_records_that_reach_out_of_the_window_are_left_out(watch):
    """The first one after a halt spans the halt."""
    found = [
        train_record(10.0, 10),
        train_record(60.0, 11, step_s=50.0, tok_s=1.0),
        train_record(61.0, 13),
        train_record(62.0, 15, tok_s=2000.0),
        train_record(70.0, 17, tok_s=9.0),
    ]
    pace = watch.drafter_pace(found, start_s=60.0, stop_s=65.0)
    assert pace.tok_s == pytest.approx(1500.0)
    assert pace.is_compiled
    assert watch.drafter_pace(found, start_s=62.5, stop_s=65.0) is None


def test_an_eager_step_is_told(watch):
    found = [train_record(1.0, 1), train_record(2.0, 3) | {"execution": "mixed", "num_compiles": 2}]
    pace = watch.drafter_pace(found, start_s=0.0, stop_s=9.0)
    assert not pace.is_compiled
    assert pace.num_compiles == 2


def test_samples_of_nvidia_smi_are_read_and_torn_lines_left_out(watch, tmp_path):
    path = tmp_path / "gpus.csv"
    path.write_text(
        "2026/11/30 01:42:10.500, 0, 97, 512.3, 1980, 70123\n"
        "2026/11/30 01:42:10.501, 1, 0, [N/A], 345, 3\n"
        "2026/11/30 01:42:11.000, 0, 99, 51"
    )
    (sample,) = watch.gpu_samples(path)
    assert (sample.index, sample.busy, sample.power_w) == (0, 0.97, 512.3)
    span = {"start_s": sample.time_s - 1, "stop_s": sample.time_s + 1}
    assert watch.busy_fraction([sample], 0, **span) == 0.97
    assert math.isnan(watch.busy_fraction([sample], 1, **span))


@pytest.mark.parametrize(
    ("selected", "gpu", "physical"), [("", 1, 1), ("2,5", 1, 5), ("GPU-a,GPU-b", 1, 1)]
)
def test_gpus_are_counted_within_the_selection(watch, monkeypatch, selected, gpu, physical):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", selected)
    assert watch.physical_gpu(gpu) == physical
