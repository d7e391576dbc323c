"""`status`: how far both stages are, how fast, what sets the pace, and when they will be done."""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dflash_offline.config import RunConfig, run_dir_of
from dflash_offline.run_records import (
    SILENT_S,
    DrafterRecords,
    Record,
    RunRecords,
    age_s,
    read_run,
)
from stage2_train.live_line import (
    BAD_WAIT_FRACTION,
    byte_rate,
    count_words,
    thousands,
    time_words,
)

WATCH_PAUSE_S = 5.0
SHOWN_WORKERS = 16
IDLE_FRACTION = 0.05
"""Share of a worker's time above which a GPU that nothing was handed to sets the pace."""

_GPU_PARTS, _CPU_PARTS = ("forward", "encode"), ("tokenize", "forward", "encode", "write")
_PACE_OF_PART = {
    "forward": "the target's forward pass",
    "encode": "encoding",
    "tokenize": "tokenizing",
    "write": "writing",
}


def show_status(config: RunConfig, *, watch: bool, as_json: bool) -> None:
    """Prints where a run stands, once or again and again until Ctrl-C."""
    if as_json:
        print(json.dumps(status_as_json(read_run(config)), indent=1))
        return

    def shown() -> Text:
        lines = [f"run {run_dir_of(config)}", *status_lines(read_run(config))]
        return Text("\n".join(lines), overflow="fold")

    console = Console()
    if not watch:
        console.print(shown(), soft_wrap=True)
        return
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(shown(), refresh=True)
            time.sleep(WATCH_PAUSE_S)


def status_as_json(records: RunRecords) -> dict[str, Any]:
    """What the lines show, for programs; a time that cannot be known yet is null."""
    return {
        "extract": {
            "num_units": records.store.num_units,
            "num_committed_units": records.store.num_committed,
            "left_s": extraction_left_s(records),
            "workers": [
                {**worker, "state": worker_state(worker), "pace": worker_pace(worker)}
                for worker in records.workers
            ],
        },
        "drafters": [
            {
                "name": drafter.name,
                "state": drafter_state(drafter),
                "checkpoint_step": drafter.step,
                "left_s": training_left_s(drafter),
                "pace": training_pace(drafter.train[-1]) if drafter.train else None,
                "newest": drafter.train[-1] if drafter.train else None,
                "validation": drafter.validation,
                "evaluation": drafter.evaluation,
            }
            for drafter in records.drafters
        ],
    }


def status_lines(records: RunRecords) -> list[str]:
    """Where a run stands, for people."""
    return [*_extraction_lines(records), *map(_drafter_line, records.drafters)]


def _extraction_lines(records: RunRecords) -> list[str]:
    store, left_s = records.store, extraction_left_s(records)
    if store.num_units == 0:
        return ["extraction: nothing is planned"]
    share = store.num_committed / store.num_units
    parts = [f"{store.num_committed:,} of {store.num_units:,} units committed ({share:.0%})"]
    live = [worker for worker in records.workers if worker_state(worker) == "running"]
    if live:
        rate = sum(worker["tokens_per_s"] for worker in live)
        parts.append(f"{len(live)} workers, {thousands(rate)} tok/s")
    if left_s:
        parts.append(f"{time_words(left_s)} left")
    lines = [f"extraction: {', '.join(parts)}"]
    lines += map(_worker_line, records.workers[:SHOWN_WORKERS])
    if len(records.workers) > SHOWN_WORKERS:
        lines.append(f"  and {len(records.workers) - SHOWN_WORKERS} more workers")
    return lines


def _worker_line(worker: Record) -> str:
    skipped = sum(worker["skipped"].values())
    done = f"{worker['num_units']:,} shards, {worker['num_sequences']:,} sequences"
    done += f", {skipped:,} skipped" if skipped else ""
    rates = f"{thousands(worker['tokens_per_s'])} tok/s, {byte_rate(_bytes_per_s(worker))}"
    parts = [f"  worker {worker['worker_index']}: {worker_state(worker)}", done, rates]
    pace = worker_pace(worker)
    return " | ".join([*parts, *([f"pace: {pace}"] if pace else [])])


def _drafter_line(drafter: DrafterRecords) -> str:
    parts = [f"drafter {drafter.name}: {drafter_state(drafter)}"]
    if drafter.train:
        newest, left_s = drafter.train[-1], training_left_s(drafter)
        parts[0] += f", step {newest['step']:,} of {newest['total_steps']:,}"
        parts[0] += f", {time_words(left_s)} left" if left_s else ""
        seen = f"{count_words(newest['num_tokens_seen'])} tokens seen"
        parts.append(f"{thousands(newest['tokens_per_s'])} tok/s, {seen}")
        parts.append(f"pace: {training_pace(newest)}")
        parts.append(f"loss {newest['loss']:.3f}")
    if drafter.validation and "loss" in drafter.validation:
        parts.append(f"held out: {_held_out_words(drafter.validation)}")
    if drafter.evaluation:
        suites = drafter.evaluation["suites"].items()
        found = (f"{name} {suite['acceptance_length']:.2f}" for name, suite in suites)
        parts.append(f"decoded: {', '.join(found)}")
    return " | ".join(parts)


