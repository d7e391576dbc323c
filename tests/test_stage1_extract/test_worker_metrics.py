"""Worker metrics: cumulative JSON lines that a launcher can follow."""

import json
from pathlib import Path
from typing import Any

import pytest

from stage1_extract.problems import UnusableConversationError
from stage1_extract.worker_metrics import Counts, WorkerMetrics


def appended(num_tokens: int, *, num_bytes: int, num_truncated: int = 0) -> Counts:
    return Counts(
        num_sequences=1,
        num_tokens=num_tokens,
        num_bytes=num_bytes,
        num_truncated=num_truncated,
    )


def problem() -> Counts:
    return Counts.of_problem(UnusableConversationError("too bad", source="x"))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_cumulative(tmp_path: Path) -> None:
    path = tmp_path / "extract" / "worker-00001.metrics.jsonl"
    metrics = WorkerMetrics(path, worker_index=1, num_workers=2, interval_s=0.0)
    metrics.add(appended(5, num_bytes=50))
    metrics.progress()
    metrics.add(appended(7, num_bytes=70, num_truncated=1))
    metrics.add(problem())
    metrics.close()
    start, progress, end = lines(path)
    assert [start["event"], progress["event"], end["event"]] == ["start", "progress", "end"]
    assert (progress["num_tokens"], end["num_tokens"]) == (5, 12)
    assert (end["num_bytes"], end["num_truncated"], end["num_failed"]) == (120, 1, 1)
    assert end["skipped"] == {"too bad": 1}
    assert (end["worker_index"], end["num_workers"]) == (1, 2)


def test_a_line_is_not_written_for_every_batch(tmp_path: Path) -> None:
    path = tmp_path / "worker.jsonl"
    metrics = WorkerMetrics(path, worker_index=0, num_workers=1, interval_s=1000.0)
    for _ in range(10):
        metrics.progress()
    metrics.progress(now=True)
    metrics.close()
    assert [line["event"] for line in lines(path)] == ["start", "progress", "end"]


def test_shares_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr("stage1_extract.worker_metrics.time.monotonic", lambda: now_s[0])
    path = tmp_path / "worker.jsonl"
    metrics = WorkerMetrics(path, worker_index=0, num_workers=1)
    with metrics.timed("forward"):
        now_s[0] += 3.0
    with metrics.timed("write"):
        now_s[0] += 1.0
    metrics.close()
    end = lines(path)[-1]
    assert (end["forward_fraction"], end["write_fraction"]) == (0.75, 0.25)
    assert end["elapsed_s"] == 4.0


def test_counts_can_be_taken_back(tmp_path: Path) -> None:
    metrics = WorkerMetrics(tmp_path / "worker.jsonl", worker_index=0, num_workers=1)
    shard = Counts()
    for counts in (appended(5, num_bytes=50), problem()):
        metrics.add(counts)
        shard.add(counts)
    assert metrics.counts == shard != Counts()
    metrics.take_back(shard)
    assert metrics.counts == Counts()


def test_a_store_slower_than_the_gpu_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = [0.0]
    monkeypatch.setattr("stage1_extract.worker_metrics.time.monotonic", lambda: now_s[0])
    metrics = WorkerMetrics(tmp_path / "worker.jsonl", worker_index=0, num_workers=1)
    metrics.add(appended(5, num_bytes=3_000_000_000))
    metrics.add_seconds({"wait": 7.5})
    for now_s[0] in (10.0, 30.0, 31.0):
        metrics.progress()
    warning = capsys.readouterr().err
    assert warning.count("the store is slower than the GPU") == 1
    assert "25% of the time: it takes 100 MB/s, the GPU would give 133;" in warning


def test_time_is_counted_from_the_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr("stage1_extract.worker_metrics.time.monotonic", lambda: now_s[0])
    metrics = WorkerMetrics(tmp_path / "worker.jsonl", worker_index=0, num_workers=1)
    metrics.add_seconds({"forward": 5.0})
    now_s[0] = 100.0
    metrics.restart_clock()
    metrics.add_seconds({"forward": 1.0})
    now_s[0] = 104.0
    assert metrics.fraction("forward") == 0.25


def test_the_compilers_part_of_the_line(tmp_path: Path) -> None:
    metrics = WorkerMetrics(tmp_path / "worker.jsonl", worker_index=0, num_workers=1)
    metrics.evidence = lambda: {
        "execution": "mixed",
        "num_layer_runs": 8,
        "num_compiled_layer_runs": 6,
        "num_compiles": 2,
        "num_compiles_cold": 1,
        "num_compiles_cached": 1,
        "num_graph_breaks": 0,
    }
    expected = "layers mixed (6 of 8 runs), compiles 2 (cold 1 disk 1), breaks 0"
    assert expected in metrics.summary()
    evidence = metrics.evidence() | {"num_replays": 5}
    metrics.evidence = lambda: evidence
    assert "(6 of 8 runs, 5 passes replayed), compiles 2" in metrics.summary()
    metrics.close()
    assert lines(tmp_path / "worker.jsonl")[-1]["num_compiled_layer_runs"] == 6


def test_the_summary_says_what_was_left_out(tmp_path: Path) -> None:
    metrics = WorkerMetrics(tmp_path / "worker.jsonl", worker_index=0, num_workers=1)
    metrics.add(appended(5, num_bytes=50, num_truncated=1))
    metrics.add(problem())
    assert metrics.summary().startswith("1 sequences, 5 tokens, 0.0 MB in 0 shards,")
    assert metrics.summary().endswith("truncated 1; skipped 1 x too bad")
