"""Whether data of uneven lengths ever makes the trainer compile again, and how full batches are.

    python benchmarks/stage2_ragged.py [--steps 2000] [--shape small|tiny|qwen3-8b] [--no-record]

Lengths are log-normal (median 700, capped at 4,096), read from a real store through the real
training, epoch after epoch. After the warm-up a recompilation is an error of the run itself
(`fail_on_recompile`); counted besides are Dynamo's graphs and the new entries of Triton's cache.
Without a GPU the trainer compiles nothing: the figures then say how full batches are.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from results import device_name, record
from shapes import SHAPES
from synthetic_store import make_store

from stage2_train.compile import WARMUP_STEPS, compile_counts
from stage2_train.config import DrafterConfig, DrafterRun, OptimizerConfig, TrainConfig
from stage2_train.data import plan_epoch
from stage2_train.position import Position
from stage2_train.preparation import prepare
from stage2_train.signals import StopSignals
from stage2_train.training import StepBatches, Training
from storage.reader import Store, open_store

MEDIAN_TOKENS, CAP_TOKENS, SIGMA = 700, 4096, 1.0


def ragged_lengths(count: int) -> list[int]:
    """Log-normal lengths, the same every time."""
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN_TOKENS), SIGMA, count)
    return np.clip(drawn.astype(int), 16, CAP_TOKENS).tolist()


def run_of(arguments: argparse.Namespace, scratch: Path) -> DrafterRun:
    """Settings of a training that neither validates nor writes checkpoints."""
    num_layers = SHAPES[arguments.shape].num_layers
    return DrafterRun(
        drafter=DrafterConfig(name="ragged", num_layers=num_layers, block_size=16),
        train=TrainConfig(
            epochs=1_000_000,
            batch_tokens=CAP_TOKENS,
            num_anchors=arguments.anchors,
            fp8=arguments.fp8,
            checkpoint_steps=10**9,
            validation_steps=10**9,
            log_steps=10**9,
            optimizer=OptimizerConfig(learning_rate=1e-5),
        ),
        store_dir=scratch / "store",
        drafter_dir=scratch / "drafter",
    )


def endless_steps(training: Training, store: Store) -> Iterator[StepBatches]:
    """Steps of one epoch after the other, each packed anew."""
    epoch, snapshot = 0, store.snapshot()
    while True:
        planned = plan_epoch(snapshot, seed=0, epoch=epoch, batch_tokens=CAP_TOKENS)
        yield from training.steps_of(snapshot, planned, Position(epoch=epoch))
        epoch += 1


def num_triton_entries() -> int:
    """Kernels that Triton has compiled into this run's own cache."""
    return sum(1 for _ in Path(os.environ["TRITON_CACHE_DIR"]).glob("*"))


def measure(arguments: argparse.Namespace, scratch: Path) -> dict[str, tuple[float, str, str]]:
    """Trains on ragged data; gives the figures by name."""
    run = run_of(arguments, scratch)
    make_store(
        scratch / "store",
        SHAPES[arguments.shape],
        ragged_lengths(arguments.sequences),
        encoding="fp8",
    )
    store = open_store(run.store_dir)
    training, _ = prepare(run, store)
    steps = endless_steps(training, store)
    position = Position(step=10)
    with StopSignals() as stop:
        for _ in range(2 * WARMUP_STEPS):
            training.step(next(steps), position, steps=10**9, stop=stop)
        training.evidence.take()
        training.monitor.take_interval()
        graphs, kernels = compile_counts()["num_compiles"], num_triton_entries()
        start_s = time.perf_counter()
        for _ in range(arguments.steps):
            training.step(next(steps), position, steps=10**9, stop=stop)
        done = training.monitor.take_interval()  # Waits for the device.
        elapsed_s = time.perf_counter() - start_s
    evidence = training.evidence.take()
    training.monitor.close()
    note = f"{arguments.shape}, {arguments.steps} steps over log-normal lengths"
    compiled = f"steps ran {evidence['execution']}"
    return {
        "stage2_ragged_recompiles": (
            compile_counts()["num_compiles"] - graphs,
            "graphs",
            f"{note}; {compiled}",
        ),
        "stage2_ragged_new_kernels": (num_triton_entries() - kernels, "kernels", note),
        "stage2_ragged_fill_fraction": (
            done.num_tokens / done.token_room,
            "fraction",
            "real tokens of the budget",
        ),
        "stage2_ragged_block_fill_fraction": (
            done.num_blocks / done.block_room,
            "fraction",
            "blocks with a label",
        ),
        "stage2_ragged_tok_s": (done.num_tokens / elapsed_s, "tokens/s", "real tokens only"),
    }


def main() -> None:
    """Runs the benchmark and records its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--sequences", type=int, default=1200)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--fp8", action="store_true", help="fp8 products in the step")
    parser.add_argument("--no-record", action="store_true")
    arguments = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="stage2-ragged-"))
    os.environ["TRITON_CACHE_DIR"] = str(scratch / "triton")
    try:
        found = measure(arguments, scratch)
    finally:
        shutil.rmtree(scratch)
    record(
        "Uneven lengths",
        found,
        device=device_name(),
        packages=("torch", "triton"),
        only_print=arguments.no_record,
    )


if __name__ == "__main__":
    main()
