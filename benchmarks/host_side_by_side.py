"""All workers and drafters of a host, started once, of which some are halted at a time."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from host_figures import Figures, figures_of_window, ratios
from host_runs import (
    DRAFTER_NAMES,
    POLL_S,
    WARMUP_RECORDS,
    Host,
    hand_over_cache,
    keep_metrics,
    running,
)
from host_watch import Window, note, note_window, process_of, train_records, worker_records

READY_S = 300.0
# After a halt: a worker has up to eight batches under way, and hands them on at once when woken.
SETTLE_S = 4.0
WINDOWS = ("together", "extract", "train", "kill")


@dataclass(kw_only=True)
class SideBySide:
    """Workers and drafters of one run, all started, some of them halted."""

    host: Host
    run_file: Path
    workers: list[int]
    drafters: list[str]
    queued: list[str]
    """Drafters that start when another has ended."""
    gpu_of: dict[str, int]
    """By `worker 0` or a drafter's name, as the run file counts GPUs."""
    show: Callable[[Figures], None]
    halted: list[str] = field(default_factory=list)
    paces: dict[str, dict[str, float]] = field(default_factory=dict)
    """Tokens a second by window and process."""

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return self.host.work / self.run_file.stem

    @property
    def events(self) -> Path:
        """The notes of this run."""
        return self.host.notes / f"{self.run_file.stem}.jsonl"

    @property
    def key(self) -> str:
        """What the names of this run's figures begin with."""
        return f"host_{self.run_file.stem.replace('-', '_')}"

    def pid(self, name: str) -> int | None:
        """The process of a worker or drafter."""
        argument, value = (
            ("--worker", name.split()[1]) if name.startswith("worker ") else ("--drafter", name)
        )
        return process_of(self.run_file, argument, value)

    def everybody(self) -> list[str]:
        """All that are alive, as far as we know."""
        return [*(f"worker {index}" for index in self.workers), *self.drafters]

    def send(self, names: Sequence[str], number: signal.Signals) -> None:
        """Sends a signal to some."""
        for name in names:
            if (pid := self.pid(name)) is not None:
                os.kill(pid, number)

    def is_ready(self, name: str) -> bool:
        """Whether a process works at its pace: it has logged what is worth counting."""
        if name.startswith("worker "):
            return len(worker_records(self.run_dir, int(name.split()[1]))) >= WARMUP_RECORDS
        return len(train_records(self.run_dir, name)) >= WARMUP_RECORDS

    def wait_until_ready(self, launchers: Sequence[subprocess.Popen[bytes]]) -> None:
        """Waits until all work; who is ready is halted, so that the store grows in windows only.

        Raises:
            ValueError: a launcher ended, or it takes too long.
        """
        start_s = time.monotonic()
        for name in self.everybody():
            while not self.is_ready(name):
                time.sleep(POLL_S)
                if any(each.poll() is not None for each in launchers):
                    raise ValueError("a command ended before all worked; see its log in the notes")
                if time.monotonic() - start_s > READY_S:
                    raise ValueError(f"{name} does not work after {READY_S:.0f} s; see its log")
            note(self.events, event="ready", name=name)
            print(f"{time.monotonic() - start_s:6.1f} s: {name} works", flush=True)
            self.send([name], signal.SIGSTOP)
            self.halted.append(name)
        seconds = time.monotonic() - start_s
        those = f"{len(self.workers)} workers and {len(self.drafters)} drafters"
        about = f"until {those} work, from what was compiled before"
        self.show({f"{self.key}_start_s": (seconds, "s", about)})

    def window(
        self, name: str, workers: Sequence[int], drafters: Sequence[str], *, seconds: float
    ) -> None:
        """Lets some run alone for a while, and says what they did."""
        chosen = [*(f"worker {index}" for index in workers), *drafters]
        halted = [each for each in self.everybody() if each not in chosen]
        self.send(halted, signal.SIGSTOP)
        self.send(chosen, signal.SIGCONT)
        if halted or self.halted:
            time.sleep(SETTLE_S if workers else SETTLE_S / 2)
        self.halted = halted
        self.measure(name, workers, drafters, seconds=seconds)

    def measure(
        self, name: str, workers: Sequence[int], drafters: Sequence[str], *, seconds: float
    ) -> None:
        """Watches what runs for a while, and says what it did."""
        start_s = time.time()
        time.sleep(seconds)
        window = Window(
            name=name,
            start_s=start_s,
            stop_s=time.time(),
            workers=tuple(workers),
            drafters=tuple(drafters),
        )
        note_window(self.events, window)
        figures, rates = figures_of_window(
            window,
            run_dir=self.run_dir,
            samples=self.host.notes / "gpus.csv",
            gpu_of=self.gpu_of,
            key=f"{self.key}_{name}",
        )
        self.paces[name] = rates
        self.show(figures)

    def kill(self, name: str) -> None:
        """Ends a worker or a drafter with SIGKILL."""
        self.send([name], signal.SIGKILL)
        note(self.events, event="killed", names=[name])
        if name in self.drafters:
            self.drafters.remove(name)
        else:
            self.workers.remove(int(name.split()[1]))

    def kill_drafter(self, reference: str, *, seconds: float) -> str:
        """Ends a drafter; all others are watched from then on, while a queued one takes its GPU.

        Returns:
            The window with which rates are to be compared from then on.
        """
        victim = self.drafters[-1]
        self.kill(victim)
        # At once: what a death, and the start of another, cost the others is looked for.
        self.measure("drafter_killed", self.workers, self.drafters, seconds=seconds)
        self.show(self.ratios("drafter_killed", reference, f"beside the death of {victim}"))
        if not self.queued:
            return reference
        successor = self.queued.pop(0)
        self.gpu_of[successor] = self.gpu_of[victim]
        start_s = time.monotonic()
        while not self.is_ready(successor) and time.monotonic() - start_s < READY_S:
            time.sleep(POLL_S)
        if not self.is_ready(successor):
            print(f"{successor} does not work after {READY_S:.0f} s; see its log", flush=True)
            return reference
        about = f"from the death of {victim} until {successor} works on its GPU"
        self.show({f"{self.key}_successor_s": (seconds + time.monotonic() - start_s, "s", about)})
        self.drafters.append(successor)
        self.measure("successor", self.workers, self.drafters, seconds=0.8 * seconds)
        self.show(self.ratios("successor", reference, f"{successor} in the place of {victim}"))
        return "successor"

    def kill_worker(self, reference: str, *, seconds: float) -> None:
        """Ends a worker; all others are watched from then on."""
        victim = f"worker {self.workers[-1]}"
        self.kill(victim)
        self.measure("worker_killed", self.workers, self.drafters, seconds=seconds)
        self.show(self.ratios("worker_killed", reference, f"beside the death of {victim}"))
        if self.workers:
            return
        # The command has ended with its only worker, and is given again.
        with running(self.host, "extract", self.run_file):
            self.measure("worker_returns", [], self.drafters, seconds=1.5 * seconds)
        about = f"while {victim} starts again"
        self.show(self.ratios("worker_returns", reference, about))

    def ratios(self, name: str, reference: str, about: str) -> Figures:
        """Rates of one window over those of another, for the processes of both."""
        return ratios(
            self.paces.get(name, {}),
            self.paces.get(reference, {}),
            key=f"{self.key}_{name}",
            note=about,
        )


