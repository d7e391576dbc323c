"""Texts and batches of the acceptance benchmark: what is trained on, what is judged."""

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from drafter_lanes import BatchShape, FlatBatches, answer_batch, filled_up, flat_batch

from stage2_train.batches import Window, pack
from stage2_train.blocks import Supervision, eligible_anchors, make_blocks, offset_weights
from stage2_train.collate import batch_of
from stage2_train.config import TrainConfig
from storage.order import permutation
from storage.reader import Snapshot

CALIBRATION_TOKENS = 65_536
"""Training tokens from which scales, bases and predictors are taken."""


def write_lines(
    out_path: Path, answers: Path, greedy: Path, *, num_answers: int, num_held_out: int
) -> None:
    """Writes answers kept as arrays (`kind`, `prompt_ids`, ...) as conversation lines.

    The first half of `answers` is greedy, and its second half answers the same prompts. Of the
    prompts `num_held_out`, spread evenly, are held out: of these the greedy answer is written, as
    `<kind>_held_out`, the other is not. Ids are `<kind>-<number>`.
    """
    found = list(_answers(answers))
    num_prompts = len(found) // 2
    held_out = {int(place) for place in np.linspace(0, num_prompts - 1, num_held_out)}
    lines = [(f"{kind}_held_out", *found[n][1:]) for n in sorted(held_out) for kind in found[n][:1]]
    trained = [line for n, line in enumerate(found) if n % num_prompts not in held_out]
    # Spread over the whole file where only some are taken: it is sorted by length.
    chosen = np.linspace(0, len(trained) - 1, min(num_answers, len(trained))).astype(int)
    lines += [trained[number] for number in chosen] + list(_answers(greedy))
    with out_path.open("w", encoding="utf-8") as file:
        for number, (kind, prompt, answer) in enumerate(lines):
            if len(answer) >= 4:
                line = {
                    "id": f"{kind}-{number:05d}",
                    "token_ids": prompt + answer,
                    "loss_mask": [0] * len(prompt) + [1] * len(answer),
                }
                file.write(json.dumps(line) + "\n")


def _answers(path: Path) -> Iterator[tuple[str, list[int], list[int]]]:
    arrays = np.load(path)
    prompts = np.split(arrays["prompt_ids"].astype(int), np.cumsum(arrays["prompt_lengths"])[:-1])
    answers = np.split(arrays["answer_ids"].astype(int), np.cumsum(arrays["answer_lengths"])[:-1])
    for kind, prompt, answer in zip(arrays["kind"], prompts, answers, strict=True):
        yield str(kind), prompt.tolist(), answer.tolist()


@dataclass(frozen=True, kw_only=True)
class Texts:
    """A store's sequences without their states, sorted by id."""

    ids: list[str]
    token_ids: list[np.ndarray]
    loss_masks: list[np.ndarray]
    starts: np.ndarray
    """First row of each sequence among all states, and the end of the last one."""
    trained: str
    """First part of the ids that are trained on."""

    def of_suite(self, suite: str) -> list[int]:
        """Sequences by the first part of their ids."""
        return [n for n, name in enumerate(self.ids) if name.rsplit("-", 1)[0] == suite]

    @property
    def suites(self) -> list[str]:
        """What is judged."""
        return sorted({name.rsplit("-", 1)[0] for name in self.ids} - {self.trained})

    def supervision(self, index: int) -> Supervision:
        """One sequence as blocks are made from it."""
        return Supervision(
            sequence_id=self.ids[index],
            token_ids=self.token_ids[index],
            loss_mask=self.loss_masks[index],
        )

    def state_rows(self, index: int) -> np.ndarray:
        """Where the states of a sequence lie among all."""
        return np.arange(self.starts[index], self.starts[index + 1])


def read_texts(snapshot: Snapshot, *, trained: str, probe: bool) -> tuple[Texts, list[int]]:
    """The sequences of a store, and the index of each in the snapshot."""
    order = sorted(range(snapshot.num_sequences), key=snapshot.sequence_id)
    ids = [snapshot.sequence_id(index) for index in order]
    if probe:
        # A store of random states has one kind of sequence: a tenth of it is judged.
        ids = [f"judged-{n:05d}" if n % 10 == 0 else name for n, name in enumerate(ids)]
    read = [snapshot.read_tokens(index) for index in order]
    token_ids = [tokens.copy() for tokens, _ in read]
    texts = Texts(
        ids=ids,
        token_ids=token_ids,
        loss_masks=[mask.copy() for _, mask in read],
        starts=np.concatenate([[0], np.cumsum([len(tokens) for tokens in token_ids])]),
        trained=trained,
    )
    return texts, order


