"""The whole system on the GPUs of one host: extraction and training side by side, and alone.

    python benchmarks/whole_host.py prepare WORK [--shape wide|qwen3-8b|small|tiny]
        [--target-layers 64] [--distinct-layers 4] [--sequences 3000] [--stored 120]
    python benchmarks/whole_host.py side-by-side WORK --extract-gpus 0,1,2,3,4 --train-gpus 5,6,7
        [--windows together,extract,train,kill] [--seconds 10]
    python benchmarks/whole_host.py one-drafter WORK --gpus 5,6,7 [--parallel ddp|fsdp]
    python benchmarks/whole_host.py one-target WORK --gpus 0,1
    python benchmarks/whole_host.py record WORK

`prepare` writes a target of random weights and conversations of random tokens (or takes `--target`,
`--conversations`), extracts a few of them with one worker, and compiles each kind of drafter once.
The others run the product's own commands on them, as a user would, and say what its processes log:

- `side-by-side`: all workers and all drafters are started; then some are halted (SIGSTOP) and woken
  again, so that each runs alone, with its like and with all the others, without a new start.
  `kill` ends a worker and a drafter with SIGKILL; a drafter that was queued takes the free GPU.
- `one-drafter`, `one-target`: several GPUs for one drafter, for one target.

What is measured is printed and kept at once, for a run that is cut off. `record` appends all of it
to the results and draws it into WORK. `benchmarks/simulate_host.py` predicts these tables.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
import torch
from host_figures import Figures, figures_of_window, keep_figures, kept_figures, ratios
from host_inputs import make_conversations, make_target
from host_watch import (
    Window,
    drafter_pace,
    note,
    note_window,
    process_of,
    start_sampling,
    train_records,
    worker_pace,
    worker_records,
)
from results import record
from shapes import SHAPES
from stage2_step import PACKAGES
from transformers import AutoConfig

POLL_S = 0.1
READY_S = 300.0
# A drafter's records until it is under way: the first holds its compilation.
WARMUP_RECORDS = 3
# After a halt: a worker has up to eight batches under way, and hands them on at once when woken.
SETTLE_S = 4.0
DRAFTERS = (
    {"name": "deep", "num_layers": 5, "block_size": 16},
    {"name": "short", "num_layers": 5, "block_size": 8},
    {"name": "shallow", "num_layers": 3, "block_size": 16},
)
WINDOWS = ("together", "extract", "train", "kill")


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
            each | {"mask_token_id": 0} for each in DRAFTERS if each["name"] in drafters
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
    """Kills a launcher's children, then waits for it: nothing of the run is needed any more."""
    for child in children_of(process.pid):
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    if process.poll() is None:
        process.terminate()
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


def run_to_its_end(host: Host, command: str, run_file: Path, *arguments: str) -> None:
    """Runs a command of the product until it ends.

    Raises:
        ValueError: it failed; its log says why.
    """
    with running(host, command, run_file, *arguments) as process:
        exit_code = process.wait()
    if exit_code != 0:
        raise ValueError(f"{command} {run_file.name} ended with exit code {exit_code}; see its log")


def hand_over_cache(host: Host, run_file: Path, drafters: Sequence[str]) -> None:
    """Gives drafters what `prepare` compiled, as if they had been here before."""
    for name in drafters:
        archive = host.work / f"{name}.tar"
        folder = host.work / run_file.stem / "drafters" / name
        folder.mkdir(parents=True, exist_ok=True)
        if archive.is_file():
            shutil.copy(archive, folder / "compile-cache.tar")


def prepare(
    host: Host, *, num_stored: int, primed: Sequence[str], show: Callable[[Figures], None]
) -> None:
    """Fills the store a little, with one worker, and compiles some kinds of drafters once."""
    changes: dict[str, dict[str, Any]] = {"data": {"limit": num_stored}}
    if torch.cuda.is_available():
        changes["extract"] = host.table["extract"] | {"gpus": [0]}
    names = [str(each["name"]) for each in DRAFTERS]
    run_file = host.run_file("prepare", changes=changes, drafters=names)
    start_s = time.time()
    run_to_its_end(host, "extract", run_file)
    found = worker_pace(
        worker_records(host.work / "prepare", 0), start_s=start_s, stop_s=time.time()
    )
    if found is not None:
        about = f"{num_stored} sequences; waiting {found.waiting:.1%}, computing {found.busy:.1%}"
        show({"host_prepare_tok_s": (found.tok_s, "tokens/s", about)})
    if not torch.cuda.is_available():
        return
    for name in primed:
        start_s = time.monotonic()
        run_to_its_end(host, "train", run_file, "--drafter", name, "--prime")
        (archive,) = (host.work / "prepare" / "drafters").glob(".primed-*.tar")
        archive.rename(host.work / f"{name}.tar")
        show({f"host_prime_{name}_s": (time.monotonic() - start_s, "s", "compiled from nothing")})


