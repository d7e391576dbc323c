"""What the processes of a host did in a span of time: their own records, and samples of the GPUs.

Everything is read from files that are there while the processes run, and still when a run was cut
off: the product's metrics, the output of `nvidia-smi`, and the windows that were noted.
"""

import csv
import datetime
import json
import os
import statistics
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

SAMPLE_MS = 500
QUERY = ("timestamp", "index", "utilization.gpu", "power.draw", "clocks.sm", "memory.used")


@dataclass(frozen=True, kw_only=True)
class Window:
    """A span in which the same processes ran; times are Unix seconds."""

    name: str
    start_s: float
    stop_s: float
    workers: tuple[int, ...]
    drafters: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What one process did in a window."""

    tok_s: float
    waiting: float
    """Share of the time in which its GPU had to wait for the store."""
    busy: float
    """Share of the time in which its GPU computed, by the process's own word."""
    bytes_s: float = 0.0
    """Bytes a second written to the store, or read from it."""
    mfu: float = float("nan")
    num_compiles: int = 0
    is_compiled: bool = True


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """One reading of one GPU."""

    time_s: float
    index: int
    busy: float
    """Share of the last moments in which a kernel ran."""
    power_w: float


def records(path: Path) -> list[dict[str, Any]]:
    """The whole lines that a process has logged so far."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def train_records(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """What one drafter has logged of its steps."""
    every = records(run_dir / "drafters" / name / "metrics.jsonl")
    return [each for each in every if each["kind"] == "train"]


def worker_records(run_dir: Path, index: int) -> list[dict[str, Any]]:
    """What one worker has logged of its work."""
    lines = records(run_dir / "extract" / f"worker-{index:05d}.metrics.jsonl")
    return [line for line in lines if line["num_tokens"] > 0]


def after_batches(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines that were written right behind a batch; between others lie parts of one."""
    return [line for before, line in pairwise(lines) if line["num_tokens"] != before["num_tokens"]]


def worker_pace(lines: Sequence[dict[str, Any]], *, start_s: float, stop_s: float) -> Pace | None:
    """What a worker did between its first and its last batch inside a window; None without two.

    Its rate is the slope through all of them: a line may come late behind its batch, which is a
    good part of a second's work.
    """
    inside = [line for line in after_batches(lines) if start_s <= line["time_s"] <= stop_s]
    if len(inside) < 2:
        return None
    first, last = inside[0], inside[-1]
    elapsed_s = last["elapsed_s"] - first["elapsed_s"]

    def share(part: str) -> float:
        """Lines hold shares of all the time so far."""
        now, then = (line[f"{part}_fraction"] * line["elapsed_s"] for line in (last, first))
        return (now - then) / elapsed_s

    slope = statistics.linear_regression(
        [line["elapsed_s"] for line in inside], [line["num_tokens"] for line in inside]
    ).slope
    return Pace(
        tok_s=slope,
        bytes_s=(last["num_bytes"] - first["num_bytes"]) / elapsed_s,
        waiting=share("wait"),
        busy=share("forward") + share("encode"),
        num_compiles=last.get("num_compiles", 0) - first.get("num_compiles", 0),
        is_compiled=last.get("execution", "compiled") == "compiled",
    )


def drafter_pace(found: Sequence[dict[str, Any]], *, start_s: float, stop_s: float) -> Pace | None:
    """What a drafter did in the steps that lie wholly inside a window; None without any."""
    inside = [
        (record["step_s"] * (record["step"] - before["step"]), record)
        for before, record in pairwise(found)
        if record["time_s"] <= stop_s
        and record["time_s"] - record["step_s"] * (record["step"] - before["step"]) >= start_s
    ]
    if not inside:
        return None
    elapsed_s = sum(seconds for seconds, _ in inside)

    def mean(name: str) -> float:
        values = [seconds * record.get(name, float("nan")) for seconds, record in inside]
        return sum(values) / elapsed_s

    return Pace(
        tok_s=mean("tokens_per_s"),
        bytes_s=mean("read_bytes_per_s"),
        waiting=mean("wait_fraction"),
        busy=mean("compute_fraction"),
        mfu=mean("mfu_fraction"),
        num_compiles=sum(record.get("num_compiles", 0) for _, record in inside),
        is_compiled=all(record["execution"] == "compiled" for _, record in inside),
    )


def start_sampling(path: Path) -> subprocess.Popen[bytes] | None:
    """Lets `nvidia-smi` write down how busy each GPU is; None where there is none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        with path.open("ab") as output:
            return subprocess.Popen([*command, "-lms", str(SAMPLE_MS)], stdout=output)
    except FileNotFoundError:
        return None


def gpu_samples(path: Path) -> list[GpuSample]:
    """The readings so far; a torn line, or one without numbers, is left out."""
    if not path.is_file():
        return []
    samples = []
    with path.open(newline="") as file:
        for row in csv.reader(file, skipinitialspace=True):
            try:
                then = datetime.datetime.strptime(row[0], "%Y/%m/%d %H:%M:%S.%f")
                index, busy, power, _, _ = map(float, row[1:])
            except (IndexError, ValueError):
                continue
            samples.append(
                GpuSample(
                    time_s=then.timestamp(),
                    index=int(index),
                    busy=busy / 100.0,
                    power_w=power,
                )
            )
    return samples


def busy_fraction(
    samples: Iterable[GpuSample], gpu: int, *, start_s: float, stop_s: float
) -> float:
    """Mean share of a window in which a GPU ran a kernel; not a number without a sample."""
    inside = [
        each.busy for each in samples if each.index == gpu and start_s <= each.time_s <= stop_s
    ]
    return statistics.mean(inside) if inside else float("nan")


def physical_gpu(gpu: int) -> int:
    """The number by which `nvidia-smi` knows a GPU of this process's selection."""
    selected = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    numbers = [part.strip() for part in selected.split(",") if part.strip()]
    if not numbers:
        return gpu
    return int(numbers[gpu]) if numbers[gpu].isdigit() else gpu


def process_of(run_file: Path, argument: str, value: str) -> int | None:
    """The id of the process that a launcher started with these arguments; None without one."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        here = str(run_file) in words and argument in words
        if here and words[words.index(argument) + 1] == value:
            return int(folder.name)
    return None


def note(path: Path, **event: Any) -> None:
    """Appends what happens now, with the time, to a file of notes."""
    with path.open("a") as file:
        file.write(json.dumps({"time_s": time.time(), **event}) + "\n")


def note_window(path: Path, window: Window) -> None:
    """Appends a window to the notes."""
    note(path, event="window", **asdict(window))