def side_by_side(
    host: Host,
    *,
    extract_gpus: Sequence[int],
    train_gpus: Sequence[int],
    windows: Sequence[str],
    seconds: float,
    show: Callable[[Figures], None],
) -> None:
    """Starts all workers and drafters once, and watches them in turns."""
    name = f"{len(extract_gpus)}-{len(train_gpus)}"
    drafters = list(DRAFTER_NAMES[: len(train_gpus)])
    changes: dict[str, dict[str, Any]] = {}
    if torch.cuda.is_available():
        changes["extract"] = host.table["extract"] | {"gpus": list(extract_gpus)}
        changes["launch"] = {"gpus": list(train_gpus)}
    else:
        changes["extract"] = host.table["extract"] | {"num_workers": len(extract_gpus)}
        changes["launch"] = {"max_processes": len(train_gpus)}
    queued = list(DRAFTER_NAMES[: len(train_gpus) + 1])
    run_file = host.run_file(name, changes=changes, drafters=queued)
    hand_over_cache(host, run_file, queued)
    run = SideBySide(
        host=host,
        run_file=run_file,
        workers=list(range(len(extract_gpus))),
        drafters=drafters,
        queued=queued[len(drafters) :],
        gpu_of={f"worker {index}": gpu for index, gpu in enumerate(extract_gpus)}
        | dict(zip(drafters, train_gpus, strict=True)),
        show=show,
    )
    with (
        running(host, "extract", run_file) as extraction,
        running(host, "train", run_file) as training,
    ):
        run.wait_until_ready([extraction, training])
        try:
            watch(run, windows, seconds=seconds)
        finally:
            run.send(run.everybody(), signal.SIGCONT)
            keep_metrics(host, run_file)


def watch(run: SideBySide, windows: Sequence[str], *, seconds: float) -> None:
    """The windows of a run, by kind: all together, extraction alone, training alone, deaths."""
    workers, drafters = list(run.workers), list(run.drafters)
    if "together" in windows:
        run.window("together", workers, drafters, seconds=seconds)
    if "extract" in windows:
        for count in sorted({1, len(workers)}, reverse=True):
            run.window(f"extract_{count}", workers[:count], [], seconds=0.8 * seconds)
        for name in sorted({f"extract_{len(workers)}", "together"} - {"extract_1"}):
            run.show(run.ratios(name, "extract_1", "over the rate of one worker alone"))
    if "train" in windows:
        for drafter in drafters:
            run.window(f"alone_{drafter}", [], [drafter], seconds=0.6 * seconds)
        run.paces["alone"] = {
            drafter: rate
            for each in drafters
            for drafter, rate in run.paces[f"alone_{each}"].items()
        }
        for count in range(2, len(drafters) + 1):
            run.window(f"train_{count}", [], drafters[:count], seconds=0.6 * seconds)
        for name in (*(f"train_{count}" for count in range(2, len(drafters) + 1)), "together"):
            run.show(run.ratios(name, "alone", "over the rate of the same drafter alone"))
    if "kill" in windows:
        run.window("before_kill", workers, drafters, seconds=0.6 * seconds)
        reference = run.kill_drafter("before_kill", seconds=0.8 * seconds)
        run.kill_worker(reference, seconds=0.8 * seconds)
