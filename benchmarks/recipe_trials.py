"""Which training recipe gains acceptance fastest: small drafters side by side on one GPU.

    python benchmarks/recipe_trials.py STORE --trained chat,math --budget-s 90

STORE holds answers of the target in bf16 with `lm_head_input`; those whose ids begin with one of
`--trained` are trained on, the others are judged, one suite for each beginning. All recipes start
from the same weights and see the same sequences in the same order; each falls with its own cosine
to the same last step, as many as fit into the time. A recipe of another block size has as many
block tokens a step. Acceptance is the walk's, at every position at once (`drafter_lanes`).
"""

import argparse
import itertools
import json
import math
import multiprocessing
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import acceptance_data
import numpy as np
import torch
from acceptance_data import BatchSettings, Texts, judged_batches, keep, make_batches, read_states
from acceptance_states import resident_states
from drafter_lanes import BatchShape, Lane, LaneSettings, walked_lengths
from results import device_name, record
from torch import Tensor

from stage2_train.blocks import eligible_anchors, offset_weights
from stage2_train.collate import EncodedLayer, PackedBatch
from stage2_train.config import DrafterConfig, DrafterRun, LossKind, OptimizerConfig, TrainConfig
from stage2_train.device import choose_device, choose_dtype
from stage2_train.drafter import Drafter, initialize
from stage2_train.fast_path import make_fast_path
from stage2_train.optimizer import learning_rate
from stage2_train.preparation import architecture_for
from stage2_train.start_weights import take_start_weights
from stage2_train.step import batch_loss
from stage2_train.target_head import load_target_head
from storage.reader import Snapshot, open_store
from storage.schema import LM_HEAD_INPUT

_STEPS_OF_A_TASK = 50
_MAX_STEPS = 3000


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a drafter is trained by."""

    block_size: int = 16
    kind: LossKind = "cross_entropy"
    gamma: float | None = None
    """Of the decay; None with `pace`."""
    pace: float | None = None
    """D-PACE's smoothing."""
    rate: float = 1.5e-3
    layers: int = 5
    is_from_target: bool = False
    """Whether the layers begin as the target's last ones."""


RECIPES = {
    "decay 7": Recipe(gamma=7.0),
    "pace 0.5": Recipe(pace=0.5),
    "decay 4": Recipe(gamma=4.0),
    "pace 0.5, of target": Recipe(pace=0.5, is_from_target=True),
    "pace 0.5, rate 3e-3": Recipe(pace=0.5, rate=3e-3),
    "pace 0.25": Recipe(pace=0.25),
    "kl, decay 4": Recipe(kind="kl", gamma=4.0),
    "pace 0.5, block 10": Recipe(pace=0.5, block_size=10),
}


class RecipeLane(Lane):
    """A drafter side by side with others, trained by its own recipe."""

    recipe: Recipe
    offset_weight: Tensor

    def use(self, recipe: Recipe) -> None:
        """Trains by this recipe from now on; to be told before anything is recorded."""
        gamma = math.inf if recipe.gamma is None else recipe.gamma
        weights = offset_weights(recipe.block_size, gamma=gamma)
        self.recipe = recipe
        self.offset_weight = torch.from_numpy(weights).to(self.settings.device)

    def batch(self) -> PackedBatch:
        """The lane's batch; rows that count for nothing may stand behind its last token."""
        batch = super().batch()
        last = batch.layers[-1].data
        data = torch.cat([last, last.new_zeros(self.recipe.block_size, last.shape[1])])
        return replace(batch, layers=(*batch.layers[:-1], EncodedLayer(data=data, scales=None)))

    def gradients(self) -> None:
        """Leaves the gradient of the lane's batch in the drafter, its loss in the lane."""
        batch = self.batch()
        counts = (batch.row_weight > 0).float()
        weights = counts * self.offset_weight[batch.row_index % self.recipe.block_size]
        # D-PACE's weights are of a block's length, and divided by the blocks.
        share = weights.sum() if self.recipe.pace is None else counts.sum() / self.recipe.block_size
        result = batch_loss(
            self.drafter,
            replace(batch, row_weight=weights / share),
            head=self.settings.head,
            decoders=self.states.decoders,
            chunk_rows=self.settings.chunk_rows,
            fast_path=self.settings.fast_path,
            kind=self.recipe.kind,
            pace_smoothing=self.recipe.pace,
        )
        result.loss.backward()  # type: ignore[no-untyped-call]
        self._loss.copy_(result.loss.detach())


@dataclass(frozen=True, kw_only=True)
class SuiteTexts(Texts):
    """Texts of which several kinds are trained on; a kind is what stands before an id's number."""

    trained_kinds: tuple[str, ...] = ()

    def of_suite(self, suite: str) -> list[int]:
        """Sequences of one suite, or all that are trained on."""
        if suite == self.trained:
            return [n for n, name in enumerate(self.ids) if _kind(name) in self.trained_kinds]
        return [n for n, name in enumerate(self.ids) if _kind(name) == suite]

    @property
    def suites(self) -> list[str]:
        """What is judged."""
        return sorted({_kind(name) for name in self.ids} - set(self.trained_kinds))


