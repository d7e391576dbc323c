"""What a training run says: the live line, `metrics.jsonl` and TensorBoard."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stage2_train.architecture import DrafterArchitecture
from stage2_train.clock import DeviceClock, process_age_s
from stage2_train.collate import PackedBatch
from stage2_train.flops import measured_peak_flops, step_flops
from stage2_train.live_line import live_line, validation_line
from stage2_train.metrics import BlockSums, summarize, total
from stage2_train.ranks import ALONE, Ranks
from storage.errors import DamagedShardError
from storage.files import replace_whole

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@dataclass
class Interval:
    """What one rank did since the last report."""

    sums: BlockSums | None = None
    num_tokens: int = 0
    num_blocks: int = 0
    num_flops: int = 0
    num_state_bytes: int = 0
    token_room: int = 0
    block_room: int = 0
    wait_s: float = 0.0
    copy_s: float = 0.0

    def __add__(self, other: "Interval") -> "Interval":
        """Both ranks' work; the slower reader sets the pace."""
        sums = [part for part in (self.sums, other.sums) if part is not None]
        return Interval(
            sums=total(sums) if sums else None,
            num_tokens=self.num_tokens + other.num_tokens,
            num_blocks=self.num_blocks + other.num_blocks,
            num_flops=self.num_flops + other.num_flops,
            num_state_bytes=self.num_state_bytes + other.num_state_bytes,
            token_room=self.token_room + other.token_room,
            block_room=self.block_room + other.block_room,
            wait_s=max(self.wait_s, other.wait_s),
            copy_s=max(self.copy_s, other.copy_s),
        )


