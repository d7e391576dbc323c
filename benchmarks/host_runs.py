"""Runs of the product's commands on one host: their files, their processes, what they leave."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch
from host_figures import Figures, kept_figures
from host_parity import worst_difference
from host_watch import drafter_pace, train_records, worker_pace, worker_records

POLL_S = 0.1
# A process's records until it is under way: a drafter's first holds its compilation.
WARMUP_RECORDS = 3
# Layers of all run the same kernels, so what one compiled serves all; each reads in its own order.
DRAFTERS: tuple[dict[str, Any], ...] = (
    {"name": "deep", "num_layers": 5, "train": {"seed": 0}},
    {"name": "medium", "num_layers": 4, "train": {"seed": 1}},
    {"name": "shallow", "num_layers": 3, "train": {"seed": 2}},
)
DRAFTER_NAMES = tuple(str(each["name"]) for each in DRAFTERS)


@dataclass(frozen=True, kw_only=True)
class Host:
    """The folder of all runs, and what they have in common."""

    work: Path
    table: dict[str, Any]
    """Run file without what differs from run to run."""

    @property
    def notes(self) -> Path:
        """Folder of what is measured: small files, to be brought home."""
        return self.work / "notes"

    @property
    def compiled(self) -> Path:
        """Archive of what a drafter compiled."""
        return self.work / "compiled.tar"

    def run_file(
        self, name: str, *, changes: dict[str, dict[str, Any]], drafters: Sequence[str]
    ) -> Path:
        """Writes the run file of one run; gives its path.

        Args:
            name: of the run, its file and its folder.
            changes: settings by table, over the common ones.
            drafters: names of its drafters.
        """
        table = json.loads(json.dumps(self.table))
        table["run_dir"] = str(self.work / name)
        for part, settings in changes.items():
            table[part] = table.get(part, {}) | settings
        table["drafter"] = [
            each | {"block_size": 16, "mask_token_id": 0}
            for each in DRAFTERS
            if each["name"] in drafters
        ]
        path = self.work / f"{name}.toml"
        path.write_text(tomli_w.dumps(table))
        return path


@contextmanager
def running(
    host: Host, command: str, run_file: Path, *arguments: str, gpus: str | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command of the product; ends it and what it started if it still runs."""
    log = host.notes / f"{run_file.stem}.{command}.log"
    environment = os.environ | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "dflash_offline.cli", command, str(run_file), *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            yield process
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills a launcher and all it started, at once: nothing of the run is needed any more.

    The launcher first, else it would start what queues.
    """
    if process.poll() is None:
        started = children_of(process.pid)
        process.kill()
        for child in started:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        process.wait()


def children_of(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    try:
        direct = [
            int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []
    return [each for child in direct for each in (*children_of(child), child)]


def must_end_well(name: str, process: subprocess.Popen[bytes]) -> None:
    """Waits for a command's end.

    Raises:
        ValueError: it failed; its log says why.
    """
    if (exit_code := process.wait()) != 0:
        raise ValueError(f"{name} ended with exit code {exit_code}; see its log in the notes")


def hand_over_cache(host: Host, run_file: Path, drafters: Sequence[str]) -> None:
    """Gives drafters what `prepare` compiled, as if they had been here before."""
    if not host.compiled.is_file():
        return
    for name in drafters:
        folder = host.work / run_file.stem / "drafters" / name
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(host.compiled, folder / "compile-cache.tar")


def prepare(host: Host, *, num_stored: int, show: Callable[[Figures], None]) -> None:
    """Fills the store a little with one worker, and compiles a drafter meanwhile.

    Raises:
        ValueError: a command failed; its log says why.
    """
    changes: dict[str, dict[str, Any]] = {"data": host.table["data"] | {"limit": num_stored}}
    if torch.cuda.is_available():
        changes["extract"] = host.table["extract"] | {"gpus": [0]}
    run_file = host.run_file("prepare", changes=changes, drafters=DRAFTER_NAMES)
    is_compiling = torch.cuda.is_available() and host.table["train"].get("compile") is not False
    start_s = time.time()
    with ExitStack() as stack:
        extraction = stack.enter_context(running(host, "extract", run_file))
        # Waits for the first shard, then needs the GPU for little but the steps it compiles.
        arguments = ("--drafter", DRAFTER_NAMES[0], "--prime")
        priming = (
            stack.enter_context(running(host, "train", run_file, *arguments))
            if is_compiling
            else None
        )
        must_end_well("extract", extraction)
        stop_s = time.time()
        found = worker_pace(
            worker_records(host.work / "prepare", 0), start_s=start_s, stop_s=stop_s
        )
        if found is not None:
            about = (
                f"{num_stored} sequences in {stop_s - start_s:.0f} s with start, a drafter "
                f"compiling beside it; waiting {found.waiting:.1%}, computing {found.busy:.1%}"
            )
            show({"host_prepare_tok_s": (found.tok_s, "tokens/s", about)})
        if priming is not None:
            must_end_well("train --prime", priming)
            (archive,) = (host.work / "prepare" / "drafters").glob(".primed-*.tar")
            archive.rename(host.compiled)
            size = host.compiled.stat().st_size / 1e6
            about = f"from its start, waiting for the first shard included; {size:.0f} MB"
            show({"host_prime_s": (time.time() - start_s, "s", about)})


def keep_metrics(host: Host, run_file: Path) -> None:
    """Copies what the processes of a run logged into the notes."""
    run_dir = host.work / run_file.stem
    for path in (*run_dir.glob("extract/*.jsonl"), *run_dir.glob("drafters/*/metrics.jsonl")):
        copy = host.notes / run_dir.name / path.relative_to(run_dir)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)


def one_drafter(
    host: Host,
    *,
    gpus: Sequence[int],
    parallel: str,
    seconds: float,
    show: Callable[[Figures], None],
) -> None:
    """Trains one drafter over several GPUs for a while."""
    name, drafter = f"{parallel}-{len(gpus)}", DRAFTER_NAMES[0]
    changes: dict[str, dict[str, Any]] = {
        "train": host.table["train"] | {"gpus_per_drafter": len(gpus), "parallel": parallel},
        "launch": {"gpus": list(gpus)}
        if torch.cuda.is_available()
        else {"max_processes": len(gpus)},
    }
    run_file = host.run_file(name, changes=changes, drafters=[drafter])
    hand_over_cache(host, run_file, [drafter])
    run_dir = host.work / name
    with running(host, "train", run_file) as training:
        while len(train_records(run_dir, drafter)) < WARMUP_RECORDS:
            time.sleep(POLL_S)
            if training.poll() is not None:
                raise ValueError(f"training of {name} ended; see its log in the notes")
        start_s = time.time()
        time.sleep(seconds)
        found = drafter_pace(train_records(run_dir, drafter), start_s=start_s, stop_s=time.time())
        keep_metrics(host, run_file)
    if found is None:
        raise ValueError(f"{name} logged nothing in {seconds} s; give it more --seconds")
    about = (
        f"{drafter} over {len(gpus)} GPUs: waiting {found.waiting:.1%}, MFU {found.mfu:.2f}, "
        f"compiles {found.num_compiles}, {'compiled' if found.is_compiled else 'NOT compiled'}"
    )
    show({f"host_{parallel}_{len(gpus)}_tok_s": (found.tok_s, "tokens/s", about)})
    show(compared_with_one(host, found.tok_s, drafter, key=f"host_{parallel}_{len(gpus)}"))


def compared_with_one(host: Host, tok_s: float, drafter: str, *, key: str) -> Figures:
    """How many times one GPU's rate several reach, where that was measured before."""
    for name, (value, _, _) in reversed(kept_figures(host.notes).items()):
        if name.endswith(f"alone_{drafter}_train_tok_s"):
            return {f"{key}_speedup": (tok_s / value, "times", f"over {value:,.0f} tok/s of one")}
    return {}


