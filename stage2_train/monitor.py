"""What a training run says: the live line, `metrics.jsonl` and TensorBoard."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stage2_train.architecture import DrafterArchitecture
from stage2_train.collate import PackedBatch
from stage2_train.flops import measured_peak_flops, step_flops
from stage2_train.metrics import BlockSums, summarize, total
from storage.files import replace_whole

# Above this share of a step the reader, not the arithmetic, sets the pace.
BAD_WAIT_FRACTION = 0.05
# Below this, a step is so small that handing over a batch shows in it.
SHORT_STEP_S = 0.05


class Monitor:
    """Gathers steps and reports them; on resume it forgets what was said after the checkpoint."""

    def __init__(
        self,
        drafter_dir: Path,
        *,
        first_step: int,
        device: torch.device,
        architecture: DrafterArchitecture,
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.metrics_path = drafter_dir / "metrics.jsonl"
        forget_after(self.metrics_path, step=first_step)
        self.tensorboard = SummaryWriter(
            str(drafter_dir / "tensorboard"), purge_step=first_step + 1
        )
        self.device = device
        self.architecture = architecture
        self.peak_flops = measured_peak_flops(device) if device.type == "cuda" else None
        self._restart_interval()

    def _restart_interval(self) -> None:
        self._sums: list[BlockSums] = []
        self._num_tokens = self._num_blocks = self._num_flops = 0
        self._wait_s = 0.0
        self._start_s = time.perf_counter()

    def add(self, batch: PackedBatch, sums: BlockSums, *, wait_s: float) -> None:
        """Takes note of a step, without waiting for the device."""
        self._sums.append(sums)
        self._num_tokens += batch.num_real_tokens
        self._num_blocks += batch.num_real_blocks
        self._num_flops += step_flops(
            self.architecture,
            num_context_tokens=batch.num_real_tokens,
            num_blocks=batch.num_real_blocks,
            num_rows=len(batch.row_index),
            num_seen_pairs=batch.num_seen_pairs,
        )
        self._wait_s += wait_s

    def pause(self) -> "_Pause":
        """Gives a context whose time no step is charged for."""
        return _Pause(self)

    def report(
        self,
        *,
        step: int,
        total_steps: int,
        epoch: int,
        learning_rate: float,
        gradient_norm: Tensor,
        evidence: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Writes one record of the steps since the last, and prints it.

        Raises:
            ValueError: the loss is not a finite number any more.
        """
        record = summarize(total(self._sums))
        elapsed_s = time.perf_counter() - self._start_s
        if not (abs(record["loss"]) < float("inf")):
            raise ValueError(
                f"the loss is {record['loss']} at step {step}; training cannot go on from here: "
                "lower train.optimizer.learning_rate and resume from the last checkpoint"
            )
        record |= {
            "kind": "train",
            "step": step,
            "epoch": epoch,
            "learning_rate": learning_rate,
            "gradient_norm": float(gradient_norm),
            "step_s": elapsed_s / len(self._sums),
            "tokens_per_s": self._num_tokens / elapsed_s,
            "block_tokens_per_s": self._num_blocks * self.architecture.block_size / elapsed_s,
            "blocks_per_s": self._num_blocks / elapsed_s,
            "wait_fraction": self._wait_s / elapsed_s,
            "flops_per_s": self._num_flops / elapsed_s,
            **_memory(self.device),
            **evidence,
        }
        if self.peak_flops is not None:
            record["mfu_fraction"] = record["flops_per_s"] / self.peak_flops
        self._write(record)
        print(live_line(record, total_steps=total_steps), flush=True)
        self._restart_interval()
        return record

    def report_validation(self, *, step: int, validation: Mapping[str, Any]) -> None:
        """Writes and prints what a validation found."""
        self._write({"kind": "validation", "step": step, **validation})
        print(validation_line(step, validation), flush=True)

    def close(self) -> None:
        """Flushes what is pending."""
        self.tensorboard.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        with self.metrics_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        for name, value in scalars(record).items():
            self.tensorboard.add_scalar(f"{record['kind']}/{name}", value, record["step"])


class _Pause:
    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def __enter__(self) -> None:
        self._begin_s = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self._monitor._start_s += time.perf_counter() - self._begin_s


def live_line(record: Mapping[str, Any], *, total_steps: int) -> str:
    """Gives the line a person reads: what is learned, how fast, and what holds it up."""
    first_offsets = record["accuracy_by_offset"][:4]
    offsets = " ".join(f"{value:.2f}".removeprefix("0") for value in first_offsets)
    line = (
        f"step {record['step']}/{total_steps} {record['step_s'] * 1e3:.0f}ms "
        f"loss {record['loss']:.3f} acc {offsets} "
        f"sim {record['simulated_acceptance_length']:.2f} | "
        f"{thousands(record['tokens_per_s'])} tok/s "
        f"{thousands(record['block_tokens_per_s'])} block tok/s | "
        f"{execution_words(record)} | wait {record['wait_fraction']:.1%}"
    )
    if "memory_peak_bytes" in record:
        line += (
            f" | mem {record['memory_peak_bytes'] / 2**30:.0f}"
            f"/{record['memory_total_bytes'] / 2**30:.0f} GiB"
            f" retries {record['memory_retries']}"
        )
    if record["wait_fraction"] > BAD_WAIT_FRACTION and record["step_s"] > SHORT_STEP_S:
        line += " | the store is read slower than the drafter trains: faster disk, or read less"
    return line


def execution_words(record: Mapping[str, Any]) -> str:
    """Says how the steps ran, what was compiled for them, and how well they used the GPU."""
    words = str(record["execution"])
    if "num_compiles" in record:
        words += (
            f", compiles {record['num_compiles']} (cold {record['num_compiles_cold']} "
            f"disk {record['num_compiles_cached']}) breaks {record['num_graph_breaks']}"
        )
    if "mfu_fraction" in record:
        words += f" | MFU {record['mfu_fraction']:.2f}"
    return words


def validation_line(step: int, validation: Mapping[str, Any]) -> str:
    """Gives the line of a validation."""
    if not validation:
        return f"step {step} validation: nothing is held out"
    line = (
        f"step {step} held out: loss {validation['loss']:.3f} "
        f"accuracy {validation['accuracy']:.3f} "
        f"sim {validation['simulated_acceptance_length']:.2f}"
    )
    if "acceptance_length" in validation:
        line += (
            f" acceptance length {validation['acceptance_length']:.3f} "
            f"on {validation['num_walked']} greedy answers"
        )
    return line


def thousands(value: float) -> str:
    """Gives a rate in few characters."""
    return f"{value / 1e3:.1f}k" if value >= 1e3 else f"{value:.0f}"


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
