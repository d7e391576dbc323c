"""What a log line costs a training step: none written, written behind the next step, waited for.

    python benchmarks/stage2_log_lines.py [--shape qwen3-8b|small|tiny] [--fp8] [--steps 12]
        [--rounds 3] [--no-record]

A drafter trains on uniform sequences through the real steps of a training, with a line for every
step. Lines that are waited for at once, as a line written in the plain way is, make the GPU stop
while the host writes. The three take turns, so that a drifting clock strikes all alike.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import torch
from results import device_name, record
from shapes import SHAPES
from synthetic_store import make_store

from stage2_train.config import DrafterConfig, DrafterRun, OptimizerConfig, TrainConfig
from stage2_train.data import plan_epoch
from stage2_train.position import Position
from stage2_train.preparation import prepare
from stage2_train.signals import StopSignals
from stage2_train.training import StepBatches, Training
from storage.reader import Snapshot, open_store

NEVER = 10**9
LINES = {"none": "no line", "behind": "behind the next step", "waited": "waited for at once"}


def run_of(arguments: argparse.Namespace, scratch: Path) -> DrafterRun:
    """Settings of a training that neither validates nor writes checkpoints."""
    shape = SHAPES[arguments.shape]
    return DrafterRun(
        drafter=DrafterConfig(
            name="lines", num_layers=shape.num_layers, block_size=shape.block_size, mask_token_id=0
        ),
        train=TrainConfig(
            epochs=1_000_000,
            batch_tokens=shape.sequence_tokens,
            num_anchors=arguments.anchors,
            fp8="all" if arguments.fp8 else False,
            checkpoint_steps=NEVER,
            validation_steps=NEVER,
            optimizer=OptimizerConfig(learning_rate=1e-5),
        ),
        store_dir=scratch / "store",
        drafter_dir=scratch / "drafter",
    )


def endless_steps(training: Training, snapshot: Snapshot, tokens: int) -> Iterator[StepBatches]:
    """Steps of one epoch after the other."""
    epoch = 0
    while True:
        planned = plan_epoch(snapshot, seed=0, epoch=epoch, batch_tokens=tokens)
        yield from training.steps_of(snapshot, planned, Position(epoch=epoch))
        epoch += 1


def timed_steps(
    training: Training, steps: Iterator[StepBatches], *, lines: str, count: int
) -> float:
    """Seconds of a step, among some that are not waited for one by one."""
    log_steps = NEVER if lines == "none" else 1
    train = training.run.train.model_copy(update={"log_steps": log_steps})
    training.run = training.run.model_copy(update={"train": train})
    position = Position(step=10)
    with StopSignals() as stop:
        training.monitor.take_interval()
        start_s = time.perf_counter()
        for _ in range(count):
            training.step(next(steps), position, steps=NEVER, stop=stop)
            if lines == "waited":
                training.monitor.flush()
        training.monitor.flush()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return (time.perf_counter() - start_s) / count


def measure(arguments: argparse.Namespace, scratch: Path) -> dict[str, tuple[float, str, str]]:
    """Trains with lines of each kind in turns; gives the figures by name."""
    run = run_of(arguments, scratch)
    shape = SHAPES[arguments.shape]
    make_store(run.store_dir, shape, [shape.sequence_tokens] * arguments.sequences, encoding="fp8")
    store = open_store(run.store_dir)
    training, _ = prepare(run, store)
    steps = endless_steps(training, store.snapshot(), shape.sequence_tokens)
    with training.monitor, closing(training.batches):
        timed_steps(training, steps, lines="behind", count=6)  # Compiles.
        print("warm", flush=True)
        taken: dict[str, list[float]] = {kind: [] for kind in LINES}
        for _ in range(arguments.rounds):
            for kind, seconds in taken.items():
                seconds.append(timed_steps(training, steps, lines=kind, count=arguments.steps))
    median_ms = {kind: statistics.median(seconds) * 1e3 for kind, seconds in taken.items()}
    note = f"{arguments.shape}{', fp8' if arguments.fp8 else ''}, a line every step"
    figures = {
        f"stage2_step_lines_{kind}_ms": (value, "ms", f"a step; {LINES[kind]}; {note}")
        for kind, value in median_ms.items()
    }
    for kind in ("behind", "waited"):
        cost = median_ms[kind] - median_ms["none"]
        figures[f"stage2_line_{kind}_ms"] = (cost, "ms", f"a line costs a step, {LINES[kind]}")
    return figures


def main() -> None:
    """Measures and records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--fp8", action="store_true", help="all products in fp8")
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=40)
    parser.add_argument("--steps", type=int, default=12, help="of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-record", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="log-lines-") as scratch:
        figures = measure(arguments, Path(scratch))
    record(
        "What a log line costs a training step",
        figures,
        device=device_name(),
        packages=("torch", "triton"),
        only_print=arguments.no_record,
    )


if __name__ == "__main__":
    main()