@dataclass(kw_only=True)
class SideBySide:
    """Workers and drafters of one run, all started, some of them halted."""

    host: Host
    run_file: Path
    workers: list[int]
    drafters: list[str]
    gpu_of: dict[str, int]
    """By `worker 0` or a drafter's name, as the run file counts GPUs."""
    show: Callable[[Figures], None]
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
        """Waits until all work.

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
        seconds = time.monotonic() - start_s
        about = f"{len(self.workers)} workers and {len(self.drafters)} drafters"
        key = f"host_{self.run_file.stem}_start_s"
        self.show({key: (seconds, "s", f"until {about} work, from what was compiled before")})

    def window(
        self, name: str, workers: Sequence[int], drafters: Sequence[str], *, seconds: float
    ) -> None:
        """Lets some run alone for a while, and says what they did."""
        chosen = [*(f"worker {index}" for index in workers), *drafters]
        halted = [each for each in self.everybody() if each not in chosen]
        self.send(halted, signal.SIGSTOP)
        self.send(chosen, signal.SIGCONT)
        time.sleep(SETTLE_S if workers else SETTLE_S / 2)
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
            key=f"host_{self.run_file.stem.replace('-', '_')}_{name}",
        )
        self.paces[name] = rates
        self.show(figures)

    def kill(self, seconds: float) -> None:
        """Ends a worker and a drafter with SIGKILL; the others are watched before and after."""
        workers, drafters = list(self.workers), list(self.drafters)
        self.window("before_kill", workers, drafters, seconds=seconds)
        victims = [f"worker {workers.pop()}"] if len(workers) > 1 else []
        if len(drafters) > 1:
            victims.append(drafters.pop())
        self.send(victims, signal.SIGKILL)
        note(self.events, event="killed", names=victims)
        self.workers, self.drafters = workers, drafters
        # At once: what a death, and the start of a queued drafter, cost the others is looked for.
        self.measure("after_kill", workers, drafters, seconds=1.5 * seconds)
        self.show(self.ratios("after_kill", "before_kill", f"killed: {', '.join(victims)}"))

    def ratios(self, name: str, reference: str, about: str) -> Figures:
        """Rates of one window over those of another, for the processes of both."""
        key = f"host_{self.run_file.stem.replace('-', '_')}"
        return ratios(
            self.paces.get(name, {}),
            self.paces.get(reference, {}),
            key=f"{key}_{name}",
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
    drafters = [str(each["name"]) for each in DRAFTERS[: len(train_gpus)]]
    changes: dict[str, dict[str, Any]] = {}
    if torch.cuda.is_available():
        changes["extract"] = host.table["extract"] | {"gpus": list(extract_gpus)}
        changes["launch"] = {"gpus": list(train_gpus)}
    else:
        changes["extract"] = host.table["extract"] | {"num_workers": len(extract_gpus)}
        changes["launch"] = {"max_processes": len(train_gpus)}
    queued = [str(each["name"]) for each in DRAFTERS[: len(train_gpus) + 1]]
    run_file = host.run_file(name, changes=changes, drafters=queued)
    hand_over_cache(host, run_file, queued)
    run = SideBySide(
        host=host,
        run_file=run_file,
        workers=list(range(len(extract_gpus))),
        drafters=drafters,
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
        run.window("extract_all", workers, [], seconds=0.8 * seconds)
        if len(workers) > 1:
            run.window("extract_one", workers[:1], [], seconds=0.8 * seconds)
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
            run.show(run.ratios(f"train_{count}", "alone", "over the rate of it alone"))
        run.show(run.ratios("together", "alone", "beside extraction, over the rate of it alone"))
    if "kill" in windows:
        run.kill(0.8 * seconds)


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
    name, drafter = f"{parallel}-{len(gpus)}", str(DRAFTERS[0]["name"])
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
    from host_parity import worst_difference

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
    run_file = host.run_file(name, changes=changes, drafters=[str(DRAFTERS[0]["name"])])
    start_s = time.time()
    run_to_its_end(host, "extract", run_file)
    lines = worker_records(host.work / name, 0)
    keep_metrics(host, run_file)
    found = worker_pace(lines, start_s=start_s, stop_s=time.time())
    if found is not None:
        about = f"one target over {len(gpus)} GPUs, eager: computing {found.busy:.1%}"
        show({f"host_target_{len(gpus)}_tok_s": (found.tok_s, "tokens/s", about)})
    error, about = worst_difference(store_dir, Path(host.table["store"]["dir"]))
    show({f"host_target_{len(gpus)}_error": (error, "fraction", about)})


def gpu_list(text: str) -> list[int]:
    """GPU indices from `0,1,2`; on a machine without, so many processes."""
    return [int(part) for part in text.split(",")]


def open_host(arguments: argparse.Namespace) -> Host:
    """Makes what all runs read, or finds it made."""
    work: Path = arguments.work.resolve()
    (work / "notes").mkdir(parents=True, exist_ok=True)
    common = work / "common.json"
    if arguments.step == "prepare":
        common.write_text(json.dumps(common_table(work, arguments), indent=1))
    elif not common.is_file():
        raise ValueError(f"{work} holds nothing yet: run `prepare` first")
    return Host(work=work, table=json.loads(common.read_text()))


def common_table(work: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The part of the run file that all runs share; its inputs are written."""
    shape = SHAPES[arguments.shape]
    if arguments.target is None:
        target = make_target(
            work / "target",
            shape,
            num_layers=arguments.target_layers,
            num_distinct_layers=arguments.distinct_layers,
        )
        vocab_size = shape.vocab_size
    else:
        target = arguments.target
        vocab_size = AutoConfig.from_pretrained(target).get_text_config().vocab_size
    tokens = arguments.tokens or shape.sequence_tokens
    conversations = arguments.conversations or make_conversations(
        work / "conversations.jsonl",
        count=arguments.sequences,
        length=tokens,
        vocab_size=vocab_size,
    )
    return {
        "target": {"model": str(target)},
        "data": {"conversations": [str(conversations)], "max_sequence_tokens": tokens},
        "store": {"dir": str(work / "store"), "encoding": "fp8", "held_out_fraction": 0.02},
        "extract": {
            "batch_tokens": arguments.batch_sequences * tokens,
            # The run is stopped long before the store is full.
            "force": True,
        },
        "train": {
            "batch_tokens": tokens,
            "num_anchors": arguments.anchors,
            "epochs": 1000,
            "log_steps": arguments.log_steps,
            "checkpoint_steps": 1_000_000,
            "validation_steps": 1_000_000,
            "validation_sequences": 1,
        },
    }


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = parser.add_subparsers(dest="step", required=True)
    names = ("prepare", "side-by-side", "one-drafter", "one-target", "record")
    parsers = {name: steps.add_parser(name) for name in names}
    for each in parsers.values():
        each.add_argument("work", type=Path, help="folder for inputs, store, runs and notes")
    inputs = parsers["prepare"]
    inputs.add_argument("--shape", choices=SHAPES, default="wide")
    inputs.add_argument("--target-layers", type=int, default=64)
    inputs.add_argument("--distinct-layers", type=int, default=None)
    inputs.add_argument("--target", help="a real target instead of a random one")
    inputs.add_argument("--conversations", type=Path, help="its conversations")
    inputs.add_argument("--tokens", type=int, help="of a sequence; default: the shape's")
    inputs.add_argument("--sequences", type=int, default=3000, help="that could be extracted")
    inputs.add_argument("--stored", type=int, default=120, help="extracted before drafters start")
    inputs.add_argument(
        "--prime",
        default=",".join(str(each["name"]) for each in DRAFTERS),
        help="drafters to compile once",
    )
    inputs.add_argument("--batch-sequences", type=int, default=2, help="of a forward pass")
    inputs.add_argument("--anchors", type=int, default=512)
    inputs.add_argument("--log-steps", type=int, default=4)
    parsers["side-by-side"].add_argument("--extract-gpus", type=gpu_list, required=True)
    parsers["side-by-side"].add_argument("--train-gpus", type=gpu_list, required=True)
    parsers["side-by-side"].add_argument("--windows", default=",".join(WINDOWS))
    parsers["one-drafter"].add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp")
    parsers["one-target"].add_argument("--stored", type=int, default=24)
    for name in ("one-drafter", "one-target"):
        parsers[name].add_argument("--gpus", type=gpu_list, required=True)
    for name in ("side-by-side", "one-drafter"):
        parsers[name].add_argument("--seconds", type=float, default=10.0, help="of a window, about")
    return parser.parse_args(argv)


