"""Figures of a whole-host run: what a window gives, ratios between windows, kept as they come."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from host_watch import (
    Pace,
    Window,
    busy_fraction,
    drafter_pace,
    gpu_samples,
    physical_gpu,
    train_records,
    worker_pace,
    worker_records,
)

Figures = dict[str, tuple[float, str, str]]
"""(value, unit, note) by name."""
KEPT = "figures.jsonl"


def figures_of_window(
    window: Window, *, run_dir: Path, samples: Path, gpu_of: Mapping[str, int], key: str
) -> tuple[Figures, dict[str, float]]:
    """What the processes of a window did, and the rate of each.

    Args:
        window: the span and who ran.
        run_dir: the run folder, with the metrics.
        samples: what `nvidia-smi` wrote.
        gpu_of: the GPU of each process.
        key: start of the figures' names.
    """
    span = {"start_s": window.start_s, "stop_s": window.stop_s}
    workers = {
        f"worker {index}": worker_pace(worker_records(run_dir, index), **span)
        for index in window.workers
    }
    drafters = {
        name: drafter_pace(train_records(run_dir, name), **span) for name in window.drafters
    }
    figures: Figures = {}
    stages = (("extract", workers, "written to"), ("train", drafters, "read from"))
    for stage, paces, way in stages:
        found = {name: pace for name, pace in paces.items() if pace is not None}
        if found:
            figures |= stage_figures(found, key=f"{key}_{stage}", what=f"{way} the store")
    silent = [name for name, pace in (workers | drafters).items() if pace is None]
    if silent:
        figures[f"{key}_silent"] = (len(silent), "processes", f"logged too little: {silent}")
    every = gpu_samples(samples)
    busy = {
        name: busy_fraction(every, physical_gpu(gpu_of[name]), **span)
        for name in (*workers, *drafters)
    }
    if every:
        note = ", ".join(f"{name} {share:.1%}" for name, share in busy.items())
        figures[f"{key}_busy"] = (min(busy.values()), "fraction", f"least busy GPU; {note}")
    rates = {name: pace.tok_s for name, pace in (workers | drafters).items() if pace is not None}
    return figures, rates


def stage_figures(paces: Mapping[str, Pace], *, key: str, what: str) -> Figures:
    """The rates of a stage together, with those of each process in the note."""
    each = ", ".join(f"{name} {pace.tok_s:,.0f}" for name, pace in paces.items())
    waiting = max(pace.waiting for pace in paces.values())
    computing = min(pace.busy for pace in paces.values())
    compiles = sum(pace.num_compiles for pace in paces.values())
    how = "compiled" if all(pace.is_compiled for pace in paces.values()) else "NOT compiled"
    note = f"{each}; waiting {waiting:.1%}, computing {computing:.1%}, compiles {compiles}, {how}"
    if not any(math.isnan(pace.mfu) for pace in paces.values()):
        note += f", MFU {', '.join(f'{pace.mfu:.2f}' for pace in paces.values())}"
    rate = sum(pace.bytes_s for pace in paces.values()) / 1e9
    return {
        f"{key}_tok_s": (sum(pace.tok_s for pace in paces.values()), "tokens/s", note),
        f"{key}_rate": (rate, "GB/s", what),
    }


def ratios(
    rates: Mapping[str, float], reference: Mapping[str, float], *, key: str, note: str
) -> Figures:
    """Each process's rate over its rate elsewhere."""
    return {
        f"{key}_{name.replace(' ', '')}_ratio": (rate / reference[name], "fraction", note)
        for name, rate in rates.items()
        if name in reference
    }


def keep_figures(folder: Path, figures: Figures) -> None:
    """Appends figures to those kept."""
    with (folder / KEPT).open("a") as file:
        for name, (value, unit, note) in figures.items():
            file.write(
                json.dumps({"name": name, "value": value, "unit": unit, "note": note}) + "\n"
            )


def kept_figures(folder: Path) -> Figures:
    """The figures kept so far; of a name that came twice the later one."""
    path = folder / KEPT
    lines = path.read_text().splitlines() if path.is_file() else []
    found = [json.loads(line) for line in lines]
    return {each["name"]: (each["value"], each["unit"], each["note"]) for each in found}
