"""What an encoding costs in acceptance length: drafters trained and judged on encoded states.

    python benchmarks/encoding_acceptance.py lines OUT.jsonl ANSWERS.npz GREEDY.npz
    dflash-offline extract RUN.toml     (store.encoding = "bf16", data.conversations = OUT.jsonl)
    python benchmarks/encoding_acceptance.py train STORE --out A.jsonl
    python benchmarks/encoding_acceptance.py table A.jsonl B.jsonl

The answers are the target's own; those judged are greedy, and neither they nor another answer to
the same prompt is trained on. One drafter is trained per encoding and seed. Drafters of one seed
share their first weights, batches and anchors, and differ in nothing but the states: encoded and
decoded by the product's code, in training as in judging. `bf16_again` is bf16 once more from first
weights rounded to bf16: what it differs by is the noise of a pair. A ratio is that of one seed's
pair; the table gives their geometric mean and its standard error.

All drafters of a seed are trained side by side on one GPU (`drafter_lanes`); a line is written for
each as soon as a seed is through, so that a run cut off loses the open seed only. Encodings joined
by dots, such as int2.int2.int2.int4.int4, are one for each layer.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from acceptance_table import CONTROL, Outcomes, print_table
from drafter_lanes import (
    BatchShape,
    FlatBatches,
    Lane,
    LaneSettings,
    ResidentStates,
    answer_batch,
    filled_up,
    flat_batch,
    walked_lengths,
)
from encoding_round_trips import ROUND_TRIPS, check_round_trips
from results import record

from stage1_extract.encode import channel_scales_on, encode_on_device, encode_on_host
from stage2_train.batches import Window, pack
from stage2_train.blocks import Supervision, eligible_anchors, make_blocks, offset_weights
from stage2_train.collate import EncodedLayer, batch_of
from stage2_train.config import DrafterConfig, DrafterRun, TrainConfig
from stage2_train.decode import LayerDecoder, layer_decoders
from stage2_train.device import choose_device, choose_dtype
from stage2_train.drafter import Drafter, initialize
from stage2_train.fast_path import make_fast_path
from stage2_train.optimizer import learning_rate
from stage2_train.preparation import architecture_for
from stage2_train.target_head import load_target_head
from storage.encodings import ENCODINGS, calibrate_channels
from storage.order import permutation
from storage.reader import Snapshot, open_store
from storage.schema import LayerRecord

CALIBRATION_TOKENS = 65_536
"""Training tokens from which scales, bases and predictors are taken."""
SCALE_TOKENS = 16_384
"""Those of them from which channel scales are taken."""
DEFAULT_ENCODINGS = "bf16,bf16_again,fp8,int8,int4,int3,int2,klt2p"

_ENCODED_TOKENS = 32_768
_STEPS_OF_A_TASK = 50


# --- data ---------------------------------------------------------------------------------------


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


# --- states in an encoding ----------------------------------------------------------------------


def resident_states(
    encoding: str, states: Sequence[torch.Tensor], samples: Sequence[torch.Tensor]
) -> ResidentStates:
    """Encodes all states by the product's code; candidates are kept decoded, in bf16.

    Args:
        encoding: one name for all layers, or one for each, joined by dots.
        states: bf16 [tokens, hidden] of each layer, on the device.
        samples: tokens of each layer to calibrate on.
    """
    if encoding in ("bf16", CONTROL):
        layers = [_with_zero_row(each) for each in states]
    elif encoding.split(".")[0] in ENCODINGS:
        names = encoding.split(".")
        return _encoded(names * len(states) if len(names) == 1 else names, states, samples)
    else:
        layers = _decoded(encoding, states, samples)
    return ResidentStates(
        layers=[EncodedLayer(data=each, scales=None) for each in layers],
        decoders=[LayerDecoder(encoding="bf16")] * len(states),
    )


def _with_zero_row(part: torch.Tensor) -> torch.Tensor:
    return torch.cat([part, part.new_zeros(1, *part.shape[1:])])


def _encoded(
    names: Sequence[str], states: Sequence[torch.Tensor], samples: Sequence[torch.Tensor]
) -> ResidentStates:
    hidden_size, device = states[0].shape[1], states[0].device
    records = {}
    for number, name in enumerate(names):
        scales = None
        if ENCODINGS[name].calibrated:
            few = samples[number][:SCALE_TOKENS].float().cpu().numpy()
            scales = tuple(calibrate_channels(few).tolist())
        records[str(number)] = LayerRecord(
            name=str(number), encoding=name, hidden_size=hidden_size, channel_scales=scales
        )
    channels = channel_scales_on(device, records, list(records))
    pieces: dict[str, list[EncodedLayer]] = {name: [] for name in records}
    for start in range(0, len(states[0]), _ENCODED_TOKENS):
        part = {str(n): s[start : start + _ENCODED_TOKENS] for n, s in enumerate(states)}
        if device.type == "cuda":
            buffers = encode_on_device(part, records, channels)
            for name, found in pieces.items():
                scales_of = buffers.scales[name].clone()
                found.append(EncodedLayer(data=buffers.data[name].clone(), scales=scales_of))
        else:
            for name, encoded in encode_on_host(part, records).encoded.items():
                assert encoded.scales is not None
                data, scales_of = torch.from_numpy(encoded.data), torch.from_numpy(encoded.scales)
                pieces[name].append(EncodedLayer(data=data, scales=scales_of))
    layers = [
        EncodedLayer(
            data=_with_zero_row(torch.cat([_as_bytes(each.data) for each in found])),
            scales=_with_zero_row(
                torch.cat([each.scales for each in found if each.scales is not None])
            ),
        )
        for found in pieces.values()
    ]
    return ResidentStates(layers=layers, decoders=layer_decoders(records, list(records), device))


def _as_bytes(codes: torch.Tensor) -> torch.Tensor:
    # Not every operation knows fp8 numbers; decoding takes their bits.
    return codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes


def _decoded(
    encoding: str, states: Sequence[torch.Tensor], samples: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    round_trip = ROUND_TRIPS[encoding]([each.float() for each in samples])
    decoded = [each.new_zeros(len(each) + 1, each.shape[1]) for each in states]
    for start in range(0, len(states[0]), _ENCODED_TOKENS):
        rows = slice(start, start + _ENCODED_TOKENS)
        found = round_trip([each[rows].float() for each in states])
        for values, out in zip(found, decoded, strict=True):
            out[start : start + len(values)] = values
    return decoded


def calibration_rows(texts: Texts) -> np.ndarray:
    """Rows of tokens that are trained on, from which encodings are calibrated."""
    trained = texts.of_suite(texts.trained)
    chosen = [
        texts.state_rows(trained[n]) for n in permutation(len(trained), seed=0, epoch=0, stream=0)
    ]
    return np.concatenate(chosen)[:CALIBRATION_TOKENS]


# --- batches ------------------------------------------------------------------------------------


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


# --- training -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Laboratory:
    """All drafters of a seed side by side, with what they are judged on."""

    texts: Texts
    settings: BatchSettings
    lanes: dict[str, Lane]
    judged: torch.Tensor
    """Numbers of the answers' batches, on the device."""
    groups: list[list[int]]

    def train(
        self, seed: int, batches: Sequence[FlatBatches], deadline_s: float
    ) -> dict[str, float] | None:
        """Trains all drafters; gives the losses of the last step, None when the time is up."""
        lanes = list(self.lanes.values())
        device = lanes[0].settings.device
        first = Drafter(lanes[0].settings.architecture)
        initialize(first, seed=seed)
        for name, lane in self.lanes.items():
            weights = {key: value.detach() for key, value in first.named_parameters()}
            if name == CONTROL:
                weights = {key: value.bfloat16().float() for key, value in weights.items()}
            lane.start(weights)
        train, step = self.settings.train, 0
        total_steps = train.max_steps or 1
        for part in batches:
            numbers = torch.from_numpy(part.numbers).to(device)
            weights_of_rows = torch.from_numpy(part.weights).to(device)
            _wait(device)
            if time.time() > deadline_s:
                return None
            for each, row_weights in zip(numbers, weights_of_rows, strict=True):
                rate = learning_rate(step, total_steps=total_steps, config=train.optimizer)
                for lane in lanes:
                    lane.step(each, row_weights, rate)
                step += 1
        return {name: lane.loss() for name, lane in self.lanes.items()}

    def judge(self) -> dict[str, dict[str, dict[str, float]]]:
        """By drafter and suite: the walk's acceptance length, and the mean over all positions."""
        num_anchors = self.settings.shape.num_anchors
        accepted = {
            name: torch.zeros(
                (len(self.judged), num_anchors), dtype=torch.int64, device=self.judged.device
            )
            for name in self.lanes
        }
        _wait(self.judged.device)
        for number, each in enumerate(self.judged):
            for name, lane in self.lanes.items():
                lane.judge(each, accepted[name][number])
        _wait(self.judged.device)
        return {name: self._suites(found.cpu().numpy()) for name, found in accepted.items()}

    def _suites(self, accepted: np.ndarray) -> dict[str, dict[str, float]]:
        walks: dict[str, list[float]] = {suite: [] for suite in self.texts.suites}
        everywhere: dict[str, list[float]] = {suite: [] for suite in self.texts.suites}
        for group, of_blocks in zip(self.groups, accepted, strict=True):
            start = 0
            for index in group:
                suite = self.texts.ids[index].rsplit("-", 1)[0]
                stop = start + len(eligible_anchors(self.texts.loss_masks[index]))
                walks[suite].append(float(np.mean(walked_lengths(of_blocks[start:stop]))))
                everywhere[suite].append(float(of_blocks[start:stop].mean()) + 1)
                start = stop
        return {
            suite: {"walk": float(np.mean(walks[suite])), "all": float(np.mean(everywhere[suite]))}
            for suite in walks
        }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def run(arguments: argparse.Namespace) -> None:
    """Trains and judges seed after seed until the time is up."""
    start_s = time.time()
    deadline_s = start_s + arguments.budget_s
    check_round_trips()
    say = _speaker(start_s)
    store = open_store(arguments.store)
    snapshot = store.snapshot()
    texts, order = read_texts(snapshot, trained=arguments.trained, probe=arguments.probe)
    train = TrainConfig.model_validate(
        {
            "max_steps": arguments.steps,
            "batch_tokens": arguments.batch_tokens,
            "num_anchors": arguments.anchors,
            "optimizer": {"learning_rate": arguments.learning_rate},
        }
    )
    drafter = DrafterConfig(
        name="judged", mask_token_id=arguments.mask_token_id, block_size=arguments.block_size
    )
    head = load_target_head(store)
    architecture = architecture_for(
        DrafterRun(drafter=drafter, train=train, store_dir=arguments.store, drafter_dir="unused"),
        store,
        head,
    )
    settings = BatchSettings(
        train=train,
        shape=BatchShape(
            batch_tokens=train.batch_tokens,
            num_anchors=train.num_anchors,
            block_size=architecture.block_size,
        ),
        mask_token_id=architecture.mask_token_id,
    )
    keep(texts, settings)
    seeds = [arguments.first_seed + n * arguments.seed_step for n in range(arguments.seeds)]
    say(f"{len(texts.ids)} sequences, {int(texts.starts[-1]):,} tokens, suites {texts.suites}")
    # Started before the GPU is touched: forked processes share the texts and need no GPU.
    with ProcessPoolExecutor(
        arguments.processes, mp_context=multiprocessing.get_context("fork")
    ) as pool:
        ahead = [start_batches(pool, seed, arguments.steps) for seed in seeds[:1]]
        layers = [str(layer_id) for layer_id in architecture.target_layer_ids]
        host = read_states(snapshot, texts, order, layers)
        say("read")
        device = choose_device()
        lane_settings = LaneSettings(
            architecture=architecture,
            head=head.to(device, choose_dtype(train.dtype, device)),
            shape=settings.shape,
            optimizer=train.optimizer,
            chunk_rows=train.loss.chunk_rows,
            device=device,
            dtype=choose_dtype(train.dtype, device),
            fast_path=make_fast_path(is_compiled=True) if device.type == "cuda" else None,
        )
        torch.set_float32_matmul_precision("highest")
        states = [each.to(device) for each in host]
        del host
        rows = torch.from_numpy(calibration_rows(texts)).to(device)
        samples = [each[rows] for each in states]
        lanes = {}
        for encoding in arguments.encodings.split(","):
            lanes[encoding] = Lane(lane_settings, resident_states(encoding, states, samples))
            lanes[encoding].record()
            say(f"{encoding} is ready")
        del states
        judged, groups = judged_batches(texts, settings)
        laboratory = Laboratory(
            texts=texts,
            settings=settings,
            lanes=lanes,
            judged=torch.from_numpy(judged).to(device),
            groups=groups,
        )
        for number, seed in enumerate(seeds):
            ahead += [
                start_batches(pool, each, arguments.steps) for each in seeds[number + 1 :][:1]
            ]
            seed_s = time.time()
            losses = laboratory.train(seed, [f.result() for f in ahead.pop(0)], deadline_s)
            if losses is None:
                say(f"seed {seed}: the time is up")
                break
            trained_s = time.time() - seed_s
            found = laboratory.judge()
            judged_s = time.time() - seed_s - trained_s
            write_rows(arguments.out, seed, arguments, losses, found)
            lane_steps = arguments.steps * len(lanes)
            say(
                f"seed {seed}: {trained_s:.1f} s for {lane_steps} steps "
                f"({1000 * trained_s / lane_steps:.2f} ms each), judged in {judged_s:.1f} s; "
                + ", ".join(f"{n} {losses[n]:.3f} {_mean_walk(w):.3f}" for n, w in found.items())
            )
            if time.time() + trained_s + judged_s > deadline_s:
                break
        for futures in ahead:
            for future in futures:
                future.cancel()
        if arguments.probe and device.type == "cuda":
            print_profile(laboratory)


