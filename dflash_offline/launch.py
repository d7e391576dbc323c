"""Start one process per worker or drafter, show their progress, pass signals on."""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from dflash_offline.launched import child_environment
from dflash_offline.near_gpu import near_cores, on_cores, thread_limits

EXIT_STOPPED_EARLY = 75
"""Exit code of work that stopped at a signal and can be resumed (EX_TEMPFAIL)."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One child process: its name, its command line and where its output is kept."""

    name: str
    arguments: Sequence[str]
    """Arguments of `dflash-offline`."""
    log_path: Path
    num_places: int = 1
    """Places it needs at once; a drafter on several GPUs starts its own ranks there."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A place to run one job: a GPU, or a share of the CPU."""

    environment: Mapping[str, str]


def joined(slots: Sequence[Slot]) -> Mapping[str, str]:
    """The environment of several places together: all their GPUs."""
    environment: dict[str, str] = {}
    for slot in slots:
        for name, value in slot.environment.items():
            environment[name] = f"{environment[name]},{value}" if name in environment else value
    return environment


def slots(
    gpus: Sequence[int] | None, *, available_gpus: int, cpu_processes: int, first: bool
) -> list[Slot]:
    """The places a stage may use.

    Args:
        gpus: Device indices from the run file; None takes the default share.
        available_gpus: GPUs of this machine.
        cpu_processes: Places on a machine without a GPU.
        first: Whether this is stage 1 (GPUs 0-4 of eight) or stage 2 (the last three).

    Raises:
        ValueError: A named GPU does not exist.
    """
    setting = f"{'extract' if first else 'launch'}.gpus = {list(gpus or ())}"
    if available_gpus == 0:
        if gpus:
            raise ValueError(f"{setting}: this machine shows no GPU; remove the setting")
        return [Slot(environment={}) for _ in range(cpu_processes)]
    if gpus is None:
        gpus = default_gpus(available_gpus, first=first)
    if not gpus:
        raise ValueError(f"{setting}: name at least one GPU, or remove the setting")
    absent = [gpu for gpu in gpus if not 0 <= gpu < available_gpus]
    if absent:
        raise ValueError(f"{setting}: this machine has GPUs 0-{available_gpus - 1} only")
    return [Slot(environment={"CUDA_VISIBLE_DEVICES": visible_device(gpu)}) for gpu in gpus]


def default_gpus(available_gpus: int, *, first: bool) -> list[int]:
    """GPUs 0-4 for stage 1 and the last three for stage 2 where there are eight, else all."""
    if available_gpus < 8:
        return list(range(available_gpus))
    return list(range(5)) if first else list(range(available_gpus - 3, available_gpus))


def count_gpus() -> int:
    """GPUs that this process may use, without making a CUDA context."""
    import torch

    return torch.cuda.device_count()


def run_jobs(
    jobs: Sequence[Job],
    *,
    places: Sequence[Slot],
    show_line: Callable[[str, str], None],
    together: bool = False,
) -> dict[str, int]:
    """Runs every job, one a place at a time, and returns their exit codes.

    A job that fails does not touch the others, unless they work together. SIGINT, SIGTERM and
    SIGUSR1 are passed on to the running jobs, and queued ones are not started any more (their exit
    code is 75); a second SIGINT kills them.

    Args:
        jobs: What to run, in order; more jobs than places queue.
        places: Where jobs run.
        show_line: Called with a job's name and each line of its output.
        together: Whether the jobs need each other, as the ranks of one drafter do: when one
            fails, or a signal ends it before it listens, the others, who would wait for it, are
            killed and share its exit code.

    Raises:
        ValueError: A job needs more places than there are.
    """
    for job in jobs:
        if job.num_places > len(places):
            raise ValueError(
                f"{job.name} needs {job.num_places} places at once, of which there are "
                f"{len(places)}: raise launch.gpus (launch.max_processes without a GPU), or lower "
                "train.gpus_per_drafter"
            )
    free = list(places)
    waiting = list(jobs)
    failure = 0
    limits = thread_limits(len(places))
    running: dict[str, tuple[subprocess.Popen[str], list[Slot]]] = {}
    exit_codes: dict[str, int] = {}
    lines: queue.Queue[tuple[str, str | None]] = queue.Queue()
    with _signals_passed_on(lambda: [process for process, _ in running.values()]) as stopping:
        while waiting or running:
            # In order: a job of many places is not passed for ever by those of one.
            while waiting and len(free) >= waiting[0].num_places and not stopping.is_set():
                job = waiting.pop(0)
                taken, free = free[: job.num_places], free[job.num_places :]
                environment = {**limits, **os.environ, **joined(taken)}
                running[job.name] = (_start(job, environment, lines), taken)
                if stopping.is_set():
                    running[job.name][0].terminate()
            if stopping.is_set():
                exit_codes |= {job.name: EXIT_STOPPED_EARLY for job in waiting}
                waiting.clear()
                if not running:
                    break
            name, line = lines.get()
            if line is not None:
                show_line(name, line)
                continue
            process, taken = running.pop(name)
            is_killed = process.wait() < 0
            exit_code = _exit_code(process.returncode, stopping=stopping.is_set())
            exit_codes[name] = failure or exit_code
            free += taken
            has_ended_well = exit_code in (0, EXIT_STOPPED_EARLY) and not is_killed
            if together and not failure and not has_ended_well:
                failure = exit_code
                for other, _ in running.values():
                    other.kill()
    return exit_codes