def main() -> None:
    """Runs one step."""
    arguments = arguments_of()
    host = open_host(arguments)

    def show(figures: Figures) -> None:
        keep_figures(host.notes, figures)
        for name, (value, unit, about) in figures.items():
            print(f"{name:<40} {value:>10.4g} {unit:<9} {about}", flush=True)

    if arguments.step == "record":
        record_all(host)
        return
    sampling = start_sampling(host.notes / "gpus.csv")
    try:
        if arguments.step == "prepare":
            prepare(
                host,
                num_stored=arguments.stored,
                primed=[name for name in arguments.prime.split(",") if name],
                show=show,
            )
        elif arguments.step == "side-by-side":
            side_by_side(
                host,
                extract_gpus=arguments.extract_gpus,
                train_gpus=arguments.train_gpus,
                windows=arguments.windows.split(","),
                seconds=arguments.seconds,
                show=show,
            )
        elif arguments.step == "one-drafter":
            one_drafter(
                host,
                gpus=arguments.gpus,
                parallel=arguments.parallel,
                seconds=arguments.seconds,
                show=show,
            )
        else:
            one_target(host, gpus=arguments.gpus, num_stored=arguments.stored, show=show)
    finally:
        if sampling is not None:
            sampling.terminate()
            sampling.wait()


def record_all(host: Host) -> None:
    """Appends everything that was measured to the results."""
    device = "CPU"
    if torch.cuda.is_available():
        device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    record(
        "The whole system on one host", kept_figures(host.notes), device=device, packages=PACKAGES
    )


if __name__ == "__main__":
    main()
