"""Drawings of a whole-host run, from its notes alone: rates and busy GPUs over time."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from host_watch import (
    GpuSample,
    after_batches,
    gpu_samples,
    records,
    train_records,
    worker_records,
)

from dflash_offline.plots import point_plot, round_ticks

Points = list[tuple[float, float]]
# Longer without a word: the process was halted.
PAUSE_S = 3.0
# A worker's lines come about every second, its batches twice as often.
SMOOTHED_LINES = 3


def draw_run(notes: Path, run: str, *, out_dir: Path) -> list[Path]:
    """Draws one run; gives the files.

    Args:
        notes: folder of the notes.
        run: the run's name.
        out_dir: where to.
    """
    events = records(notes / f"{run}.jsonl")
    if not events:
        return []
    start_s, stop_s = events[0]["time_s"] - 10.0, events[-1]["time_s"]
    marks = {text: then - start_s for text, then in marks_of(events).items()}
    samples = [each for each in gpu_samples(notes / "gpus.csv") if each.time_s >= start_s]
    drawings = {
        "rates": (process_rates(notes / run), "tokens/s", "Rate of each process"),
        "busy": (by_gpu(samples, lambda each: each.busy), "share", "Share of time at work, by GPU"),
        "power": (by_gpu(samples, lambda each: each.power_w), "watt", "Power, by GPU"),
    }
    paths = []
    for name, (lines, y_label, title) in drawings.items():
        shown = {
            label: [(x - start_s, y) for x, y in points if start_s <= x <= stop_s]
            for label, points in lines.items()
        }
        shown = {label: points for label, points in shown.items() if points}
        if shown:
            paths.append(out_dir / f"host-{run}-{name}.svg")
            paths[-1].write_text(draw(shown, stop_s - start_s, y_label, title, marks))
    return paths


def marks_of(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """When somebody was killed and when windows began, in order; a death begins its own window."""
    deaths = {
        f"killed: {', '.join(each['names'])}": float(each["time_s"])
        for each in events
        if each["event"] == "killed"
    }
    windows = {
        each["name"].replace("_", " "): float(each["start_s"])
        for each in events
        if each["event"] == "window"
    }
    others = {
        text: then
        for text, then in windows.items()
        if all(abs(then - death) > 1.0 for death in deaths.values())
    }
    return dict(sorted((deaths | others).items(), key=lambda mark: mark[1]))


def draw(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    seconds: float,
    y_label: str,
    title: str,
    marks: Mapping[str, float],
) -> str:
    """One drawing over the seconds of a run."""
    top = max(y for points in lines.values() for _, y in points if y == y)
    return point_plot(
        lines,
        title=title,
        x_label="seconds",
        y_label=y_label,
        x_ticks=round_ticks(0.0, seconds),
        # Room above for the names of the lines.
        y_ticks=round_ticks(0.0, 1.3 * top),
        marks=marks,
    )


def process_rates(run_dir: Path) -> dict[str, Points]:
    """Tokens a second of each worker and drafter over time, broken where it was halted."""
    rates = {}
    for path in sorted(run_dir.glob("extract/worker-*.metrics.jsonl")):
        index = int(path.name.split(".")[0].removeprefix("worker-"))
        rates[f"worker {index}"] = worker_rates(worker_records(run_dir, index))
    for path in sorted(run_dir.glob("drafters/*/metrics.jsonl")):
        rates[path.parent.name] = drafter_rates(train_records(run_dir, path.parent.name))
    return rates


def worker_rates(lines: Sequence[dict[str, Any]]) -> Points:
    """A worker's rate over a few batches at a time."""
    points: Points = []
    behind_batches = after_batches(lines)
    for first, last in zip(behind_batches, behind_batches[SMOOTHED_LINES:], strict=False):
        elapsed_s = last["time_s"] - first["time_s"]
        is_halted = elapsed_s > SMOOTHED_LINES * PAUSE_S
        rate = (last["num_tokens"] - first["num_tokens"]) / elapsed_s
        points.append((last["time_s"], float("nan") if is_halted else rate))
    return points


def drafter_rates(found: Sequence[dict[str, Any]]) -> Points:
    """A drafter's rate in each record."""
    points: Points = []
    for before, each in pairwise(found):
        is_halted = each["time_s"] - before["time_s"] > PAUSE_S
        points.append((each["time_s"], float("nan") if is_halted else each["tokens_per_s"]))
    return points


def by_gpu(samples: Sequence[GpuSample], value: Callable[[GpuSample], float]) -> dict[str, Points]:
    """One line a GPU."""
    lines: dict[str, Points] = {}
    for each in samples:
        lines.setdefault(f"GPU {each.index}", []).append((each.time_s, value(each)))
    return lines