def _kind(name: str) -> str:
    return name.rsplit("-", 1)[0]


def texts_of(snapshot: Snapshot, trained: tuple[str, ...]) -> tuple[SuiteTexts, list[int]]:
    """The sequences of a store, and the index of each in the snapshot."""
    found, order = acceptance_data.read_texts(snapshot, trained="trained", probe=False)
    return SuiteTexts(**vars(found), trained_kinds=trained), order


def judged(lane: Lane, texts: Texts, batches: Tensor, groups: list[list[int]]) -> dict[str, float]:
    """Acceptance length by suite."""
    accepted = torch.zeros(
        (len(batches), lane.settings.shape.num_anchors), dtype=torch.int64, device=batches.device
    )
    _wait(batches.device)
    for each, out in zip(batches, accepted, strict=True):
        lane.judge(each, out)
    _wait(batches.device)
    walks: dict[str, list[float]] = {suite: [] for suite in texts.suites}
    for group, of_blocks in zip(groups, accepted.cpu().numpy(), strict=True):
        start = 0
        for index in group:
            stop = start + len(eligible_anchors(texts.loss_masks[index]))
            walks[_kind(texts.ids[index])].append(
                float(np.mean(walked_lengths(of_blocks[start:stop])))
            )
            start = stop
    return {suite: float(np.mean(lengths)) for suite, lengths in walks.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class Batches:
    """Batches of one shape, made ahead by other processes."""

    def __init__(self, texts: Texts, settings: BatchSettings, *, num_processes: int):
        self.settings = settings
        # Forked before the GPU is touched: they share the texts.
        self._pool = ProcessPoolExecutor(
            num_processes,
            mp_context=multiprocessing.get_context("fork"),
            initializer=keep,
            initargs=(texts, settings),
        )
        self._parts = [
            self._pool.submit(make_batches, 0, first, _STEPS_OF_A_TASK)
            for first in range(0, _MAX_STEPS, _STEPS_OF_A_TASK)
        ]
        self._on_device: tuple[int, Tensor, Tensor] | None = None

    def at(self, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Numbers and weights of a step's batch, on the device; steps come in order."""
        part, place = divmod(step, _STEPS_OF_A_TASK)
        if self._on_device is None or self._on_device[0] != part:
            made = self._parts[part].result()
            _wait(device)
            numbers, weights = torch.from_numpy(made.numbers), torch.from_numpy(made.weights)
            self._on_device = (part, numbers.to(device), weights.to(device))
        return self._on_device[1][place], self._on_device[2][place]

    def close(self) -> None:
        """Ends the processes."""
        for part in self._parts:
            part.cancel()
        self._pool.shutdown()


def settings_of(recipe: Recipe, arguments: argparse.Namespace, mask_token_id: int) -> BatchSettings:
    """Batches of a recipe: as many block tokens whatever the block size."""
    num_anchors = arguments.anchors * 16 // recipe.block_size // 4 * 4
    train = TrainConfig.model_validate(
        {"batch_tokens": arguments.batch_tokens, "num_anchors": num_anchors}
    )
    shape = BatchShape(
        batch_tokens=train.batch_tokens, num_anchors=num_anchors, block_size=recipe.block_size
    )
    return BatchSettings(train=train, shape=shape, mask_token_id=mask_token_id)


def run(arguments: argparse.Namespace) -> None:
    """Trains all recipes side by side and prints what each reached."""
    start_s = time.time()

    def say(text: str) -> None:
        print(f"[{time.time() - start_s:.0f} s] {text}", flush=True)

    store = open_store(arguments.store)
    snapshot = store.snapshot()
    texts, order = texts_of(snapshot, tuple(arguments.trained.split(",")))
    chosen = {name: RECIPES[name] for name in arguments.recipes.split(";")}
    batches: dict[int, Batches] = {}
    for recipe in chosen.values():
        if recipe.block_size not in batches:
            settings = settings_of(recipe, arguments, arguments.mask_token_id)
            batches[recipe.block_size] = Batches(texts, settings, num_processes=3)
    head = load_target_head(store)
    names = [name for name in store.layers if name != LM_HEAD_INPUT]
    names.sort(key=int)
    say(f"{len(texts.ids)} sequences, {int(texts.starts[-1]):,} tokens, judged {texts.suites}")
    host = read_states(snapshot, texts, order, [*names, LM_HEAD_INPUT])
    say("read")
    device = choose_device()
    dtype = choose_dtype(None, device)
    head = head.to(device, dtype)
    states = resident_states("bf16", [each.to(device) for each in host], [])
    del host
    fast_path = make_fast_path(is_compiled=True) if device.type == "cuda" else None
    lanes: dict[str, RecipeLane] = {}
    walks: dict[int, tuple[Tensor, list[list[int]]]] = {}
    for name, recipe in chosen.items():
        if lanes and time.time() - start_s > arguments.ready_s:
            say(f"no time for {name}")
            continue
        drafter = DrafterConfig(
            name="tried",
            mask_token_id=arguments.mask_token_id,
            block_size=recipe.block_size,
            num_layers=recipe.layers,
        )
        architecture = architecture_for(
            DrafterRun(
                drafter=drafter,
                train=TrainConfig(),
                store_dir=arguments.store,
                drafter_dir=Path("unused"),
            ),
            store,
            head,
        )
        settings = batches[recipe.block_size].settings
        lane = RecipeLane(
            LaneSettings(
                architecture=architecture,
                head=head,
                shape=settings.shape,
                optimizer=OptimizerConfig(learning_rate=recipe.rate, weight_decay=0.05),
                chunk_rows=2560,
                device=device,
                dtype=dtype,
                fast_path=fast_path,
            ),
            states,
        )
        lane.use(recipe)
        numbers, weights = batches[recipe.block_size].at(0, device)
        lane._numbers.copy_(numbers)
        lane._weights.copy_(weights)
        lane.record()
        first = Drafter(architecture)
        initialize(first, seed=0)
        take_start_weights(first, "target" if recipe.is_from_target else "fresh", store)
        lane.start({key: weight.detach() for key, weight in first.named_parameters()})
        lanes[name] = lane
        if recipe.block_size not in walks:
            numbers_of_answers, groups = judged_batches(texts, settings)
            walks[recipe.block_size] = (torch.from_numpy(numbers_of_answers).to(device), groups)
        say(f"{name} is ready")
    trained_s, total_steps, alone_ms = train(lanes, batches, arguments, device)
    say(f"{total_steps} steps in {trained_s:.1f} s")
    for each in batches.values():
        each.close()
    rows = []
    for name, lane in lanes.items():
        found = judged(lane, texts, *walks[lane.recipe.block_size])
        rows.append(
            {"recipe": name, "steps": total_steps, "suites": found, "step_ms": alone_ms[name]}
        )
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    record(
        "Recipes side by side",
        figures_of(rows),
        device=device_name(),
        packages=("torch", "triton", "transformers"),
        only_print=arguments.no_record,
    )


def figures_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, str, str]]:
    """The acceptance length of each recipe, over all suites alike."""
    return {
        f"recipe_{re.sub(r'[^a-z0-9.]+', '_', row['recipe'])}_acceptance_length": (
            float(np.mean(list(row["suites"].values()))),
            "tokens",
            ", ".join(f"{suite} {length:.3f}" for suite, length in row["suites"].items())
            + f"; {row['steps']} steps, {row['step_ms']:.1f} ms each when alone",
        )
        for row in rows
    }


