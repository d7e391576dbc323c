"""Slurm's queue: submit a file, see which tasks are alive, cancel. The only place that calls it."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class QueuedTask:
    """A job, or a task of an array, that waits or runs."""

    job_id: str
    """Id of the job; of an array, that of the whole array."""
    index: int | None
    """Place in the array; None for a plain job."""
    state: str
    """Slurm's word, for example `PENDING`."""
    job_name: str


def is_available() -> bool:
    """Whether this machine has Slurm's commands."""
    return shutil.which("sbatch") is not None


def queued_tasks(job_names: Sequence[str]) -> list[QueuedTask]:
    """Gives this user's live tasks of these names.

    The scheduler is asked, not a file of ours: a submission that died half-way or a job cancelled
    by hand is seen as it is.

    Raises:
        ValueError: Slurm's commands are missing or fail.
    """
    fields = "--format=%F|%K|%T|%j"
    text = _call("squeue", "--me", "--noheader", "--array", f"--name={','.join(job_names)}", fields)
    tasks = []
    for line in text.splitlines():
        job_id, index, state, job_name = line.strip().split("|", maxsplit=3)
        place = int(index) if index.isdigit() else None
        tasks.append(QueuedTask(job_id=job_id, index=place, state=state, job_name=job_name))
    return tasks


def sbatch_arguments(
    script: Path, *, array: str | None = None, dependency: str | None = None
) -> list[str]:
    """The command that submits a file; options given here override those in the file."""
    arguments = ["sbatch", "--parsable"]
    arguments += [f"--array={array}"] if array else []
    # A dependency that can no longer be met ends the job instead of leaving it in the queue.
    arguments += [f"--dependency={dependency}", "--kill-on-invalid-dep=yes"] if dependency else []
    return [*arguments, str(script)]


def submit_job(arguments: Sequence[str]) -> str:
    """Runs an `sbatch` command; returns the job's id."""
    # In a federation the answer is `id;cluster`.
    return _call(*arguments).strip().partition(";")[0]


def cancel_jobs(job_ids: Sequence[str]) -> None:
    """Cancels jobs with all their tasks; they stay cancelled."""
    _call("scancel", *job_ids)


def _call(*arguments: str) -> str:
    try:
        result = subprocess.run(arguments, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ValueError(
            f"{arguments[0]} not found: run this where jobs are submitted, or look at the files "
            "first with --dry-run"
        ) from error
    if result.returncode != 0:
        fault = " ".join(result.stderr.split()) or f"exit code {result.returncode}"
        raise ValueError(f"{arguments[0]}: {fault}")
    return result.stdout
