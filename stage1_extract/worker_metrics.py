"""Worker metrics: what one worker has done so far, as JSON lines for the launcher and the report.

Each line is cumulative since the process started: `time_s` (Unix), `event` ("start", "progress",
"end"), `worker_index`, `num_workers`, `num_units` committed by this worker, `num_sequences`,
`num_tokens`, `num_bytes` written, `num_truncated`, `num_failed`, `skipped` (reason to count),
`elapsed_s`, `tokens_per_s`, and shares of the elapsed time: `tokenize_fraction`,
`forward_fraction`, `encode_fraction`, `write_fraction`.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from stage1_extract.problems import UnusableConversationError
from stage1_extract.sequences import TokenSequence

Part = Literal["tokenize", "forward", "encode", "write"]
_PARTS: tuple[Part, ...] = ("tokenize", "forward", "encode", "write")


@dataclass
class Counts:
    """What a worker has done since it started."""

    num_units: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_truncated: int = 0
    num_failed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def copy(self) -> "Counts":
        """The counts as they are now."""
        return replace(self, skipped=Counter(self.skipped))


class WorkerMetrics:
    """Counts and times of one worker; appends a line now and then."""

    def __init__(self, path: Path, *, worker_index: int, num_workers: int, interval_s: float = 1.0):
        self.counts = Counts()
        self._worker = {"worker_index": worker_index, "num_workers": num_workers}
        self._seconds = dict.fromkeys(_PARTS, 0.0)
        self._interval_s = interval_s
        self._start_s = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._write("start")

    @contextmanager
    def timed(self, part: Part) -> Iterator[None]:
        """Adds the time of the block to a part's share."""
        start_s = time.monotonic()
        try:
            yield
        finally:
            self._seconds[part] += time.monotonic() - start_s

    def count(self, sequence: TokenSequence, *, num_bytes: int) -> None:
        """Counts a sequence that was appended."""
        self.counts.num_sequences += 1
        self.counts.num_tokens += sequence.num_tokens
        self.counts.num_truncated += sequence.is_truncated
        self.counts.num_bytes += num_bytes

    def count_skipped(self, problem: UnusableConversationError) -> int:
        """Counts a sequence that holds no states; returns how many had the same reason so far."""
        self.counts.num_failed += not problem.is_wanted
        self.counts.skipped[problem.reason] += 1
        return self.counts.skipped[problem.reason]

    def progress(self, *, now: bool = False) -> None:
        """Appends a line if the last one is old enough, or now."""
        if now or time.monotonic() - self._written_s >= self._interval_s:
            self._write("progress")

    def close(self) -> None:
        """Appends the last line and closes the file."""
        self._write("end")
        self._file.close()

    def summary(self) -> str:
        """One line for people: what was written, how fast, what was left out and why."""
        counts = self.counts
        line = (
            f"{counts.num_sequences} sequences, {counts.num_tokens} tokens,"
            f" {counts.num_bytes / 1e6:.1f} MB in {counts.num_units} shards,"
            f" {counts.num_tokens / self._elapsed_s():.0f} tok/s"
        )
        if counts.num_truncated:
            line += f"; truncated {counts.num_truncated}"
        if counts.skipped:
            reasons = (f"{count} x {name}" for name, count in counts.skipped.most_common())
            line += f"; skipped {', '.join(reasons)}"
        return line

    def _elapsed_s(self) -> float:
        return max(time.monotonic() - self._start_s, 1e-9)

    def _write(self, event: str) -> None:
        elapsed_s = self._elapsed_s()
        line = {
            "time_s": time.time(),
            "event": event,
            **self._worker,
            **vars(self.counts),
            "elapsed_s": round(elapsed_s, 3),
            "tokens_per_s": round(self.counts.num_tokens / elapsed_s, 1),
        }
        for part in _PARTS:
            line[f"{part}_fraction"] = round(self._seconds[part] / elapsed_s, 4)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._written_s = time.monotonic()