def _held_out_words(validation: Record) -> str:
    words = f"loss {validation['loss']:.3f}"
    if "acceptance_length" in validation:
        words += f", acceptance length {validation['acceptance_length']:.2f} by the walk"
    return words


def _bytes_per_s(worker: Record) -> float:
    return float(worker["num_bytes"] / max(worker["elapsed_s"], 1e-9))


def worker_state(worker: Record) -> str:
    """Whether a worker ended, runs, or has said nothing for long. Pure but for the clock."""
    if worker["event"] == "end":
        return "ended"
    silent_s = age_s(worker)
    return "running" if silent_s < SILENT_S else f"silent for {time_words(silent_s)}"


def drafter_state(drafter: DrafterRecords) -> str:
    """Whether a drafter is done, starts, trains, has said nothing for long, or has not begun."""
    if drafter.is_done:
        return "done"
    since_s = drafter.train[-1]["time_s"] if drafter.train else 0.0
    if drafter.started_s is not None and drafter.started_s > since_s and not drafter.is_gone:
        # It waits for the store, or compiles.
        return f"starting for {time_words(max(0.0, time.time() - drafter.started_s))}"
    if not drafter.train and drafter.step == 0:
        return "stopped before its first step" if drafter.is_gone else "not started"
    if not drafter.train:
        return f"stopped at step {drafter.step:,}"
    newest = drafter.train[-1]
    if drafter.is_gone:
        return f"stopped, checkpoint at step {drafter.step:,}"
    # Log lines may lie further apart than the limit where steps are long.
    seconds_a_step = seconds_per_step(drafter.train)
    is_alive = age_s(newest) < SILENT_S + 2 * seconds_a_step * log_steps(drafter.train)
    return "running" if is_alive else f"silent for {time_words(age_s(newest))}"


def worker_pace(worker: Record) -> str:
    """What sets a worker's pace, by the shares of its time; empty before it has done anything."""
    if worker["num_sequences"] == 0:
        return ""
    waits, idles = worker["wait_fraction"], worker["idle_fraction"]
    if waits > BAD_WAIT_FRACTION and waits >= idles:
        return f"the store: the GPU waits {waits:.0%}"
    if idles > IDLE_FRACTION:
        return f"the CPU: the GPU idles {idles:.0%}"
    # On a GPU tokenizing, copying and writing happen beside its work.
    is_gpu = worker["copy_fraction"] > 0
    parts = {part: worker[f"{part}_fraction"] for part in (_GPU_PARTS if is_gpu else _CPU_PARTS)}
    slowest = max(parts, key=lambda part: parts[part])
    return f"{_PACE_OF_PART[slowest]} {parts[slowest]:.0%}" if parts[slowest] else ""


def training_pace(record: Record) -> str:
    """What sets a drafter's pace: the store, or its own arithmetic."""
    waits = record["wait_fraction"]
    if waits <= BAD_WAIT_FRACTION:
        return f"computing {record['compute_fraction']:.0%}"
    gives, needs = record["read_bytes_per_s"], record["read_bytes_per_s_needed"]
    return f"the store: waits {waits:.0%}, has {byte_rate(gives)} of {byte_rate(needs)}"


def extraction_left_s(records: RunRecords) -> float | None:
    """Seconds until every planned unit is committed, at the live workers' rate; None if unknown.

    Their rate counts what they have of open shards, so an estimate comes before the first commit.
    """
    if records.store.num_units == 0:
        return None
    if records.store.num_sequences_left == 0:
        return 0.0
    live = [each for each in records.workers if worker_state(each) == "running"]
    done = [each["num_sequences"] + sum(each["skipped"].values()) for each in live]
    rate = sum(n / max(each["elapsed_s"], 1e-9) for n, each in zip(done, live, strict=True))
    return records.store.num_sequences_left / rate if rate > 0 else None


def training_left_s(drafter: DrafterRecords) -> float | None:
    """Seconds to a drafter's last step by the clock, pauses included; None if unknown."""
    if drafter.is_done:
        return 0.0
    if not drafter.train or drafter_state(drafter) != "running":
        return None
    newest = drafter.train[-1]
    return float((newest["total_steps"] - newest["step"]) * seconds_per_step(drafter.train))


def seconds_per_step(train: Sequence[Record]) -> float:
    """Seconds of a step over some records, validations and checkpoints between them included."""
    first, last = train[0], train[-1]
    if last["step"] > first["step"]:
        return float((last["time_s"] - first["time_s"]) / (last["step"] - first["step"]))
    return float(last["step_s"])


def log_steps(train: Sequence[Record]) -> int:
    """Steps between the two newest records."""
    return int(train[-1]["step"] - train[-2]["step"]) if len(train) > 1 else 1
