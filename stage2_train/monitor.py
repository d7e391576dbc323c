"""What a training run says: the live line, `metrics.jsonl` and TensorBoard.

A line about a step is written while the device is already at the next one, which therefore never
waits for the host to write. It holds what was true behind its own step.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stage2_train.architecture import DrafterArchitecture
from stage2_train.clock import DeviceClock, Moment, process_age_s
from stage2_train.collate import PackedBatch
from stage2_train.flops import measured_peak_flops
from stage2_train.interval import Closed, Interval, interval_of, rates
from stage2_train.live_line import live_line, validation_line
from stage2_train.metrics import BlockSums, summarize
from stage2_train.ranks import ALONE, Ranks
from storage.errors import DamagedShardError, explain_os_errors
from storage.files import replace_whole

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@dataclass(frozen=True, kw_only=True)
class Report:
    """A line that is written once the device has come to the end of its steps."""

    closed: Closed
    gradient_norm: Tensor
    """On its way to the host."""
    num_damaged: int
    facts: dict[str, Any]
    """What the host knew behind the last step."""


class Monitor:
    """Gathers steps and reports them; on resume it forgets what was said after the checkpoint.

    Every rank has one; the first one's speaks and writes. Left as a context it writes what is
    pending, also when an error ends the training of a single process; of several ranks the others
    may be gone then, so the line of a step is lost if one fails in the step behind it.
    """

    def __init__(
        self,
        drafter_dir: Path,
        *,
        device: torch.device,
        architecture: DrafterArchitecture,
        ranks: Ranks = ALONE,
    ) -> None:
        self.metrics_path = drafter_dir / "metrics.jsonl"
        self.device, self.architecture, self.ranks = device, architecture, ranks
        self.waits, self.copies = DeviceClock(device), DeviceClock(device)
        self.tensorboard: SummaryWriter | None = None
        self.peak_flops = measured_peak_flops(device) if device.type == "cuda" else None
        self.num_damaged = 0
        self._pending: Report | None = None
        self._said_of_epoch = ""

    def start(self, *, first_step: int) -> None:
        """Begins behind a step; what was said of later ones is forgotten."""
        if self.ranks.is_first:
            from torch.utils.tensorboard import SummaryWriter

            forget_after(self.metrics_path, step=first_step)
            self.tensorboard = SummaryWriter(
                str(self.metrics_path.parent / "tensorboard"), purge_step=first_step + 1
            )
        self._is_first_report = True
        self._start_interval(Moment(self.device))

    def _start_interval(self, now: Moment) -> None:
        self._interval = Interval()
        self._spans: list[tuple[Moment, Moment]] = []
        self._since = now

    def add(self, batch: PackedBatch, sums: BlockSums) -> None:
        """Takes note of a batch, without waiting for the device."""
        self._interval += interval_of(batch, sums, architecture=self.architecture)

    def end_step(self) -> None:
        """Takes note of an update, and writes what is pending of the one before."""
        self._interval.num_steps += 1
        self.flush()

    def note_damage(self, error: DamagedShardError) -> None:
        """Says that a damaged sequence is left out, and counts it; on the rank that read it."""
        self.num_damaged += 1
        say(f"left out, {self.num_damaged} so far: {error}")

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Gives a context whose time no step is charged for; all ranks must enter it.

        What is pending is written before it.
        """
        self._spans.append((self._since, Moment(self.device)))
        self.flush()
        yield
        self._since = Moment(self.device)

    def report(
        self,
        *,
        step: int,
        total_steps: int,
        epoch: int,
        num_tokens_seen: int,
        learning_rate: float,
        gradient_norm: Tensor,
        evidence: Mapping[str, Any],
    ) -> None:
        """Makes a record of the steps since the last one, without waiting for the device.

        It is written behind the next step, or before a pause or the end where that comes first; the
        first one, which people wait for, at once. All ranks must call it.

        Raises:
            ValueError: as `flush` does, if this is the first.
        """
        facts = {
            "kind": "train",
            "step": step,
            "total_steps": total_steps,
            "epoch": epoch,
            "num_tokens_seen": num_tokens_seen,
            "learning_rate": learning_rate,
            "num_ranks": self.ranks.size,
            **_memory(self.device),
            **evidence,
        }
        self._pending = Report(
            gradient_norm=gradient_norm.to("cpu", non_blocking=True),
            closed=self._close_interval(),
            num_damaged=self.num_damaged,
            facts=facts,
        )
        if self._is_first_report:
            self.flush()

    def flush(self) -> None:
        """Writes what is pending; waits until the device is through with it.

        All ranks must call it.

        Raises:
            ValueError: the loss, or the gradient, is not finite any more.
        """
        if (report := self._pending) is None:
            return
        self._pending = None
        done = self._of_all_ranks(report.closed)
        if done.sums is None:
            return  # Of all its batches everything is damaged: there is nothing to tell.
        record = self._record(done.sums, done, report)
        must_be_finite(record)
        if self._is_first_report:
            self._is_first_report = False
            record["first_report_s"] = process_age_s()
        self._write(record)
        self.say(live_line(record, total_steps=record["total_steps"]))

    def take_interval(self) -> Interval:
        """Gives what all ranks did since the last report, which begins anew; waits for it."""
        return self._of_all_ranks(self._close_interval())

    def _close_interval(self) -> Closed:
        end, interval = Moment(self.device), self._interval
        if interval.sums is not None:
            interval.sums = interval.sums.to("cpu", non_blocking=True)
        spans = [*self._spans, (self._since, end)]
        self._start_interval(end)
        return Closed(interval=interval, spans=spans, end=end, arrived=Moment(self.device))

    def _of_all_ranks(self, closed: Closed) -> Interval:
        closed.arrived.wait()
        mine = closed.interval
        mine.elapsed_s = sum(start.seconds_to(stop) for start, stop in closed.spans)
        mine.wait_s = self.waits.take_s(until=closed.end)
        mine.copy_s = self.copies.take_s(until=closed.end)
        first, *others = self.ranks.gather(mine)
        for other in others:
            first += other
        return first

    def _record(self, sums: BlockSums, done: Interval, report: Report) -> dict[str, Any]:
        record = {
            **summarize(sums),
            **report.facts,
            "gradient_norm": float(report.gradient_norm),
            **rates(done, block_size=self.architecture.block_size),
            "num_damaged_sequences": sum(self.ranks.gather(report.num_damaged)),
        }
        if self.peak_flops is not None:
            peak = self.peak_flops * self.ranks.size
            record["mfu_fraction"] = record["flops_per_s"] / peak
        return record

    def report_validation(self, *, step: int, validation: Mapping[str, Any]) -> None:
        """Writes and prints what a validation found."""
        self._write({"kind": "validation", "step": step, **validation})
        self.say(validation_line(step, validation))

    def say(self, line: str) -> None:
        """Prints a line, once for all ranks."""
        if self.ranks.is_first:
            say(line)

    def say_epoch(self, epoch: int, words: str) -> None:
        """Says what an epoch trains, unless the one before trained the same."""
        if words != self._said_of_epoch:
            self._said_of_epoch = words
            self.say(f"epoch {epoch}: {words}")

    def __enter__(self) -> "Monitor":
        """Gives itself; what is pending at the end of the block is written."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Writes what is pending, and closes."""
        try:
            if kind is None or self.ranks.size == 1:
                self.flush()
        except (OSError, RuntimeError, ValueError):
            if kind is None:
                raise
            # A broken device, a full disk, a bad loss: the error under way says more.
        finally:
            self.close()

    def close(self) -> None:
        """Closes its files; what is pending is dropped."""
        if self.tensorboard is not None:
            self.tensorboard.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        if self.tensorboard is None:
            return
        with (
            explain_os_errors("write", self.metrics_path),
            self.metrics_path.open("a", encoding="utf-8") as file,
        ):
            file.write(json.dumps({"time_s": time.time(), **record}) + "\n")
        for name, value in scalars(record).items():
            self.tensorboard.add_scalar(f"{record['kind']}/{name}", value, record["step"])