def print_profile(laboratory: Laboratory) -> None:
    """Prints what the kernels of one drafter's step take."""
    lane = next(iter(laboratory.lanes.values()))
    batches = make_batches(0, 0, 3)
    numbers, weights = (
        torch.from_numpy(each).to(lane.settings.device)
        for each in (batches.numbers, batches.weights)
    )
    with torch.profiler.profile() as profile:
        for each, row_weights in zip(numbers, weights, strict=True):
            lane.step(each, row_weights, 1e-3)
        torch.cuda.synchronize()
    kernels = [each for each in profile.key_averages() if each.self_device_time_total > 0]
    kernels.sort(key=lambda each: -each.self_device_time_total)
    total = sum(each.self_device_time_total for each in kernels)
    print(f"{total / 3000:.2f} ms of kernels a step, {sum(k.count for k in kernels) // 3} kernels")
    for each in kernels[:24]:
        print(f"{each.self_device_time_total / 3:8.0f} us {each.count / 3:6.1f} x {each.key[:90]}")


def _speaker(start_s: float):  # type: ignore[no-untyped-def]
    def say(text: str) -> None:
        memory = ""
        if torch.cuda.is_initialized():
            memory = f", {torch.cuda.memory_allocated() / 1e9:.1f} GB"
        print(f"[{time.time() - start_s:.0f} s{memory}] {text}", flush=True)

    return say


