"""Batch jobs: write a run's sbatch files, submit what is left to do, say how far it is, cancel.

extract -> train as soon as the first extraction task has started -> finalize after any end.
Nothing here decides what is done: that is in the store's commits and the drafters' checkpoints, and
what is alive is in Slurm's queue. So every command may be repeated at any time.
"""

import hashlib
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import tomli_w

from dflash_offline.config import (
    RunConfig,
    as_toml_tables,
    drafter_run,
    run_dir_of,
    store_dir_of,
)
from dflash_offline.launch import EXIT_STOPPED_EARLY
from dflash_offline.run_records import last_checkpoint
from dflash_offline.slurm_queue import (
    QueuedTask,
    cancel_jobs,
    is_available,
    queued_tasks,
    sbatch_arguments,
    submit_job,
)
from dflash_offline.slurm_scripts import BatchRun, array_text, scripts
from storage.files import replace_whole
from storage.lock import only_process_in

Unit = TypeVar("Unit")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How much of a run is done, by its commits and checkpoints."""

    num_units: int | None
    """Units of the store's plan; None while there is no plan."""
    num_committed: int
    tasks_left: tuple[int, ...]
    """Extraction tasks whose own share is not committed whole."""
    steps: tuple[int, ...]
    """Steps of each drafter's last checkpoint."""
    drafters_left: tuple[int, ...]
    """Places in the run file of the drafters that are not trained to their end."""


def submit(config: RunConfig, *, only_left: bool, again: bool, dry_run: bool) -> None:
    """Writes the sbatch files and submits the jobs that are neither done nor alive.

    Args:
        config: The run file, checked.
        only_left: Of an extraction only the tasks whose share is incomplete and that are not
            alive, instead of the whole array when none is alive.
        again: Submit what is done, too: for data that has grown, or more epochs.
        dry_run: Write the files and print the commands; submit nothing.

    Raises:
        ValueError: Jobs with other settings are alive, Slurm is missing or refuses.
    """
    run = batch_run(config)
    with only_process_in(run.folder, work="submission"):
        alive = [] if dry_run and not is_available() else _alive(run)
        _write_files(run, config, alive)
        progress = read_progress(config)
        wanted = wanted_tasks(run, progress, alive, only_left=only_left, again=again)
        _submit_chain(run, wanted, alive, progress, dry_run=dry_run)


def print_status(config: RunConfig) -> None:
    """Prints what is done and which jobs are alive."""
    run = batch_run(config)
    alive = _alive(run)
    print("\n".join(describe(run, config, read_progress(config))))
    for stage in run.stages:
        tasks = [task for task in alive if task.job_name == run.job_name(stage)]
        for job_id in dict.fromkeys(task.job_id for task in tasks):
            states = [task.state.lower() for task in tasks if task.job_id == job_id]
            counts = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))
            print(f"job {job_id} ({stage}): {counts}")
    if not alive:
        print("no job of this run is alive")


def cancel(config: RunConfig) -> None:
    """Cancels every live job of the run; what is committed or in a checkpoint stays."""
    job_ids = _ids(_alive(batch_run(config)))
    if job_ids:
        cancel_jobs(job_ids)
    print(f"cancelled {', '.join(job_ids)}" if job_ids else "no job of this run is alive")


def finalize(config: RunConfig) -> int:
    """Prints what is done and how to do the rest; returns 0 if there is none, else 75."""
    run = batch_run(config)
    progress = read_progress(config)
    print("\n".join(describe(run, config, progress)))
    left = {"extract": progress.tasks_left, "train": progress.drafters_left}
    if not any(left.values()):
        print("all done")
        return 0
    for stage, indices in left.items():
        if indices and stage in run.stages:
            arguments = sbatch_arguments(run.script_path(stage), array=array_text(indices))
            print(f"left of {stage}: {shlex.join(arguments)}")
    print(f"to submit what is left: dflash-offline slurm retry {shlex.quote(str(run.run_file))}")
    return EXIT_STOPPED_EARLY