def train(
    lanes: Mapping[str, RecipeLane],
    batches: Mapping[int, Batches],
    arguments: argparse.Namespace,
    device: torch.device,
) -> tuple[float, int, dict[str, float]]:
    """Trains all lanes for the time given.

    Returns:
        Seconds, steps of each lane, and milliseconds of each one's step when it runs alone.
    """
    num_tried = 20
    alone_ms: dict[str, float] = {}
    step_of_lane = dict.fromkeys(lanes, 0)

    def step(name: str, total_steps: int) -> None:
        lane, number = lanes[name], step_of_lane[name]
        numbers, weights = batches[lane.recipe.block_size].at(number, device)
        rate = learning_rate(number, total_steps=total_steps, config=lane.settings.optimizer)
        lane.step(numbers, weights, rate)
        step_of_lane[name] += 1

    for name in lanes:
        _wait(device)
        before_s = time.time()
        for _ in range(num_tried):
            step(name, _MAX_STEPS)
        _wait(device)
        alone_ms[name] = 1000 * (time.time() - before_s) / num_tried
    before_s = time.time()
    for _ in range(2 * num_tried):
        for name in lanes:
            step(name, _MAX_STEPS)
    _wait(device)
    round_s = (time.time() - before_s) / (2 * num_tried)
    total_steps = min(_MAX_STEPS, int(arguments.budget_s / round_s) + 3 * num_tried)
    before_s = time.time()
    for _ in itertools.repeat(None, total_steps - 3 * num_tried):
        for name in lanes:
            step(name, total_steps)
    _wait(device)
    return time.time() - before_s, total_steps, alone_ms


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store")
    parser.add_argument("--trained", default="chat,code,math,words")
    parser.add_argument("--recipes", default=";".join(RECIPES), help="names, with ; between them")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--anchors", type=int, default=512, help="of 16 tokens")
    parser.add_argument("--mask-token-id", type=int, default=9)
    parser.add_argument("--budget-s", type=float, default=90.0, help="of training")
    parser.add_argument("--ready-s", type=float, default=100.0, help="recipes ready later are left")
    parser.add_argument("--no-record", action="store_true", help="print only")
    parser.add_argument("--out", type=Path, default=Path("recipes.jsonl"))
    run(parser.parse_args())


if __name__ == "__main__":
    main()