class Monitor:
    """Gathers steps and reports them; on resume it forgets what was said after the checkpoint.

    Every rank has one; the first one's speaks and writes.
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

    def start(self, *, first_step: int) -> None:
        """Begins behind a step; what was said of later ones is forgotten."""
        if self.ranks.is_first:
            from torch.utils.tensorboard import SummaryWriter

            forget_after(self.metrics_path, step=first_step)
            self.tensorboard = SummaryWriter(
                str(self.metrics_path.parent / "tensorboard"), purge_step=first_step + 1
            )
        self._is_first_report = True
        self._restart_interval()

    def _restart_interval(self) -> None:
        self._interval = Interval()
        self._num_steps = 0
        self._start_s = time.perf_counter()

    def add(self, batch: PackedBatch, sums: BlockSums) -> None:
        """Takes note of a batch, without waiting for the device."""
        num_flops = step_flops(
            self.architecture,
            num_context_tokens=batch.num_real_tokens,
            num_blocks=batch.num_real_blocks,
            num_rows=len(batch.row_index),
            num_seen_pairs=batch.num_seen_pairs,
        )
        self._interval += Interval(
            sums=sums,
            num_tokens=batch.num_real_tokens,
            num_blocks=batch.num_real_blocks,
            num_flops=num_flops,
            num_state_bytes=batch.num_state_bytes,
            token_room=len(batch.positions),
            block_room=len(batch.context_start),
        )

    def end_step(self) -> None:
        """Takes note of an update."""
        self._num_steps += 1

    def note_damage(self, error: DamagedShardError) -> None:
        """Says that a damaged sequence is left out, and counts it; on the rank that read it."""
        self.num_damaged += 1
        say(f"left out, {self.num_damaged} so far: {error}")

    def pause(self) -> "_Pause":
        """Gives a context whose time no step is charged for."""
        return _Pause(self)

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
    ) -> dict[str, Any]:
        """Writes one record of the steps since the last, and prints it; all ranks must call it.

        Raises:
            ValueError: the loss is not a finite number any more.
        """
        done = self._of_all_ranks()
        assert done.sums is not None, "a step trains a batch"
        record = summarize(done.sums)
        elapsed_s = time.perf_counter() - self._start_s
        if not (abs(record["loss"]) < float("inf")):
            raise ValueError(
                f"the loss is {record['loss']} at step {step}; training cannot go on from here: "
                "lower train.optimizer.learning_rate and resume from the last checkpoint"
            )
        record |= {
            "kind": "train",
            "step": step,
            "total_steps": total_steps,
            "epoch": epoch,
            "num_tokens_seen": num_tokens_seen,
            "learning_rate": learning_rate,
            "gradient_norm": float(gradient_norm),
            "step_s": elapsed_s / self._num_steps,
            "tokens_per_s": done.num_tokens / elapsed_s,
            "block_tokens_per_s": done.num_blocks * self.architecture.block_size / elapsed_s,
            "blocks_per_s": done.num_blocks / elapsed_s,
            **time_shares(done, elapsed_s=elapsed_s),
            "token_fill_fraction": done.num_tokens / done.token_room,
            "block_fill_fraction": done.num_blocks / done.block_room,
            "flops_per_s": done.num_flops / elapsed_s,
            "num_ranks": self.ranks.size,
            "num_damaged_sequences": sum(self.ranks.gather(self.num_damaged)),
            **_memory(self.device),
            **evidence,
        }
        if self._is_first_report:
            self._is_first_report = False
            record["first_report_s"] = process_age_s()
        if self.peak_flops is not None:
            peak = self.peak_flops * self.ranks.size
            record["mfu_fraction"] = record["flops_per_s"] / peak
        self._write(record)
        self.say(live_line(record, total_steps=total_steps))
        self._restart_interval()
        return record

    def _of_all_ranks(self) -> Interval:
        mine = self._interval
        if mine.sums is not None:
            mine.sums = mine.sums.to("cpu")  # Waits for the device: its spans have ended.
        mine.wait_s, mine.copy_s = self.waits.take_s(), self.copies.take_s()
        first, *others = self.ranks.gather(mine)
        for other in others:
            first += other
        return first

    def report_validation(self, *, step: int, validation: Mapping[str, Any]) -> None:
        """Writes and prints what a validation found."""
        self._write({"kind": "validation", "step": step, **validation})
        self.say(validation_line(step, validation))

    def say(self, line: str) -> None:
        """Prints a line, once for all ranks."""
        if self.ranks.is_first:
            say(line)

    def close(self) -> None:
        """Flushes what is pending."""
        if self.tensorboard is not None:
            self.tensorboard.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        if self.tensorboard is None:
            return
        with self.metrics_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time_s": time.time(), **record}) + "\n")
        for name, value in scalars(record).items():
            self.tensorboard.add_scalar(f"{record['kind']}/{name}", value, record["step"])


class _Pause:
    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def __enter__(self) -> None:
        self._begin_s = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self._monitor._start_s += time.perf_counter() - self._begin_s


def time_shares(done: Interval, *, elapsed_s: float) -> dict[str, float]:
    """Gives where the time went, and what the store gave of the bytes that the drafter needs.

    Waiting and computing are shares of the whole. Copying runs beside computing, so it is none of
    them. The drafter needs its bytes in the time that it computes.
    """
    computing_s = max(elapsed_s - done.wait_s, 1e-9)
    return {
        "wait_fraction": done.wait_s / elapsed_s,
        "compute_fraction": computing_s / elapsed_s,
        "copy_fraction": done.copy_s / elapsed_s,
        "read_bytes_per_s": done.num_state_bytes / elapsed_s,
        "read_bytes_per_s_needed": done.num_state_bytes / computing_s,
    }


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
    """Removes records of steps that a resumed run is going to do again, and a torn last line."""
    if not metrics_path.exists():
        return
    kept = []
    for line in metrics_path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError):
            continue
    replace_whole(metrics_path, "".join(kept).encode())


def _memory(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    return {
        "memory_peak_bytes": stats["reserved_bytes.all.peak"],
        "memory_total_bytes": torch.cuda.get_device_properties(device).total_memory,
        "memory_retries": stats["num_alloc_retries"],
    }


def say(line: str) -> None:
    """Prints a line at once, for the launcher to pass on."""
    print(line, flush=True)
