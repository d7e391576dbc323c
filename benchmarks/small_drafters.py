"""Drafters of a small target, trained and judged one in a process: data, batches, walk.

The store holds a target's own answers in bf16; ids are `<suite>-<number>`, one suite is trained on
and the others are judged by the walk. States lie in a file that all processes map.
"""

import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from encoding_round_trips import ROUND_TRIPS, RoundTrip

from stage2_train.batches import Window, pack
from stage2_train.blocks import Supervision, make_blocks, offset_weights
from stage2_train.collate import EncodedLayer, PackedBatch, batch_of
from stage2_train.config import DrafterConfig, DrafterRun, TrainConfig
from stage2_train.decode import LayerDecoder
from stage2_train.device import choose_device, choose_dtype
from stage2_train.drafter import Drafter, initialize
from stage2_train.fast_path import FastPath, make_fast_path
from stage2_train.optimizer import MasterAdamW, learning_rate
from stage2_train.preparation import architecture_for
from stage2_train.step import batch_loss
from stage2_train.target_head import TargetHead, load_target_head
from stage2_train.walk import WalkSequence, supervised_runs, walk
from storage.order import permutation
from storage.reader import open_store

CALIBRATION_TOKENS = 65_536
"""Training tokens from which scales, bases and predictors are taken."""

_ROUND_TRIP_TOKENS = 16_384
_T_QUANTILE = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306}
"""97.5% quantile of Student's t by degrees of freedom."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """A store's sequences in memory; states lie in a file that all processes map."""

    store_dir: str
    states_path: str
    layers: tuple[str, ...]
    hidden_size: int
    ids: list[str]
    token_ids: list[np.ndarray]
    loss_masks: list[np.ndarray]

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """First row of each sequence among all states, and the end of the last one."""
        return np.concatenate([[0], np.cumsum([len(tokens) for tokens in self.token_ids])])

    def suites(self, trained: str) -> dict[str, list[int]]:
        """Sequences by suite, the first part of their ids; that which is trained is left out."""
        found: dict[str, list[int]] = {}
        for index, name in enumerate(self.ids):
            found.setdefault(name.split("-")[0], []).append(index)
        found.pop(trained, None)
        return found

    def states(self) -> torch.Tensor:
        """bf16 [tokens, layers * hidden], mapped from the file."""
        shape = (int(self.starts[-1]), len(self.layers) * self.hidden_size)
        bits = np.memmap(self.states_path, dtype=np.int16, mode="c", shape=shape)
        return torch.from_numpy(bits).view(torch.bfloat16)


def read_data(store_dir: str, states_path: Path) -> Data:
    """Reads a bf16 store whole; its states go into a file, sequence after sequence."""
    store = open_store(store_dir)
    snapshot = store.snapshot()
    layers = tuple(name for name, layer in store.layers.items() if layer.encoding == "bf16")
    if not layers or not snapshot.num_sequences:
        raise SystemExit(f"{store_dir}: expected a filled store in bf16")
    ids, token_ids, loss_masks = [], [], []
    with states_path.open("wb") as file:
        for index in sorted(range(snapshot.num_sequences), key=snapshot.sequence_id):
            sequence = snapshot.read(index, layers=layers)
            ids.append(sequence.sequence_id)
            token_ids.append(sequence.token_ids.copy())
            loss_masks.append(sequence.loss_mask.copy())
            np.concatenate([sequence.states[name].data for name in layers], axis=1).tofile(file)
    return Data(
        store_dir=store_dir,
        states_path=str(states_path),
        layers=layers,
        hidden_size=store.identity.hidden_size,
        ids=ids,
        token_ids=token_ids,
        loss_masks=loss_masks,
    )