def batch_run(config: RunConfig) -> BatchRun:
    """The batch side of a run file.

    Raises:
        ValueError: The signal comes too late to finish a shard.
    """
    grace_s = config.extract.stop_grace_s
    # Slurm checks limits once a minute.
    if config.slurm.signal_s < grace_s + 60:
        raise ValueError(
            f"slurm.signal_s {config.slurm.signal_s}: expected at least extract.stop_grace_s + 60 ="
            f" {grace_s + 60:.0f}, or the time limit kills a worker that still finishes a shard"
        )
    run_dir = run_dir_of(config)
    of_path = hashlib.sha256(str(run_dir).encode()).hexdigest()[:8]
    return BatchRun(
        name=f"{run_dir.name}-{of_path}",
        folder=run_dir / "slurm",
        drafters=tuple(drafter.name for drafter in config.drafter),
        worker_gpus=config.extract.gpus_per_worker,
        ranks=_ranks_per_drafter(config),
        command=config.slurm.command or (sys.executable, "-m", "dflash_offline.cli"),
        config=config.slurm,
    )


def _ranks_per_drafter(config: RunConfig) -> int:
    """Processes of each drafter; one array has one shape.

    Raises:
        ValueError: The drafters differ in it, or the nodes cannot share them evenly.
    """
    counts = {
        drafter.name: drafter_run(config, drafter.name).train.gpus_per_drafter
        for drafter in config.drafter
    }
    ranks = next(iter(counts.values()))
    if config.slurm.layout == "one-node":
        return ranks
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"train.gpus_per_drafter differs between drafters ({counts}), and the tasks of one job "
            "array are alike; write a run file for each number, on the same store"
        )
    if ranks % config.slurm.train.nodes:
        raise ValueError(
            f"slurm.train.nodes = {config.slurm.train.nodes} cannot share "
            f"train.gpus_per_drafter = {ranks} evenly; make it a divisor"
        )
    return ranks


def tasks_left(units: Sequence[Unit], committed: set[Unit], *, num_workers: int) -> list[int]:
    """The workers whose own share of the units is not committed whole, by index. Pure."""
    return sorted({i % num_workers for i, unit in enumerate(units) if unit not in committed})


def wanted_tasks(
    run: BatchRun,
    progress: Progress,
    alive: Sequence[QueuedTask],
    *,
    only_left: bool,
    again: bool,
) -> dict[str, list[int]]:
    """The array indices to submit now, by stage; a plain job has index 0. Pure."""
    to_extract = list(range(run.config.extract.tasks))
    if not again and (only_left or not progress.tasks_left):
        to_extract = list(progress.tasks_left)
    to_train = list(range(len(run.drafters))) if again else list(progress.drafters_left)
    wanted = {
        "extract": to_extract,
        "train": to_train,
        "node": [0] if to_extract or to_train else [],
    }
    for stage in wanted:
        live = {task.index or 0 for task in alive if task.job_name == run.job_name(stage)}
        # A live worker takes over what others left: only `retry` adds single tasks beside it.
        if live and (stage == "extract" and not only_left):
            wanted[stage] = []
        wanted[stage] = [index for index in wanted[stage] if index not in live]
    return {stage: wanted[stage] for stage in run.stages if stage in wanted}


def read_progress(config: RunConfig) -> Progress:
    """Counts commits and finished drafters; loads neither states nor weights."""
    from storage.errors import StoreNotFoundError
    from storage.writer import open_for_writing

    num_workers = config.slurm.extract.tasks
    num_units, num_committed, left = None, 0, list(range(num_workers))
    try:
        store = open_for_writing(store_dir_of(config))
    except StoreNotFoundError:
        pass  # The first extraction task makes it.
    else:
        if units := store.units():
            num_units, num_committed = len(units), len(committed := store.committed())
            left = tasks_left(units, committed, num_workers=num_workers)
    states = [
        last_checkpoint(drafter_run(config, each.name).drafter_dir) for each in config.drafter
    ]
    return Progress(
        num_units=num_units,
        num_committed=num_committed,
        tasks_left=tuple(left),
        steps=tuple(step for step, _ in states),
        drafters_left=tuple(i for i, (_, is_done) in enumerate(states) if not is_done),
    )


def describe(run: BatchRun, config: RunConfig, progress: Progress) -> list[str]:
    """A run's progress in words."""
    lines = [f"extract: {progress.num_committed} of {progress.num_units} units are committed"]
    if progress.num_units is None:
        lines = [f"extract: no plan yet in {store_dir_of(config)}"]
    for index, (name, step) in enumerate(zip(run.drafters, progress.steps, strict=True)):
        state = "not done" if index in progress.drafters_left else "done"
        lines.append(f"train {name}: {state}, last checkpoint at step {step}")
    return lines


