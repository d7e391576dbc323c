"""What reading costs a small drafter on short sequences: in the trainer's threads, or beside it.

    python benchmarks/stage2_short_sequences.py [--steps 80] [--processes 2,3] [--no-record]

A store of short sequences (120 to 420 tokens, random states of SmolLM2-135M's widths) is written to
memory, and the real training of a five-layer drafter runs on it with 2,048 blocks a step: on
batches that lie on the device already, then from the store, read by threads of the trainer and by
processes of their own (`train.read_processes`). On a GPU the small drafter's update is checked
against the kernels of large ones first. About a minute on an H200, half of it compiling.
"""

import argparse
import itertools
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from results import record
from shapes import Shape
from stage2_loader import timed_steps
from synthetic_store import make_store

from stage2_train import optimizer as optimizers
from stage2_train.config import DrafterConfig, DrafterRun, OptimizerConfig, TrainConfig
from stage2_train.data import in_processes, plan_epoch
from stage2_train.drafter import Drafter, initialize
from stage2_train.optimizer import MasterAdamW
from stage2_train.preparation import prepare
from stage2_train.training import StepBatches, Training
from storage.reader import open_store

SHAPE = Shape(
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49_152,
    num_target_layers=30,
)
SHORTEST_TOKENS, LONGEST_TOKENS = 120, 420
NUM_RESIDENT = 4
_CHECKED_STEPS = 3


def run_of(arguments: argparse.Namespace, store_dir: Path, drafter_dir: Path) -> DrafterRun:
    """Settings of a training that neither validates nor writes checkpoints."""
    return DrafterRun(
        drafter=DrafterConfig(name="short", num_layers=SHAPE.num_layers),
        train=TrainConfig(
            epochs=1_000_000,
            batch_tokens=arguments.tokens,
            num_anchors=arguments.anchors,
            read_processes=0,
            checkpoint_steps=10**9,
            validation_steps=10**9,
            log_steps=10**9,
            optimizer=OptimizerConfig(learning_rate=1e-5),
        ),
        store_dir=store_dir,
        drafter_dir=drafter_dir,
    )


def worst_difference(drafter: Drafter) -> float:
    """How far two ways to update a small drafter on a GPU lie apart, in parts of the updates."""
    ends = []
    for few_weights in (optimizers.FEW_WEIGHTS, 0):
        optimizers.FEW_WEIGHTS, before = few_weights, optimizers.FEW_WEIGHTS
        copy = Drafter(drafter.architecture)
        initialize(copy, seed=0)
        start = [weight.detach().clone() for weight in copy.parameters()]
        update = MasterAdamW(
            copy, OptimizerConfig(weight_decay=0.1), device="cuda", dtype=torch.bfloat16
        )
        optimizers.FEW_WEIGHTS = before
        generator = torch.Generator("cuda").manual_seed(1)
        for step in range(_CHECKED_STEPS):
            for parameter in copy.parameters():
                noise = torch.randn(parameter.shape, generator=generator, device="cuda")
                parameter.grad = noise.bfloat16()
            update.step(1e-3 * (step + 1))
        moved = zip(update.masters, start, strict=True)
        ends.append([master.detach().cpu() - begin for master, begin in moved])
    return max(float((one - other).norm() / one.norm()) for one, other in zip(*ends, strict=True))


def step_times(
    arguments: argparse.Namespace, training: Training, run: DrafterRun
) -> dict[str, tuple[float, float]]:
    """Seconds of a step and the share that the device waited, by where its batches came from."""
    store = open_store(run.store_dir)
    snapshot = store.snapshot()
    planned = plan_epoch(snapshot, seed=0, epoch=0, batch_tokens=arguments.tokens)
    position, threads = arguments.position, training.batches

    def from_store(count: int) -> Iterator[StepBatches]:
        return itertools.islice(training.steps_of(snapshot, planned, position), count)

    resident = [batch for of_step in from_store(NUM_RESIDENT) for batch in of_step.arriving]

    def synthetic(count: int) -> Iterator[StepBatches]:
        for batch in itertools.islice(itertools.cycle(resident), count):
            yield StepBatches(arriving=iter([batch]), num_own=1, num_all=1)

    timed_steps(training, synthetic(6))
    count = min(arguments.steps, len(planned))
    found = {"resident": timed_steps(training, synthetic(count))}
    found["threads"] = timed_steps(training, from_store(count))
    for number in map(int, arguments.processes.split(",")):
        settings = run.train.model_copy(update={"read_processes": number})
        batches = in_processes(threads, run.model_copy(update={"train": settings}), store)
        training.batches = batches
        with closing(batches):
            found[f"processes_{number}"] = timed_steps(training, from_store(count))
        training.batches = threads
    return {name: (done.step_s, done.wait_fraction) for name, done in found.items()}


def main() -> None:
    """Writes the store, times the steps, records the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--anchors", type=int, default=2048)
    parser.add_argument("--sequences", type=int, default=3000)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--processes", default="2,3")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--no-record", action="store_true")
    arguments = parser.parse_args()
    lengths = np.random.default_rng(0).integers(
        SHORTEST_TOKENS, LONGEST_TOKENS, arguments.sequences
    )
    with tempfile.TemporaryDirectory(dir=arguments.scratch, prefix="short-") as scratch:
        store_dir = make_store(
            Path(scratch) / "store", SHAPE, lengths.tolist(), encoding="fp8", num_units=8
        )
        run = run_of(arguments, store_dir, Path(scratch) / "drafter")
        training, arguments.position = prepare(run, open_store(store_dir))
        is_gpu = torch.cuda.is_available()
        if is_gpu:
            difference = worst_difference(training.drafter)
            print(f"update against the kernels of large drafters: off by {difference:.1e}")
            assert difference < 1e-3, "the two ways to update differ"
        with closing(training.monitor):
            times = step_times(arguments, training, run)
    resident_s = times["resident"][0]
    figures = {
        f"stage2_short_{name}_step": (
            step_s * 1e3,
            "ms",
            f"{arguments.anchors} blocks, {arguments.tokens} tokens of sequences of "
            f"{SHORTEST_TOKENS} to {LONGEST_TOKENS}; {resident_s / step_s:.2f} of the rate on "
            f"resident batches; waiting {wait:.1%}",
        )
        for name, (step_s, wait) in times.items()
    }
    record(
        "A small drafter on short sequences",
        figures,
        device=torch.cuda.get_device_name(0) if is_gpu else "CPU",
        packages=("torch", "triton"),
        only_print=arguments.no_record,
    )


if __name__ == "__main__":
    main()