def combined_exit_code(exit_codes: Mapping[str, int]) -> int:
    """0 when all succeeded; 75 when the rest merely stopped early; else 2 for user errors or 1."""
    codes = set(exit_codes.values())
    if codes <= {0}:
        return 0
    if codes <= {0, EXIT_STOPPED_EARLY}:
        return EXIT_STOPPED_EARLY
    return 2 if codes <= {0, 2, EXIT_STOPPED_EARLY} else 1


def describe_exit(exit_code: int) -> str:
    """An exit code in words."""
    if exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return {0: "done", EXIT_STOPPED_EARLY: "stopped early, resumable"}.get(
        exit_code, f"failed with exit code {exit_code}"
    )


def _exit_code(exit_code: int, *, stopping: bool) -> int:
    """A job that a stop reached before it could listen has begun nothing: resumable.

    We send SIGTERM; srun tells every process of a job step, ours too, the SIGUSR1 that it gets.
    """
    unheard = (-signal.SIGTERM, -signal.SIGUSR1)
    return EXIT_STOPPED_EARLY if stopping and exit_code in unheard else exit_code


def _start(
    job: Job, environment: Mapping[str, str], lines: "queue.Queue[tuple[str, str | None]]"
) -> subprocess.Popen[str]:
    job.log_path.parent.mkdir(parents=True, exist_ok=True)
    devices = [each.strip() for each in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    with on_cores(near_cores(list(filter(None, devices)))):
        process = subprocess.Popen(
            [sys.executable, "-m", "dflash_offline.cli", *job.arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**environment, **child_environment(job.log_path), "PYTHONUNBUFFERED": "1"},
            # Ctrl-C reaches the launcher alone, which passes one signal on: none arrives twice.
            start_new_session=True,
        )
    threading.Thread(target=_forward_output, args=(job, process, lines), daemon=True).start()
    return process


def _forward_output(
    job: Job, process: subprocess.Popen[str], lines: "queue.Queue[tuple[str, str | None]]"
) -> None:
    assert process.stdout is not None, "started with a pipe"
    try:
        with job.log_path.open("a", encoding="utf-8") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                lines.put((job.name, line.rstrip("\n")))
    except OSError as error:
        lines.put((job.name, f"its log {job.log_path} cannot be written: {error.strerror}"))
        for line in process.stdout:
            lines.put((job.name, line.rstrip("\n")))
    finally:
        lines.put((job.name, None))


@contextmanager
def _signals_passed_on(
    processes: Callable[[], Sequence[subprocess.Popen[str]]],
) -> Iterator[threading.Event]:
    stopping = threading.Event()

    def pass_on(number: int, frame: FrameType | None) -> None:
        again = number == signal.SIGINT and stopping.is_set()
        stopping.set()
        for process in processes():
            # Workers know SIGTERM as "finish or drop the open unit, then exit 75".
            process.send_signal(signal.SIGKILL if again else signal.SIGTERM)

    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, pass_on) for number in handled}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def visible_device(gpu: int) -> str:
    """The name CUDA knows a GPU by, inside a scheduler's own selection."""
    selected = os.environ.get("CUDA_VISIBLE_DEVICES")
    return selected.split(",")[gpu].strip() if selected else str(gpu)
