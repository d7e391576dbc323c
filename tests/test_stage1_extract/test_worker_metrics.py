"""Worker metrics: cumulative JSON lines that a launcher can follow."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stage1_extract.problems import UnusableConversationError
from stage1_extract.sequences import TokenSequence
from stage1_extract.worker_metrics import WorkerMetrics


def sequence(num_tokens: int, *, is_truncated: bool = False) -> TokenSequence:
    return TokenSequence(
        id="c",
        token_ids=np.zeros(num_tokens, dtype=np.int32),
        loss_mask=np.ones(num_tokens, dtype=np.bool_),
        greedy=False,
        is_truncated=is_truncated,
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_cumulative(tmp_path: Path) -> None:
    path = tmp_path / "extract" / "worker-00001.metrics.jsonl"
    metrics = WorkerMetrics(path, worker_index=1, num_workers=2, interval_s=0.0)
    metrics.count(sequence(5), num_bytes=50)
    metrics.progress()
    metrics.count(sequence(7, is_truncated=True), num_bytes=70)
    metrics.count_skipped(UnusableConversationError("too bad", source="x"))
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
    before = metrics.counts.copy()
    metrics.count(sequence(5), num_bytes=50)
    metrics.count_skipped(UnusableConversationError("too bad", source="x", is_wanted=True))
    assert metrics.counts != before
    metrics.counts = before
    assert metrics.counts.num_tokens == 0
    assert not metrics.counts.skipped


def test_the_summary_says_what_was_left_out(tmp_path: Path) -> None:
    metrics = WorkerMetrics(tmp_path / "worker.jsonl", worker_index=0, num_workers=1)
    metrics.count(sequence(5, is_truncated=True), num_bytes=50)
    metrics.count_skipped(UnusableConversationError("too bad", source="x"))
    assert metrics.summary().startswith("1 sequences, 5 tokens, 0.0 MB in 0 shards,")
    assert metrics.summary().endswith("truncated 1; skipped 1 x too bad")
