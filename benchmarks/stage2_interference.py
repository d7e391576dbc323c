"""Whether drafters get in each other's way: processes of their own beside threads of one process.

    python benchmarks/stage2_interference.py [--counts 1,2,3] [--seconds 15] [--shape tiny|small]
        [--threads-only] [--no-record]

Each process trains a drafter from one store, as `dflash-offline train` starts it: alone, two, three
at once, on one GPU or on shares of the CPU. A fraction is all drafters' rate over that of one
alone: on a device that one fills, 1.0 is ideal; below it they cost each other something. Beside it
a toy shows what a thread per drafter does instead: two threads of one process call compiled steps
while a third compiles its own. Depending on the release of torch their calls raise, run uncompiled
without a word, or are slow.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from results import device_name, record

ROOT = Path(__file__).parents[1]
Figures = dict[str, tuple[float, str, str]]

# What `dflash-offline train` does before it starts drafters of one shape on GPUs.
PRIME = """
import sys
from stage2_train.config import DrafterRun
from stage2_train.prime import prime

prime(DrafterRun.model_validate_json(sys.argv[1]))
"""

# One drafter's process: warm up, wait for the others, train for a while, say how much.
PROCESS = """
import json, sys, time
import torch
from stage2_train.config import DrafterRun
from stage2_train.compile_cache import use_compile_cache
from stage2_train.data import plan_epoch
from stage2_train.position import Position
from stage2_train.preparation import prepare
from stage2_train.signals import StopSignals
from storage.reader import open_store

run = DrafterRun.model_validate_json(sys.argv[1])
seconds = float(sys.argv[2])
torch.set_num_threads(run.train.torch_threads)
if torch.cuda.is_available():
    use_compile_cache(run)
store = open_store(run.store_dir)
training, position = prepare(run, store)
snapshot = store.snapshot()

def endless():
    epoch = 0
    while True:
        planned = plan_epoch(
            snapshot, seed=run.train.seed, epoch=epoch, batch_tokens=run.train.batch_tokens
        )
        yield from training.steps_of(snapshot, planned, Position(epoch=epoch))
        epoch += 1

steps, position = endless(), Position(step=10)
with StopSignals() as stop:
    for _ in range(6):
        training.step(next(steps), position, steps=10**9, stop=stop)
    training.monitor.take_interval()
    print("ready", flush=True)
    sys.stdin.readline()
    training.monitor.take_interval()
    start_s = time.perf_counter()
    while time.perf_counter() - start_s < seconds:
        training.step(next(steps), position, steps=10**9, stop=stop)
    done = training.monitor.take_interval()
    elapsed_s = time.perf_counter() - start_s
print(json.dumps({"tokens_per_s": done.num_tokens / elapsed_s, **training.evidence.take()}))
"""

# A thread per drafter, as the first system of this kind had it. All but the last are warm: they
# have compiled their step and only call it. The last one, a drafter that has just joined, compiles.
THREADS = """
import json, sys, threading, time
import torch

seconds, num_threads = float(sys.argv[1]), int(sys.argv[2])
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_num_threads(1)

def make_step(width, depth):
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(depth))
    ).to(device)
    x = torch.randn(8, width, device=device)

    def forward():
        return model(x).square().mean(), torch.compiler.is_dynamo_compiling()

    compiled = torch.compile(forward)

    def step():
        loss, is_compiled = compiled()
        loss.backward()
        return is_compiled

    return step

warm = [make_step(32 + 16 * number, 2) for number in range(max(1, num_threads - 1))]
for step in warm:
    step()
counts = [{"steps": 0, "failed": 0, "eager": 0} for _ in warm]
deadline = time.perf_counter() + seconds

def train(step, count):
    while time.perf_counter() < deadline:
        try:
            is_compiled = step()
        except Exception as error:
            count["failed"] += 1
            count["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        else:
            count["steps"] += 1
            count["eager"] += not is_compiled

def join_in():
    width = 128
    while time.perf_counter() < deadline:
        width += 16
        try:
            make_step(width, 12)()
        except Exception as error:
            print(f"the joining thread: {error}", file=sys.stderr)

threads = [threading.Thread(target=train, args=pair) for pair in zip(warm, counts)]
if num_threads > 1:
    threads.append(threading.Thread(target=join_in))
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(counts))
"""


def run_of(arguments: argparse.Namespace, folder: Path, number: int) -> dict[str, Any]:
    """Settings of one drafter's process."""
    return {
        "drafter": {
            "name": f"drafter-{number}",
            "num_layers": {"tiny": 2, "small": 3}[arguments.shape],
            "block_size": 8,
        },
        "train": {
            "seed": number,
            "epochs": 1_000_000,
            "batch_tokens": 2048,
            "num_anchors": arguments.anchors,
            "checkpoint_steps": 10**9,
            "validation_steps": 10**9,
            "log_steps": 10**9,
        },
        "store_dir": str(folder / "store"),
        "drafter_dir": str(folder / f"drafter-{number}"),
    }