def _submit_chain(
    run: BatchRun,
    wanted: dict[str, list[int]],
    alive: Sequence[QueuedTask],
    progress: Progress,
    *,
    dry_run: bool,
) -> None:
    new: dict[str, str] = {}
    for stage, indices in wanted.items():
        live = [task for task in alive if task.job_name == run.job_name(stage)]
        if not indices:
            ids = ", ".join(_ids(live))
            done = "done, not submitted (after more data or epochs: slurm submit --again)"
            print(f"{stage}: " + (f"job {ids} is alive, not submitted" if live else done))
            continue
        dependency = None
        if stage == "train" and not progress.num_committed:
            dependency = _after_first_task(run, wanted["extract"], alive, new.get("extract"))
        array = None if stage == "node" else _array(run, stage, indices)
        arguments = sbatch_arguments(run.script_path(stage), array=array, dependency=dependency)
        new[stage] = _submit(stage, arguments, dry_run=dry_run)
    if new:
        last = [task for task in alive if task.job_name == run.job_name("finalize")]
        if last and not dry_run:
            cancel_jobs(_ids(last))  # It waits for the earlier jobs only.
        earlier = [task for task in alive if task not in last]
        ends = ":".join(["afterany", *dict.fromkeys([*_ids(earlier), *new.values()])])
        arguments = sbatch_arguments(run.script_path("finalize"), dependency=ends)
        _submit("finalize", arguments, dry_run=dry_run)


def _after_first_task(
    run: BatchRun, indices: Sequence[int], alive: Sequence[QueuedTask], new_id: str | None
) -> str | None:
    """Training holds no GPU before extraction has begun; it then waits for shards by itself."""
    if new_id is not None:
        # The whole array's id would wait for every task to start.
        return f"after:{new_id}_{min(indices)}"
    live = [task for task in alive if task.job_name == run.job_name("extract")]
    if not live or any(task.state != "PENDING" for task in live):
        return None
    first = min(live, key=lambda task: task.index or 0)
    return f"after:{first.job_id}_{first.index}"


def _array(run: BatchRun, stage: str, indices: Sequence[int]) -> str:
    at_once = run.config.extract.tasks_at_once if stage == "extract" else None
    return array_text(indices) + (f"%{at_once}" if at_once else "")


def _submit(stage: str, arguments: Sequence[str], *, dry_run: bool) -> str:
    if dry_run:
        print(f"{stage}=$({' '.join(arguments)})")
        return f"${{{stage}}}"
    job_id = submit_job(arguments)
    print(f"{stage}: job {job_id} submitted: {shlex.join(arguments)}", flush=True)
    return job_id


def _write_files(run: BatchRun, config: RunConfig, alive: Sequence[QueuedTask]) -> None:
    """Writes the settings and the sbatch files, unless live jobs go by other settings.

    Raises:
        ValueError: They do.
    """
    # Slurm chooses the GPUs; indices meant for a workstation do not exist in an allocation.
    settings = config.model_copy(
        update={
            "extract": config.extract.model_copy(update={"gpus": None}),
            "launch": config.launch.model_copy(update={"gpus": None}),
        }
    )
    text = tomli_w.dumps(as_toml_tables(settings)).encode()
    if alive and run.run_file.exists() and run.run_file.read_bytes() != text:
        raise ValueError(
            f"job {', '.join(_ids(alive))} of this run is alive with other settings "
            f"({run.run_file}); wait for it, run `dflash-offline slurm cancel`, or use another "
            "run_dir"
        )
    run.logs_dir.mkdir(parents=True, exist_ok=True)  # Slurm makes no folders for its logs.
    replace_whole(run.run_file, text)
    for stage, script in scripts(run).items():
        replace_whole(run.script_path(stage), script.encode())
        os.chmod(run.script_path(stage), 0o755)
    print(f"wrote {run.folder}/: {', '.join(f'{stage}.sbatch' for stage in run.stages)}")


def _alive(run: BatchRun) -> list[QueuedTask]:
    return queued_tasks([run.job_name(stage) for stage in run.stages])


def _ids(tasks: Sequence[QueuedTask]) -> list[str]:
    return list(dict.fromkeys(task.job_id for task in tasks))
