"""What a run's files say of it: the store's commits, metrics of workers and drafters, evaluations.

No process is asked and nothing is loaded but small files, so this works beside a live run, after
it, and on a login node. Every number is as old as the file it stands in.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_offline.config import RunConfig, drafter_run, run_dir_of, store_dir_of
from storage.commits import committed_units, tombstoned_units
from storage.errors import StoreNotFoundError
from storage.lock import held_since_s, is_holder_gone
from storage.plan import planned_counts, planned_sequences
from storage.writer import open_for_writing

Record = Mapping[str, Any]

TAIL_BYTES = 1 << 16
"""Read from a worker's metrics for what is new: a minute and more of its lines."""

DRAFTER_TAIL_BYTES = 1 << 20
"""The same of a drafter: validations are rarer than a hundred lines of steps."""

PACE_RECORDS = 60
"""Records of steps that a pace is taken from."""

SILENT_S = 120.0
"""Without a word for so long something is taken for stopped; workers write each second."""


@dataclass(frozen=True, kw_only=True)
class StoreRecords:
    """How far a store is filled."""

    num_units: int = 0
    """Planned units; 0 while there is no plan."""
    num_committed: int = 0
    num_sequences_left: int = 0
    """Planned sequences of units that are not committed, about: units are of about one size."""


@dataclass(frozen=True, kw_only=True)
class DrafterRecords:
    """What a drafter's folder holds of its training."""

    name: str
    train: Sequence[Record]
    """The newest records of steps, the last one last; those of the last process only."""
    validation: Record | None
    """What the newest validation found."""
    step: int
    """Step of the newest checkpoint; 0 without one."""
    is_done: bool
    """Whether the newest checkpoint ended the training, and nothing was trained since."""
    is_gone: bool
    """Whether its process ran on this machine and has ended."""
    started_s: float | None
    """Unix time at which its last process began; None if none did, or it cannot be known."""
    evaluation: Record | None
    """Contents of `eval.json`."""


@dataclass(frozen=True, kw_only=True)
class RunRecords:
    """A run at one moment."""

    store: StoreRecords
    workers: Sequence[Record]
    """The newest line of each worker of the extraction that ran last."""
    drafters: Sequence[DrafterRecords]


def read_run(config: RunConfig) -> RunRecords:
    """Reads where a run stands; what does not exist yet is empty."""
    return RunRecords(
        store=_read_store(config),
        workers=newest_workers(run_dir_of(config) / "extract"),
        drafters=[
            read_drafter(drafter_run(config, drafter.name).drafter_dir)
            for drafter in config.drafter
        ],
    )


def _read_store(config: RunConfig) -> StoreRecords:
    try:
        files = open_for_writing(store_dir_of(config)).files
    except StoreNotFoundError:
        return StoreRecords()
    # By counts alone: the ids of a large plan take seconds to read, and this is asked again.
    dead = tombstoned_units(files)
    num_units = sum(planned_counts(files)) - len(dead)
    num_committed = len(committed_units(files) - dead)
    left_fraction = 1 - num_committed / num_units if num_units else 0.0
    return StoreRecords(
        num_units=num_units,
        num_committed=num_committed,
        num_sequences_left=math.ceil(planned_sequences(files) * left_fraction),
    )


def newest_workers(extract_dir: Path) -> list[Record]:
    """The newest line of each worker, without those of an earlier extraction with more workers."""
    newest = [
        lines[-1]
        for path in sorted(extract_dir.glob("worker-*.metrics.jsonl"))
        if (lines := list(read_lines(path, tail_bytes=TAIL_BYTES)))
    ]
    if not newest:
        return []
    num_workers = max(newest, key=lambda line: line["time_s"])["num_workers"]
    return [line for line in newest if line["num_workers"] == num_workers]


def read_drafter(drafter_dir: Path) -> DrafterRecords:
    """Reads a drafter's newest records and checkpoint."""
    lines = list(read_lines(drafter_dir / "metrics.jsonl", tail_bytes=DRAFTER_TAIL_BYTES))
    # Records of earlier versions do not name the run's steps.
    train = [line for line in lines if line.get("kind") == "train" and "total_steps" in line]
    validations = [line for line in lines if line.get("kind") == "validation"]
    starts = [place for place, line in enumerate(train) if "first_report_s" in line]
    step, is_done = last_checkpoint(drafter_dir)
    return DrafterRecords(
        name=drafter_dir.name,
        train=train[starts[-1] if starts else 0 :][-PACE_RECORDS:],
        validation=validations[-1] if validations else None,
        step=step,
        # With more epochs a training goes on behind its last checkpoint.
        is_done=is_done and not (train and train[-1]["step"] > step),
        is_gone=is_holder_gone(drafter_dir),
        started_s=held_since_s(drafter_dir),
        evaluation=read_json(drafter_dir / "eval.json"),
    )


def last_checkpoint(drafter_dir: Path) -> tuple[int, bool]:
    """Step of a drafter's newest checkpoint, and whether it ended its training."""
    for checkpoint in sorted((drafter_dir / "checkpoints").glob("step-*"), reverse=True):
        # Not by `stage2_train.checkpoint`: a command on a login node need not load torch.
        state = read_json(checkpoint / "state.json")
        if state is not None and {"step", "is_done"} <= state.keys():
            return int(state["step"]), bool(state["is_done"])
        # Torn: the drafter goes on from an earlier one.
    return 0, False


def read_lines(path: Path, *, tail_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields the whole lines of a metrics file, or of its last bytes; nothing without a file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            start = 0 if tail_bytes is None else max(0, size - tail_bytes)
            file.seek(start)
            if start > 0:
                file.readline()  # Most likely not a whole one.
            for line in file:
                # What is not a whole line is still being written, or was torn by a kill.
                with suppress(ValueError):
                    value = json.loads(line)
                    if isinstance(value, dict):
                        yield value
    except FileNotFoundError:
        return


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON file's contents; None where there is none, or not a whole one."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def age_s(record: Record) -> float:
    """Seconds since a record was written."""
    return max(0.0, time.time() - float(record["time_s"]))
