"""Whether fp8 products train as good a drafter as bf16 ones: loss curve and exact acceptance.

    python benchmarks/fp8_quality.py STORE [--seeds 3] [--steps 900] [--mask-token-id 9]

The store holds a target's own answers, as `encoding_acceptance.py` takes them; it has how drafters
are trained side by side and judged. For each seed four are trained that share batches, anchors and
first weights: with bf16 products, once more from first weights rounded to bf16 (the control, whose
difference is the noise of a pair), and with both forms of `train.fp8`. All are judged with bf16
products, as they are served.

The rule that the default of `train.fp8` follows: a form is as good as bf16 if its mean loss is no
higher, and its mean acceptance length no lower, than bf16's by more than one standard deviation of
bf16's seeds (the control's are among them).
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from acceptance_data import keep, read_states, read_texts
from acceptance_table import CONTROL, mean_ratio
from drafter_lanes import Lane
from encoding_acceptance import (
    Laboratory,
    add_training_arguments,
    make_laboratory,
    settings_of,
    start_batches,
)
from results import device_name, record
from torch import Tensor

from stage2_train.fp8 import freeze_fp8, use_fp8
from stage2_train.target_head import load_target_head
from storage.reader import open_store

FORMS = ("fp8", "fp8_all")
NUM_CURVE_POINTS = 5
# A seed is begun if there is time for so many of the longest one; what is under way has to end.
MARGIN = 1.2
START_S = time.perf_counter()


@dataclass
class CurveLane(Lane):
    """A drafter whose loss is kept at every step, and its products' form."""

    form: str = "bf16"
    curve: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Turns the products into fp8 where that is the form."""
        if self.form in FORMS:
            head = self.settings.head
            head = replace(head, fp8=freeze_fp8(head.lm_head_weight))
            self.settings = replace(self.settings, head=head)
        super().__post_init__()
        if self.form in FORMS:
            use_fp8(self.drafter, weight_gradients=self.form == "fp8_all")

    def start(self, weights: Mapping[str, Tensor]) -> None:
        """Begins anew with these weights."""
        super().start(weights)
        self.curve.clear()

    def step(self, numbers: Tensor, weights: Tensor, rate: float) -> None:
        """One update; does not wait."""
        super().step(numbers, weights, rate)
        with torch.cuda.stream(self._stream):
            self.curve.append(self._loss.clone())


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one drafter came to."""

    variant: str
    seed: int
    losses: list[float]
    """Mean loss of each part of the training, the last one its end."""
    acceptance: dict[str, float]
    """Acceptance length by suite."""


def say(words: str) -> None:
    """Prints how far the run is."""
    print(f"{time.perf_counter() - START_S:5.0f} s | {words}", flush=True)


def run(arguments: argparse.Namespace) -> list[Outcome]:
    """Trains and judges seed after seed until the time is up."""
    store = open_store(arguments.store)
    snapshot = store.snapshot()
    texts, order = read_texts(snapshot, trained=arguments.trained, probe=arguments.probe)
    settings, architecture = settings_of(arguments, store)
    keep(texts, settings)
    say(f"{len(texts.ids)} sequences, {int(texts.starts[-1]):,} tokens, suites {texts.suites}")
    found: list[Outcome] = []
    # First, middle and last layer in each form, with gradients: more than torch expects.
    torch._dynamo.config.recompile_limit = 64
    # Started before the GPU is touched: forked processes share the texts and need no GPU.
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(arguments.processes, mp_context=fork) as pool:
        ahead = {0: start_batches(pool, 0, arguments.steps)}
        layers = [str(layer_id) for layer_id in architecture.target_layer_ids]
        host = read_states(snapshot, texts, order, layers)
        judges = make_laboratory(
            texts,
            settings,
            architecture,
            load_target_head(store),
            host,
            ["bf16", CONTROL],
            say=say,
        )
        del host
        lanes = make_lanes(judges.lanes["bf16"], arguments.forms.split(","))
        laboratory = replace(judges, lanes=lanes)
        longest_s = 0.0
        for seed in range(arguments.seeds):
            left_s = time_left_s(arguments)
            if left_s < MARGIN * longest_s:
                say(f"no time for seed {seed}: {left_s:.0f} s are left, one took {longest_s:.0f}")
                break
            if seed + 1 < arguments.seeds:
                ahead[seed + 1] = start_batches(pool, seed + 1, arguments.steps)
            batches = [future.result() for future in ahead.pop(seed)]
            if laboratory.train(seed, batches, time.time() + left_s) is None:
                say(f"seed {seed}: the time is up")
                break
            found += judge(laboratory, judges, seed)
            longest_s = max(longest_s, left_s - time_left_s(arguments))
        for futures in ahead.values():
            for future in futures:
                future.cancel()
    return found


