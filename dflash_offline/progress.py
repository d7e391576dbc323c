"""Progress for people: a task's, and extraction's over all workers, read from their metrics."""

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from stage2_train.live_line import time_words

REFRESH_S = 0.5
PLAIN_LINE_S = 10.0
"""Seconds between lines where the output is no terminal."""
TAIL_BYTES = 4096
OTHER_COLUMNS = 32
"""Width of a bar's text without the rates."""
WIDE_COLUMNS = 110
"""Width of a terminal from which on everything fits into a line."""


@dataclass
class Totals:
    """Sums over the workers of one extraction."""

    num_sequences: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_truncated: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def num_done(self) -> int:
        """Sequences that need no more work: stored or skipped."""
        return self.num_sequences + sum(self.skipped.values())


def total(lines: list[dict[str, Any]]) -> Totals:
    """Adds up the newest metrics line of each worker."""
    totals = Totals()
    for line in lines:
        totals.num_sequences += line["num_sequences"]
        totals.num_tokens += line["num_tokens"]
        totals.num_bytes += line["num_bytes"]
        totals.num_truncated += line["num_truncated"]
        totals.skipped.update(line["skipped"])
    return totals


def size_of(path: Path) -> int:
    """Bytes of a file; 0 without one."""
    return path.stat().st_size if path.exists() else 0


def newest_line(path: Path, *, behind_bytes: int) -> dict[str, Any] | None:
    """The last whole line of a metrics file behind its first so many bytes."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(behind_bytes, end - TAIL_BYTES))
            whole = file.read().rpartition(b"\n")[0]
    except FileNotFoundError:
        return None
    text = whole.rpartition(b"\n")[2]
    if not text:
        return None
    line: dict[str, Any] = json.loads(text)
    return line


@contextmanager
def task_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Shows on stderr how far a task is: a bar on a terminal, else a line now and then.

    Gives a function to call with how much is done and how much there is in all.
    """
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield plain_progress(title)
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(escape(title), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def plain_progress(
    title: str, *, clock: Callable[[], float] = time.monotonic
) -> Callable[[int, int], None]:
    """Prints a line when the last one is some seconds old."""
    start_s = printed_s = clock()

    def show(num_done: int, num_all: int) -> None:
        nonlocal printed_s
        now_s = clock()
        if now_s - printed_s < PLAIN_LINE_S or num_done == 0:
            return
        printed_s = now_s
        left_s = (now_s - start_s) / num_done * (num_all - num_done)
        print(
            f"{title} {num_done / num_all:.0%} | {num_done:,} of {num_all:,} | "
            f"{time_words(left_s)} left",
            file=sys.stderr,
            flush=True,
        )

    return show


def bar_columns(width: int) -> list[ProgressColumn]:
    """What stands in extraction's bar; on a narrow terminal the share and the time left come first.

    Args:
        width: Columns of the terminal.
    """
    share, left = TaskProgressColumn(), [TextColumn("left"), TimeRemainingColumn()]
    rates = TextColumn("{task.fields[rates]}")
    if width < WIDE_COLUMNS:
        # Cut by a width of its own: else all columns would be cut alike.
        rates.get_table_column().max_width = max(1, width - OTHER_COLUMNS)
        return [TextColumn("extracting"), share, *left, rates]
    done = [BarColumn(), share, MofNCompleteColumn()]
    return [TextColumn("extracting"), *done, rates, TimeElapsedColumn(), *left]


class ExtractionProgress:
    """A bar over all workers on a terminal, else a line now and then; a context manager."""

    def __init__(self, *, run_dir: Path, num_workers: int, num_sequences: int):
        paths = [
            run_dir / "extract" / f"worker-{index:05d}.metrics.jsonl"
            for index in range(num_workers)
        ]
        # What earlier runs wrote does not count. Told by bytes: a clock may be set back.
        self._behind_bytes = {path: size_of(path) for path in paths}
        self._num_sequences = num_sequences
        self._start_s = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._refresh, daemon=True)
        self._console = Console(file=sys.stderr)
        self._bar = Progress(
            *bar_columns(self._console.width),
            console=self._console,
            disable=not self._console.is_terminal,
        )

    def __enter__(self) -> "ExtractionProgress":
        self._bar.start()
        self._task = self._bar.add_task("extracting", total=self._num_sequences, rates="")
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._bar.stop()

    def totals(self) -> Totals:
        """What the workers have done since this extraction began."""
        lines = [newest_line(path, behind_bytes=n) for path, n in self._behind_bytes.items()]
        return total([line for line in lines if line is not None])

    def show_line(self, name: str, line: str) -> None:
        """Prints a worker's output above the bar."""
        self._bar.console.print(f"{name} | {line}", markup=False, highlight=False, soft_wrap=True)

    def print_summary(self, num_shards: int, num_sequences: int, num_tokens: int) -> None:
        """Says what was committed since this extraction began, and what was left out and why.

        What workers computed but did not commit, because they died or were stopped, is not stored
        and not counted here.
        """
        totals = self.totals()
        elapsed_s = max(time.monotonic() - self._start_s, 1e-9)
        print(
            f"stored {num_sequences:,} sequences, {num_tokens:,} tokens in {num_shards} shards, "
            f"{num_tokens / elapsed_s:,.0f} tok/s with start-up"
        )
        if totals.num_truncated:
            print(f"truncated {totals.num_truncated} sequences at data.max_sequence_tokens")
        for reason, count in totals.skipped.most_common():
            print(f"skipped {count}: {reason}")

    def _describe(self, totals: Totals) -> str:
        elapsed_s = max(time.monotonic() - self._start_s, 1e-9)
        return (
            f"{totals.num_sequences:,} sequences, {totals.num_tokens:,} tokens, "
            f"{totals.num_bytes / 1e6:,.1f} MB, {totals.num_tokens / elapsed_s:,.0f} tok/s"
        )

    def _refresh(self) -> None:
        printed_s = time.monotonic()
        while not self._stop.wait(REFRESH_S):
            totals = self.totals()
            rates = self._describe(totals)
            self._bar.update(self._task, completed=totals.num_done, rates=rates)
            if self._bar.disable and time.monotonic() - printed_s >= PLAIN_LINE_S:
                printed_s = time.monotonic()
                self._console.print(f"{self._percent(totals)} | {rates}{self._left(totals)}")

    def _percent(self, totals: Totals) -> str:
        return f"extracting {totals.num_done / max(1, self._num_sequences):.0%}"

    def _left(self, totals: Totals) -> str:
        if totals.num_done == 0:
            return ""
        elapsed_s = time.monotonic() - self._start_s
        left_s = elapsed_s / totals.num_done * max(0, self._num_sequences - totals.num_done)
        return f" | {time_words(left_s)} left"