def environment_of(folder: Path) -> dict[str, str]:
    """One thread of the CPU; compiled code in a folder that is new."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "DFLASH_OFFLINE_COMPILE_DIR": str(folder / "compile"),
    }


def train_at_once(arguments: argparse.Namespace, folder: Path, count: int) -> list[dict[str, Any]]:
    """Trains so many drafters for the same seconds; gives what each says."""
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                PROCESS,
                json.dumps(run_of(arguments, folder, number)),
                str(arguments.seconds),
            ],
            env=environment_of(folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    for process in processes:
        assert process.stdout is not None, "started with a pipe"
        while (line := process.stdout.readline()) != "ready\n":
            if not line:
                raise SystemExit(f"a drafter ended with exit code {process.wait()}")
    for process in processes:
        assert process.stdin is not None, "started with a pipe"
        process.stdin.write("go\n")
        process.stdin.flush()
    return [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]


def processes_figures(arguments: argparse.Namespace, folder: Path) -> Figures:
    """Aggregate rates of drafters in processes of their own."""
    # Imported here, for the toy needs torch alone and runs on releases that we do not.
    import torch
    from shapes import SHAPES
    from synthetic_store import make_store

    make_store(folder / "store", SHAPES[arguments.shape], [512] * 400, encoding="fp8")
    if torch.cuda.is_available():
        subprocess.run(
            [sys.executable, "-c", PRIME, json.dumps(run_of(arguments, folder, 0))],
            env=environment_of(folder),
            check=True,
        )
    figures: Figures = {}
    solo = 0.0
    for count in map(int, arguments.counts.split(",")):
        found = train_at_once(arguments, folder, count)
        rates = [process["tokens_per_s"] for process in found]
        solo = solo or rates[0]
        executions = ", ".join(sorted({process["execution"] for process in found}))
        figures[f"stage2_interference_{count}_processes_tok_s"] = (
            sum(rates),
            "tokens/s",
            f"{arguments.shape}, {os.cpu_count()} cores; slowest {min(rates):.0f}; {executions}",
        )
        figures[f"stage2_interference_{count}_processes"] = (
            sum(rates) / solo,
            "fraction",
            "all drafters' rate over that of one alone",
        )
        print(f"{count} at once: {sum(rates):.0f} tokens/s", flush=True)
    return figures


def threads_figures(arguments: argparse.Namespace) -> Figures:
    """What a thread per drafter comes to, on a toy."""
    figures: Figures = {}
    for count in (1, 3):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", THREADS, str(arguments.seconds), str(count)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            last = done.stderr.splitlines()[-1] if done.stderr else "no message"
            note = f"died with exit code {done.returncode}: {last[:120]}"
            figures[f"stage2_threads_{count}_failed"] = (1.0, "fraction", note)
            continue
        counts = json.loads(done.stdout.splitlines()[-1])
        steps, failed, eager = (sum(c[k] for c in counts) for k in ("steps", "failed", "eager"))
        errors = sorted({c["error"] for c in counts if "error" in c})
        label = "alone" if count == 1 else f"{count - 1} warm ones while one more compiles"
        figures[f"stage2_threads_{count}_failed"] = (
            failed / max(1, steps + failed),
            "fraction",
            f"toy, {label}: {failed} calls of {steps + failed} raised"
            + (f" ({errors[0]})" if errors else ""),
        )
        figures[f"stage2_threads_{count}_eager"] = (
            eager / max(1, steps),
            "fraction",
            "of the others ran uncompiled, without a word",
        )
        figures[f"stage2_threads_{count}_steps_s"] = (
            steps / arguments.seconds / len(counts),
            "steps/s",
            "a warm thread's",
        )
    return figures


def main() -> None:
    """Runs both and records their figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--counts", default="1,2,3")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--shape", choices=("tiny", "small"), default="tiny")
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument(
        "--threads-only", action="store_true", help="only the toy; needs torch alone"
    )
    parser.add_argument("--no-record", action="store_true")
    arguments = parser.parse_args()
    figures: Figures = {}
    folder = Path(tempfile.mkdtemp(prefix="stage2-interference-"))
    try:
        if not arguments.threads_only:
            figures |= processes_figures(arguments, folder)
    finally:
        shutil.rmtree(folder)
    figures |= threads_figures(arguments)
    record(
        "Drafters beside each other",
        figures,
        device=device_name(),
        packages=("torch", "triton"),
        only_print=arguments.no_record,
    )


if __name__ == "__main__":
    main()