def read_states(
    snapshot: Snapshot, texts: Texts, order: Sequence[int], layers: Sequence[str]
) -> list[torch.Tensor]:
    """bf16 states of each layer, [tokens, hidden], on the host."""
    shape = (int(texts.starts[-1]), snapshot.store.identity.hidden_size)
    states = {name: np.empty(shape, np.uint16) for name in layers}

    def read(number: int) -> None:
        rows = slice(texts.starts[number], texts.starts[number + 1])
        snapshot.read(
            order[number], layers=layers, out={name: states[name][rows] for name in layers}
        )

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(read, range(len(order))))
    return [torch.from_numpy(states[name].view(np.int16)).view(torch.bfloat16) for name in layers]


def calibration_rows(texts: Texts) -> np.ndarray:
    """Rows of tokens that are trained on, from which encodings are calibrated."""
    trained = texts.of_suite(texts.trained)
    chosen = [
        texts.state_rows(trained[n]) for n in permutation(len(trained), seed=0, epoch=0, stream=0)
    ]
    return np.concatenate(chosen)[:CALIBRATION_TOKENS]


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """What the batches of all seeds share."""

    train: TrainConfig
    shape: BatchShape
    mask_token_id: int


_texts: Texts
_settings: BatchSettings


def keep(texts: Texts, settings: BatchSettings) -> None:
    """Makes a process ready to make batches."""
    global _texts, _settings
    torch.set_num_threads(1)
    _texts, _settings = texts, settings


def windows_of(seed: int, num_steps: int) -> list[tuple[int, list[Window]]]:
    """(epoch, windows) of each step's batch, as the product orders and packs them."""
    batch_tokens = _settings.train.batch_tokens
    trained = _texts.of_suite(_texts.trained)
    found: list[tuple[int, list[Window]]] = []
    epoch = 0
    while len(found) < num_steps:
        windows = (
            Window(
                sequence_index=trained[place],
                start=0,
                stop=min(batch_tokens, len(_texts.token_ids[trained[place]])),
            )
            for place in permutation(len(trained), seed=seed, epoch=epoch, stream=0)
        )
        found += [(epoch, packed) for packed in pack(windows, batch_tokens=batch_tokens)]
        epoch += 1
    return found[:num_steps]


def make_batches(seed: int, first_step: int, num_steps: int) -> FlatBatches:
    """The batches of some steps of a seed."""
    train, shape = _settings.train, _settings.shape
    weights = offset_weights(
        shape.block_size, gamma=train.loss.gamma, min_weight=train.loss.min_weight
    )
    flat = []
    for epoch, windows in windows_of(seed, first_step + num_steps)[first_step:]:
        blocks = make_blocks(
            [_texts.supervision(window.sequence_index) for window in windows],
            num_anchors=shape.num_anchors,
            weight_of_offset=weights,
            seed=seed,
            epoch=epoch,
        )
        num_tokens = sum(window.num_tokens for window in windows)
        positions = np.zeros(shape.batch_tokens, np.int64)
        positions[:num_tokens] = np.concatenate([np.arange(w.stop) for w in windows])
        batch = batch_of(
            blocks,
            layers=(),
            positions=positions,
            num_real_tokens=num_tokens,
            mask_token_id=_settings.mask_token_id,
        )
        rows = [_texts.state_rows(window.sequence_index) for window in windows]
        flat.append(flat_batch(batch, filled_up(rows, shape.batch_tokens), shape))
    return FlatBatches(
        numbers=np.stack([numbers for numbers, _ in flat]),
        weights=np.stack([weights for _, weights in flat]),
    )


def judged_batches(texts: Texts, settings: BatchSettings) -> tuple[np.ndarray, list[list[int]]]:
    """Batches with a block at every position of every judged answer, and the answers of each."""
    groups: list[list[int]] = [[]]
    num_tokens = num_blocks = 0
    shape = settings.shape
    for index in (index for suite in texts.suites for index in texts.of_suite(suite)):
        tokens = len(texts.token_ids[index])
        blocks = len(eligible_anchors(texts.loss_masks[index]))
        if num_tokens + tokens > shape.batch_tokens or num_blocks + blocks > shape.num_anchors:
            groups.append([])
            num_tokens = num_blocks = 0
        groups[-1].append(index)
        num_tokens, num_blocks = num_tokens + tokens, num_blocks + blocks
    numbers = [
        answer_batch(
            [texts.supervision(index) for index in group],
            [texts.state_rows(index) for index in group],
            shape,
            mask_token_id=settings.mask_token_id,
        )
        for group in groups
    ]
    return np.stack(numbers), groups