def time_left_s(arguments: argparse.Namespace) -> float:
    """Seconds until the run has to end."""
    left_s: float = arguments.budget_s - (time.perf_counter() - START_S)
    return left_s


def make_lanes(plain: Lane, forms: Sequence[str]) -> dict[str, Lane]:
    """The drafters to train: like one with bf16 products, each in its form."""
    lanes: dict[str, Lane] = {}
    for variant in ("bf16", CONTROL, *forms):
        lanes[variant] = CurveLane(plain.settings, plain.states, form=variant)
        lanes[variant].record()
        say(f"{variant} is ready to be trained")
    return lanes


def judge(laboratory: Laboratory, judges: Laboratory, seed: int) -> list[Outcome]:
    """Judges the drafters of a seed, which are trained, by bf16 products."""
    judged_by = dict(laboratory.lanes)
    forms = [variant for variant in judged_by if variant in FORMS]
    for variant, lane in zip(forms, judges.lanes.values(), strict=False):
        lane.start(laboratory.lanes[variant].optimizer.weights())
        judged_by[variant] = lane
    suites = replace(laboratory, lanes=judged_by).judge()
    found = []
    for variant, lane in laboratory.lanes.items():
        assert isinstance(lane, CurveLane)
        losses = torch.stack(lane.curve).float().cpu().numpy()
        parts = np.array_split(losses, min(NUM_CURVE_POINTS, len(losses)))
        outcome = Outcome(
            variant=variant,
            seed=seed,
            losses=[float(part.mean()) for part in parts],
            acceptance={suite: of["walk"] for suite, of in suites[variant].items()},
        )
        found.append(outcome)
        curve = " ".join(f"{loss:.3f}" for loss in outcome.losses)
        walked = ", ".join(f"{suite} {value:.3f}" for suite, value in outcome.acceptance.items())
        say(f"seed {seed} {variant}: loss {curve} | {walked}")
    return found


def summarize(found: Sequence[Outcome]) -> dict[str, tuple[float, str, str]]:
    """Gives the figures to record."""
    by_task = {(outcome.variant, outcome.seed): outcome for outcome in found}
    seeds = sorted({outcome.seed for outcome in found})
    figures: dict[str, tuple[float, str, str]] = {}
    for name, unit, better, value_of in (
        ("final_loss", "nats", -1, lambda outcome: outcome.losses[-1]),
        ("acceptance_length", "tokens", 1, lambda o: statistics.fmean(o.acceptance.values())),
    ):
        values = {v: [value_of(by_task[v, s]) for s in seeds] for v, _ in by_task}
        plain = [
            statistics.fmean(pair) for pair in zip(values["bf16"], values[CONTROL], strict=True)
        ]
        every = values["bf16"] + values[CONTROL]
        noise = statistics.stdev(every)
        figures[f"fp8_quality_{name}_bf16"] = (
            statistics.fmean(every),
            unit,
            f"{len(seeds)} seeds, two of each; standard deviation {noise:.4f}",
        )
        for form in [form for form in FORMS if form in values]:
            ratio = mean_ratio(
                [ours / exact for ours, exact in zip(values[form], plain, strict=True)]
            )
            gap = statistics.fmean(values[form]) - statistics.fmean(plain)
            verdict = "as good as bf16" if better * gap >= -noise else "worse than bf16"
            figures[f"fp8_quality_{name}_ratio_{form}"] = (
                ratio.mean,
                "fraction",
                f"over bf16, standard error {ratio.error:.4f}, {len(seeds)} paired seeds; a gap of "
                f"{gap:+.4f}, bf16's standard deviation {noise:.4f}: {verdict}",
            )
    return figures


def main() -> None:
    """Trains, walks, prints, records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--forms", default=",".join(FORMS), help="of fp8 and fp8_all")
    add_training_arguments(parser, num_seeds=3, num_steps=900, budget_s=300.0)
    parser.add_argument("--no-record", action="store_true")
    arguments = parser.parse_args()
    found = run(arguments)
    if not found:
        raise SystemExit("no seed was through in time; give more with --budget-s")
    figures = summarize(found)
    record(
        "fp8 products against bf16 ones",
        figures,
        device=device_name(),
        packages=("torch", "triton"),
        only_print=arguments.no_record,
    )


if __name__ == "__main__":
    main()