def must_be_finite(record: Mapping[str, Any]) -> None:
    """Refuses to go on from a record that shows a training gone astray.

    Raises:
        ValueError: its loss, or its gradient, is not finite.
    """
    for name, what in (("loss", "loss"), ("gradient_norm", "gradient's norm")):
        if not math.isfinite(record[name]):
            raise ValueError(
                f"the {what} is {record[name]} at step {record['step']}; training cannot go on "
                "from here: lower train.optimizer.learning_rate and resume from the last checkpoint"
            )


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Gives the plottable numbers of a record, lists spread over their offsets from 1."""
    flat: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, list):
            flat |= {f"{name}/{offset}": part for offset, part in enumerate(value, start=1)}
        elif isinstance(value, (int, float)) and name != "step":
            flat[name] = value
    return flat


def forget_after(metrics_path: Path, *, step: int) -> None:
    """Removes records of steps that a resumed run is going to do again, and torn lines."""
    if not metrics_path.exists():
        return
    kept = []
    for line in metrics_path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    replace_whole(metrics_path, "".join(kept).encode())


def _memory(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return {
        "memory_peak_bytes": stats["reserved_bytes.all.peak"],
        "memory_total_bytes": torch.cuda.get_device_properties(device).total_memory,
        "memory_free_bytes": free_bytes,
        "memory_retries": stats["num_alloc_retries"],
    }


def say(line: str) -> None:
    """Prints a line at once, for the launcher to pass on."""
    print(line, flush=True)
