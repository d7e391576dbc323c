"""Worker metrics: what one worker has done so far, as JSON lines for the launcher and the report.

Each line is cumulative; time counts from the first unit on, preparation left out. It holds `time_s`
(Unix), `event` ("start", "progress", "end"), `worker_index`, `num_workers`, `num_units` committed
by this worker, `num_sequences`, `num_tokens`, `num_bytes` written, `num_truncated`, `num_failed`,
`num_saturated` values, `skipped` (reason to count), `elapsed_s`, `tokens_per_s`, what `evidence`
says of the compiler, and shares of the elapsed time by part, see `Part`. Now and then the same is
printed as one line.
"""

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from stage1_extract.problems import UnusableConversationError

Part = Literal["tokenize", "forward", "encode", "copy", "write", "wait", "idle"]
"""Where time goes. On the CPU the parts follow each other. On a GPU `forward`, `encode`, `wait` (no
buffer is free: the store is slower) and `idle` (no work was handed over) are the GPU's time and
make up the whole, while `tokenize`, `copy` and `write` happen beside it."""
_PARTS: tuple[Part, ...] = get_args(Part)

BAD_WAIT_FRACTION = 0.05
"""Above this share the store sets the pace, not the target."""
_FAIR_SAMPLE_S = 20.0


@dataclass
class Counts:
    """What a worker, or one shard of it, holds."""

    num_units: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_truncated: int = 0
    num_failed: int = 0
    num_saturated: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of_problem(cls, problem: UnusableConversationError) -> "Counts":
        """One sequence that holds no states."""
        skipped = Counter([problem.reason])
        return cls(num_failed=int(not problem.is_wanted), skipped=skipped)

    def add(self, other: "Counts", *, sign: Literal[1, -1] = 1) -> None:
        """Adds other counts, or takes them away."""
        for name, value in vars(other).items():
            if name != "skipped":
                setattr(self, name, getattr(self, name) + sign * value)
        for reason, count in other.skipped.items():
            self.skipped[reason] += sign * count
        self.skipped = +self.skipped


class WorkerMetrics:
    """Counts and times of one worker, from any of its threads; appends a line now and then."""

    def __init__(
        self,
        path: Path,
        *,
        worker_index: int,
        num_workers: int,
        interval_s: float = 1.0,
        print_interval_s: float = 60.0,
    ):
        self.counts = Counts()
        self.evidence: Callable[[], Mapping[str, Any]] = dict
        """Gives what the compiler did, for each line."""
        self._worker = {"worker_index": worker_index, "num_workers": num_workers}
        self._seconds = dict.fromkeys(_PARTS, 0.0)
        self._interval_s, self._print_interval_s = interval_s, print_interval_s
        self._start_s = self._printed_s = time.monotonic()
        self._has_warned = False
        self._lock = threading.RLock()
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
            self.add_seconds({part: time.monotonic() - start_s})

    def add_seconds(self, seconds: Mapping[Part, float]) -> None:
        """Adds measured times to the parts' shares."""
        with self._lock:
            for part, value in seconds.items():
                self._seconds[part] += value

    def restart_clock(self) -> None:
        """Counts time from now on: what came before was preparation."""
        with self._lock:
            self._start_s = self._printed_s = time.monotonic()
            self._seconds = dict.fromkeys(_PARTS, 0.0)

    def add(self, counts: Counts) -> None:
        """Counts what was appended, skipped or sealed."""
        with self._lock:
            self.counts.add(counts)

    def take_back(self, counts: Counts) -> None:
        """Takes away what a dropped shard had counted."""
        with self._lock:
            self.counts.add(counts, sign=-1)

    def progress(self, *, now: bool = False) -> None:
        """Appends a line if the last one is old enough, or now; prints one more rarely."""
        with self._lock:
            now_s = time.monotonic()
            if now or now_s - self._written_s >= self._interval_s:
                self._write("progress")
            if now_s - self._printed_s >= self._print_interval_s:
                self._printed_s = now_s
                print(self.summary(), flush=True)
            self._warn_of_a_slow_store()

    def close(self) -> None:
        """Appends the last line and closes the file."""
        with self._lock:
            self._write("end")
            self._file.close()

    def summary(self) -> str:
        """One line for people: what was written, how fast, where time went, what was left out."""
        with self._lock:
            counts, elapsed_s = self.counts, self._elapsed_s()
            line = (
                f"{counts.num_sequences} sequences, {counts.num_tokens} tokens,"
                f" {counts.num_bytes / 1e6:.1f} MB in {counts.num_units} shards,"
                f" {counts.num_tokens / elapsed_s:.0f} tok/s,"
                f" {counts.num_bytes / 1e6 / elapsed_s:.0f} MB/s | {self._shares_in_words()}"
            )
            line += compiler_in_words(self.evidence())
            if counts.num_saturated:
                line += f"; {counts.num_saturated} values beyond the encoding's range were cut"
            if counts.num_truncated:
                line += f"; truncated {counts.num_truncated}"
            if counts.skipped:
                reasons = (f"{count} x {name}" for name, count in counts.skipped.most_common())
                line += f"; skipped {', '.join(reasons)}"
            return line

    def fraction(self, part: Part) -> float:
        """A part's share of the elapsed time."""
        return self._seconds[part] / self._elapsed_s()

    def _shares_in_words(self) -> str:
        shares = ((part, self.fraction(part)) for part in _PARTS)
        return " ".join(f"{part} {share:.1%}" for part, share in shares if share > 0)

    def _warn_of_a_slow_store(self) -> None:
        wait_fraction, elapsed_s = self.fraction("wait"), self._elapsed_s()
        if self._has_warned or elapsed_s < _FAIR_SAMPLE_S or wait_fraction < BAD_WAIT_FRACTION:
            return
        self._has_warned = True
        taken = self.counts.num_bytes / 1e6 / elapsed_s
        print(
            f"the store is slower than the GPU, which has waited for it {wait_fraction:.0%} of the"
            f" time: it takes {taken:.0f} MB/s, the GPU would give"
            f" {taken / (1 - min(wait_fraction, 0.99)):.0f}; a faster disk, a smaller"
            " store.encoding or fewer layers would help",
            file=sys.stderr,
            flush=True,
        )

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
            **self.evidence(),
        }
        for part in _PARTS:
            line[f"{part}_fraction"] = round(self.fraction(part), 4)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._written_s = time.monotonic()


def compiler_in_words(evidence: Mapping[str, Any]) -> str:
    """The compiler's part of a log line; nothing where nothing was to be compiled."""
    if not evidence:
        return ""
    replays = evidence.get("num_replays", 0)
    return (
        f" | layers {evidence['execution']} ({evidence['num_compiled_layer_runs']} of"
        f" {evidence['num_layer_runs']} runs{f', {replays} passes replayed' * bool(replays)}),"
        f" compiles {evidence['num_compiles']} (cold"
        f" {evidence['num_compiles_cold']} disk {evidence['num_compiles_cached']}), breaks"
        f" {evidence['num_graph_breaks']}"
    )