# --- one drafter --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Task:
    """One drafter: which encoding, which seed."""

    encoding: str
    seed: int


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all drafters share."""

    train: TrainConfig
    drafter: DrafterConfig
    trained: str
    """First part of the ids that are trained on."""
    deadline_s: float
    """Time of `time.time` at which unfinished drafters are given up."""


class Laboratory:
    """What a process keeps between drafters: data, head, compiled functions."""

    def __init__(self, data: Data, settings: Settings):
        self.data, self.settings = data, settings
        self.device = choose_device()
        self.dtype = choose_dtype(settings.train.dtype, self.device)
        store = open_store(data.store_dir)
        head = load_target_head(store)
        run = DrafterRun(
            drafter=settings.drafter,
            train=settings.train,
            store_dir=data.store_dir,
            drafter_dir=Path("unused"),
        )
        self.architecture = architecture_for(run, store, head)
        self.head: TargetHead = head.to(self.device, self.dtype)
        self.fast_path: FastPath | None = None
        if self.device.type == "cuda":
            self.fast_path = make_fast_path(is_compiled=True)
        self.weight_of_offset = offset_weights(
            self.architecture.block_size,
            gamma=settings.train.loss.gamma,
            min_weight=settings.train.loss.min_weight,
        )

    def encoded_states(self, encoding: str) -> torch.Tensor:
        """All states, encoded and decoded, [tokens + 1, layers * hidden]; the last row is zero."""
        raw = self.data.states()
        states = torch.zeros(len(raw) + 1, raw.shape[1], dtype=torch.bfloat16, device=self.device)
        round_trip = self._calibrated(encoding, raw)
        for start in range(0, len(raw), _ROUND_TRIP_TOKENS):
            rows = raw[start : start + _ROUND_TRIP_TOKENS].to(self.device)
            decoded = round_trip(self._by_layer(rows))
            for layer, values in enumerate(decoded):
                out = states[start : start + len(rows)]
                out[:, layer * self.data.hidden_size : (layer + 1) * self.data.hidden_size] = values
        return states

    def _by_layer(self, rows: torch.Tensor) -> list[torch.Tensor]:
        return [part.float() for part in rows.split(self.data.hidden_size, dim=1)]

    def _calibrated(self, encoding: str, raw: torch.Tensor) -> RoundTrip:
        """The round trip of an encoding, calibrated on sequences that are trained on."""
        chosen: list[torch.Tensor] = []
        order = permutation(len(self.data.ids), seed=0, epoch=0, stream=0)
        for index in order:
            if sum(map(len, chosen)) >= CALIBRATION_TOKENS:
                break
            if self.data.ids[index].startswith(self.settings.trained):
                chosen.append(raw[self.data.starts[index] : self.data.starts[index + 1]])
        samples = torch.cat(chosen)[:CALIBRATION_TOKENS].to(self.device)
        return ROUND_TRIPS[encoding](self._by_layer(samples))

    def batches(self, seed: int) -> Iterator[PackedBatch]:
        """Batches of all epochs, on the host, without states: row numbers stand in `layers`."""
        train = self.settings.train
        trained = [i for i, name in enumerate(self.data.ids) if self._is_trained(name)]
        for epoch in range(1_000_000):
            order = permutation(len(trained), seed=seed, epoch=epoch, stream=0)
            windows = (
                Window(
                    sequence_index=trained[place],
                    start=0,
                    stop=min(train.batch_tokens, len(self.data.token_ids[trained[place]])),
                )
                for place in order
            )
            for packed in pack(windows, batch_tokens=train.batch_tokens):
                yield self._batch(packed, seed=seed, epoch=epoch)

    def _is_trained(self, sequence_id: str) -> bool:
        return sequence_id.split("-")[0] == self.settings.trained

    def _batch(self, windows: Sequence[Window], *, seed: int, epoch: int) -> PackedBatch:
        train = self.settings.train
        blocks = make_blocks(
            [
                Supervision(
                    sequence_id=self.data.ids[w.sequence_index],
                    token_ids=self.data.token_ids[w.sequence_index][: w.stop],
                    loss_mask=self.data.loss_masks[w.sequence_index][: w.stop],
                )
                for w in windows
            ],
            num_anchors=train.num_anchors,
            weight_of_offset=self.weight_of_offset,
            seed=seed,
            epoch=epoch,
        )
        positions = np.zeros(train.batch_tokens, np.int64)
        rows = np.full(train.batch_tokens, self.data.starts[-1], np.int64)
        num_real_tokens = sum(window.num_tokens for window in windows)
        positions[:num_real_tokens] = np.concatenate([np.arange(w.stop) for w in windows])
        rows[:num_real_tokens] = np.concatenate(
            [self.data.starts[w.sequence_index] + np.arange(w.stop) for w in windows]
        )
        return batch_of(
            blocks,
            layers=(EncodedLayer(data=torch.from_numpy(rows), scales=None),),
            positions=positions,
            num_real_tokens=num_real_tokens,
            mask_token_id=self.architecture.mask_token_id,
        )

    def with_states(self, batch: PackedBatch, states: torch.Tensor) -> PackedBatch:
        """The batch on the device, its rows replaced by their states."""
        if self.device.type == "cuda":
            batch = batch.pinned()
        batch = batch.to(self.device)
        features = states[batch.layers[0].data]
        parts = features.split(self.data.hidden_size, dim=1)
        return replace(batch, layers=tuple(EncodedLayer(data=p, scales=None) for p in parts))

    def train(self, task: Task, states: torch.Tensor, steps: int) -> Drafter | None:
        """Trains one drafter; None when the time is up."""
        train = self.settings.train
        drafter = Drafter(self.architecture)
        initialize(drafter, seed=task.seed)
        optimizer = MasterAdamW(drafter, train.optimizer, device=self.device, dtype=self.dtype)
        decoders = [LayerDecoder(encoding="bf16")] * len(self.data.layers)
        for step, batch in zip(range(steps), self.batches(task.seed), strict=False):
            if time.time() > self.settings.deadline_s:
                return None
            result = batch_loss(
                drafter,
                self.with_states(batch, states),
                head=self.head,
                decoders=decoders,
                chunk_rows=train.loss.chunk_rows,
                fast_path=self.fast_path,
            )
            result.loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step(learning_rate(step, total_steps=steps, config=train.optimizer))
        return drafter

    def walk(self, drafter: Drafter, states: torch.Tensor) -> dict[str, float]:
        """Acceptance length by suite."""
        return {
            suite: walk(
                drafter, self.head, [self._answer(i, states) for i in indices], batch_tokens=65_536
            ).acceptance_length
            for suite, indices in self.data.suites(self.settings.trained).items()
        }

    def _answer(self, index: int, states: torch.Tensor) -> WalkSequence:
        (start, stop), *_ = supervised_runs(self.data.loss_masks[index])
        first = self.data.starts[index]
        return WalkSequence(
            token_ids=self.data.token_ids[index][:stop].tolist(),
            answer_start=start,
            states=states[first : first + stop].to(self.dtype),
        )


def interval_of(ratios: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) of ratios, by the t interval of their logarithms."""
    logs = np.log(ratios)
    mean = float(logs.mean())
    if len(logs) < 2:
        return float(np.exp(mean)), 0.0, float("inf")
    quantile = _T_QUANTILE.get(len(logs) - 1, 2.1)
    half = quantile * float(logs.std(ddof=1)) / len(logs) ** 0.5
    return float(np.exp(mean)), float(np.exp(mean - half)), float(np.exp(mean + half))
