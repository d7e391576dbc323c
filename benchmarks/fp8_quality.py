"""Whether fp8 products train as good a drafter as bf16 ones: loss curve and exact acceptance.

    python benchmarks/fp8_quality.py STORE [--seeds 3] [--steps 450] [--mask-token-id 9]

The store holds a target's own answers, as `encoding_acceptance.py` takes them. For each seed two
drafters are trained that share first weights, batches and anchors, one with bf16 products, one with
fp8 (`train.fp8`: MLP, projections, LM head); all of them at once on one GPU, a process each. Both
are judged with bf16 products, as they are served. fp8 is within seed noise if its loss and its
acceptance length differ from bf16's, seed by seed, by less than seeds differ among themselves.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results import record
from small_drafters import Data, Laboratory, Settings, Task, interval_of, read_data

from stage2_train.config import DrafterConfig, TrainConfig
from stage2_train.decode import LayerDecoder
from stage2_train.drafter import Drafter, initialize
from stage2_train.fp8 import freeze_fp8, use_fp8
from stage2_train.optimizer import MasterAdamW, learning_rate
from stage2_train.step import batch_loss

VARIANTS = ("bf16", "fp8")
NUM_CURVE_POINTS = 5
START_S = time.perf_counter()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one drafter came to."""

    variant: str
    seed: int
    losses: list[float]
    """Mean loss of each part of the training, the last one its end."""
    acceptance: dict[str, float]
    """Acceptance length by suite."""
    steps_per_s: float


def say(task: Task, words: str) -> None:
    """Prints how far a drafter is."""
    print(
        f"{time.perf_counter() - START_S:5.0f} s | {task.encoding} seed {task.seed}: {words}",
        flush=True,
    )