def one_target(
    host: Host, *, gpus: Sequence[int], num_stored: int, show: Callable[[Figures], None]
) -> None:
    """Extracts with one target over several GPUs; compares its states with those of one GPU."""
    name = f"parallel-target-{len(gpus)}"
    extract = host.table["extract"] | {"gpus_per_worker": len(gpus)}
    if torch.cuda.is_available():
        extract["gpus"] = list(gpus)
    else:
        extract["num_workers"] = 1
    store_dir = host.work / name / "store"
    changes = {
        "data": {"limit": num_stored},
        "extract": extract,
        "store": host.table["store"] | {"dir": str(store_dir)},
    }
    run_file = host.run_file(name, changes=changes, drafters=[DRAFTER_NAMES[0]])
    start_s = time.time()
    with running(host, "extract", run_file) as extraction:
        must_end_well("extract", extraction)
    lines = worker_records(host.work / name, 0)
    keep_metrics(host, run_file)
    found = worker_pace(lines, start_s=start_s, stop_s=time.time())
    if found is not None:
        about = f"one target over {len(gpus)} GPUs, eager: computing {found.busy:.1%}"
        show({f"host_target_{len(gpus)}_tok_s": (found.tok_s, "tokens/s", about)})
    error, about = worst_difference(store_dir, Path(host.table["store"]["dir"]))
    show({f"host_target_{len(gpus)}_error": (error, "fraction", about)})