def start_batches(pool: ProcessPoolExecutor, seed: int, steps: int) -> list[Future[FlatBatches]]:
    """Has all batches of a seed made, in order."""
    return [
        pool.submit(make_batches, seed, first, min(_STEPS_OF_A_TASK, steps - first))
        for first in range(0, steps, _STEPS_OF_A_TASK)
    ]


def _mean_walk(suites: dict[str, dict[str, float]]) -> float:
    return float(np.mean([each["walk"] for each in suites.values()]))


def write_rows(
    out_path: Path,
    seed: int,
    arguments: argparse.Namespace,
    losses: dict[str, float],
    found: dict[str, dict[str, dict[str, float]]],
) -> None:
    """Appends one JSON line for each drafter of a seed."""
    with out_path.open("a", encoding="utf-8") as file:
        for name, suites in found.items():
            row = {
                "encoding": name,
                "seed": seed,
                "steps": arguments.steps,
                "anchors": arguments.anchors,
                "block_size": arguments.block_size,
                "loss": losses[name],
                "suites": suites,
            }
            file.write(json.dumps(row) + "\n")


# --- the command --------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    lines = commands.add_parser("lines", help="write conversations from arrays of answers")
    lines.add_argument("out", type=Path)
    lines.add_argument("answers", type=Path, help="greedy answers, then others to the same prompts")
    lines.add_argument("greedy", type=Path, help="greedy answers to judge, of several kinds")
    lines.add_argument("--answers-trained", type=int, default=10**9, help="at most so many")
    lines.add_argument("--held-out", type=int, default=600, help="prompts held out")
    train = commands.add_parser("train", help="train and judge, seed after seed")
    train.add_argument("store", help="a store in bf16")
    train.add_argument("--out", type=Path, default=Path("acceptance.jsonl"))
    train.add_argument("--encodings", default=DEFAULT_ENCODINGS)
    train.add_argument("--seeds", type=int, default=8, help="how many")
    train.add_argument("--first-seed", type=int, default=0)
    train.add_argument("--seed-step", type=int, default=1)
    train.add_argument("--steps", type=int, default=2000)
    train.add_argument("--batch-tokens", type=int, default=4096)
    train.add_argument("--anchors", type=int, default=512)
    train.add_argument("--block-size", type=int, default=16)
    train.add_argument("--learning-rate", type=float, default=1.5e-3)
    train.add_argument("--mask-token-id", type=int)
    train.add_argument("--trained", default="math", help="first part of the ids to train on")
    train.add_argument("--processes", type=int, default=6, help="that make batches")
    train.add_argument("--budget-s", type=float, default=400.0)
    train.add_argument("--probe", action="store_true", help="a store of random states: judge some")
    shown = commands.add_parser("table", help="the table of what was trained")
    shown.add_argument("rows", type=Path, nargs="+")
    shown.add_argument("--hidden-size", type=int, default=576)
    shown.add_argument("--layers", type=int, default=5)
    shown.add_argument("--device", default="NVIDIA H200")
    shown.add_argument("--no-record", action="store_true", help="print only")
    return parser.parse_args()


def main() -> None:
    """Runs one command."""
    arguments = parse_arguments()
    if arguments.command == "lines":
        write_lines(
            arguments.out,
            arguments.answers,
            arguments.greedy,
            num_answers=arguments.answers_trained,
            num_held_out=arguments.held_out,
        )
    elif arguments.command == "train":
        run(arguments)
    else:
        outcomes = Outcomes.read(arguments.rows)
        figures = print_table(
            outcomes, hidden_size=arguments.hidden_size, num_layers=arguments.layers
        )
        if not arguments.no_record:
            packages = ("torch", "triton")
            record("Acceptance by encoding", figures, device=arguments.device, packages=packages)


if __name__ == "__main__":
    main()