def train(
    laboratory: Laboratory, states: torch.Tensor, task: Task, *, steps: int
) -> tuple[Drafter, torch.Tensor]:
    """Trains one drafter with bf16 or fp8 products; gives it and the loss of each step."""
    config, device = laboratory.settings.train, laboratory.device
    drafter = Drafter(laboratory.architecture)
    initialize(drafter, seed=task.seed)
    optimizer = MasterAdamW(drafter, config.optimizer, device=device, dtype=laboratory.dtype)
    head = laboratory.head
    if task.encoding == "fp8":
        use_fp8(drafter)
        head = replace(head, fp8=freeze_fp8(head.lm_head_weight))
    decoders = [LayerDecoder(encoding="bf16")] * len(laboratory.data.layers)
    losses = []
    for step, batch in zip(range(steps), laboratory.batches(task.seed), strict=False):
        result = batch_loss(
            drafter,
            laboratory.with_states(batch, states),
            head=head,
            decoders=decoders,
            chunk_rows=config.loss.chunk_rows,
            fast_path=laboratory.fast_path,
        )
        result.loss.backward()
        optimizer.step(learning_rate(step, total_steps=steps, config=config.optimizer))
        losses.append(result.loss.detach())
        if (step + 1) % max(1, steps // NUM_CURVE_POINTS) == 0:
            say(task, f"step {step + 1}/{steps}, loss {float(losses[-1]):.3f}")
    return drafter, torch.stack(losses).float().cpu()


def outcome_of(laboratory: Laboratory, states: torch.Tensor, task: Task) -> Outcome:
    """Trains one drafter whole and walks the suites with it."""
    steps = laboratory.settings.train.max_steps or 1
    start_s = time.perf_counter()
    drafter, losses = train(laboratory, states, task, steps=steps)
    steps_per_s = steps / (time.perf_counter() - start_s)
    parts = np.array_split(losses.numpy(), min(NUM_CURVE_POINTS, steps))
    return Outcome(
        variant=task.encoding,
        seed=task.seed,
        losses=[float(part.mean()) for part in parts],
        acceptance=laboratory.walk(with_bf16_products(laboratory, drafter), states),
        steps_per_s=steps_per_s,
    )


def with_bf16_products(laboratory: Laboratory, drafter: Drafter) -> Drafter:
    """The same weights in a drafter that multiplies as a served one does."""
    plain = Drafter(laboratory.architecture).to(laboratory.device, laboratory.dtype)
    plain.load_state_dict(drafter.state_dict())
    return plain.eval()


def run_process(
    data: Data, settings: Settings, task: Task, compiled: Event, outcomes: "Queue[Any]"
) -> None:
    """One drafter in a process of its own; the first of each variant compiles for the others."""
    torch.set_num_threads(1)
    try:
        if task.seed > 0:
            compiled.wait(90)
        laboratory = Laboratory(data, settings)
        states = laboratory.encoded_states("bf16")
        if task.seed == 0 and laboratory.fast_path is not None:
            train(laboratory, states, task, steps=2)
            say(task, "compiled")
        compiled.set()
        outcomes.put(outcome_of(laboratory, states, task))
    except BaseException as error:
        outcomes.put(f"{task.encoding} seed {task.seed}: {error!r}")
        raise
    finally:
        compiled.set()


def run_all(data: Data, settings: Settings, tasks: list[Task]) -> list[Outcome]:
    """Trains all drafters at once.

    Raises:
        SystemExit: one failed.
    """
    context = multiprocessing.get_context("spawn")
    compiled = {variant: context.Event() for variant in VARIANTS}
    outcomes: Queue[Any] = context.Queue()
    processes = [
        context.Process(
            target=run_process, args=(data, settings, task, compiled[task.encoding], outcomes)
        )
        for task in tasks
    ]
    for process in processes:
        process.start()
    found = [outcomes.get() for _ in tasks]
    for process in processes:
        process.join()
    failures = [outcome for outcome in found if isinstance(outcome, str)]
    if failures:
        raise SystemExit("; ".join(failures))
    return found


def summarize(found: list[Outcome]) -> dict[str, tuple[float, str, str]]:
    """Prints the table; gives the figures to record."""
    by_task = {(outcome.variant, outcome.seed): outcome for outcome in found}
    seeds = sorted({outcome.seed for outcome in found})
    for key in sorted(by_task):
        outcome = by_task[key]
        curve = " ".join(f"{loss:.3f}" for loss in outcome.losses)
        suites = ", ".join(f"{name} {value:.3f}" for name, value in outcome.acceptance.items())
        print(
            f"{key[0]} seed {key[1]}: loss {curve} | {suites} | {outcome.steps_per_s:.1f} steps/s"
        )
    figures: dict[str, tuple[float, str, str]] = {}
    for name, unit, value_of in (
        ("final_loss", "nats", lambda outcome: outcome.losses[-1]),
        ("acceptance_length", "tokens", lambda o: statistics.fmean(o.acceptance.values())),
    ):
        values = {v: [value_of(by_task[v, s]) for s in seeds] for v in VARIANTS}
        ratio, low, high = interval_of(
            [ours / plain for ours, plain in zip(values["fp8"], values["bf16"], strict=True)]
        )
        noise = statistics.stdev(values["bf16"]) if len(seeds) > 1 else float("nan")
        gap = statistics.fmean(values["fp8"]) - statistics.fmean(values["bf16"])
        verdict = "within" if abs(gap) <= noise else "outside"
        figures[f"fp8_quality_{name}_bf16"] = (
            statistics.fmean(values["bf16"]),
            unit,
            f"{len(seeds)} seeds, standard deviation {noise:.4f}",
        )
        figures[f"fp8_quality_{name}_ratio"] = (
            ratio,
            "fraction",
            f"fp8 over bf16, {low:.4f} to {high:.4f} (95%, {len(seeds)} paired seeds); "
            f"the gap {gap:+.4f} is {verdict} one standard deviation of bf16's seeds",
        )
    return figures


def main() -> None:
    """Trains, walks, prints, records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("store", help="a store in bf16")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--mask-token-id", type=int)
    parser.add_argument("--trained", default="math", help="first part of the ids to train on")
    parser.add_argument("--no-record", action="store_true")
    arguments = parser.parse_args()
    settings = Settings(
        train=TrainConfig.model_validate(
            {
                "max_steps": arguments.steps,
                "batch_tokens": arguments.batch_tokens,
                "num_anchors": arguments.anchors,
                "optimizer": {"learning_rate": arguments.learning_rate},
            }
        ),
        drafter=DrafterConfig(name="judged", mask_token_id=arguments.mask_token_id),
        trained=arguments.trained,
        deadline_s=float("inf"),
    )
    # The first of each variant first: the others wait for what it compiles.
    tasks = [Task(encoding=v, seed=s) for s in range(arguments.seeds) for v in VARIANTS]
    with tempfile.TemporaryDirectory() as folder:
        data = read_data(arguments.store, Path(folder, "states"))
        print(f"{len(data.ids)} sequences, {int(data.starts[-1]):,} tokens", flush=True)
        found = run_all(data, settings, tasks)
    figures = summarize(found)
    if arguments.no_record:
        for name, (value, unit, note) in figures.items():
            print(f"{name:<40} {value:>8.4g} {unit:<9} {note}")
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    record("fp8 products against bf16 ones", figures, device=device, packages=("torch", "triton"))


if __name__ == "__main__":
    main()
