"""What an encoding costs in acceptance length: drafters trained and judged on encoded states.

    python benchmarks/encoding_acceptance.py lines OUT.jsonl ANSWERS.npz EVAL.npz [--answers 3500]
    dflash-offline extract RUN.toml     (store.encoding = "bf16", data.conversations = OUT.jsonl)
    python benchmarks/encoding_acceptance.py STORE [--encodings bf16,int8,...] [--seeds 4]

The answers are the target's own, the evaluation's greedy. One drafter is trained per encoding and
seed; drafters of one seed share their first weights, their batches and their anchors, and differ in
nothing but the states: encoded and decoded again, in training as in evaluation. Then each walks the
greedy answers of every suite. A ratio is that of one seed's pair; its interval is the 95% interval
of Student's t over seeds, of the mean of the logarithms. Training and walk are the product's.

Several processes share the GPU, for small drafters wait for launches: seven reach 140 steps of 512
anchors a second together on an H200, so that eight seeds of seven encodings, 900 steps each, take
six minutes. Seeds are trained one after another: a run cut off by `--budget-s` has whole pairs.
"""

import argparse
import functools
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from encoding_round_trips import ROUND_TRIPS, RoundTrip, bytes_per_token, check_round_trips
from results import record

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


# --- data ---------------------------------------------------------------------------------------


def write_lines(out_path: Path, sources: Sequence[Path], *, num_answers: int) -> None:
    """Writes answers kept as arrays (`kind`, `prompt_ids`, ...) as conversation lines.

    The first source is trained on, `num_answers` of it; ids are `<kind>-<number>`.
    """
    with out_path.open("w", encoding="utf-8") as lines:
        for place, source in enumerate(sources):
            for number, (kind, prompt, answer) in enumerate(_answers(source)):
                if place == 0 and number >= num_answers:
                    break
                if len(answer) >= 4:
                    line = {
                        "id": f"{kind}-{number:05d}",
                        "token_ids": prompt + answer,
                        "loss_mask": [0] * len(prompt) + [1] * len(answer),
                    }
                    lines.write(json.dumps(line) + "\n")


def _answers(path: Path) -> Iterator[tuple[str, list[int], list[int]]]:
    arrays = np.load(path)
    prompts = np.split(arrays["prompt_ids"].astype(int), np.cumsum(arrays["prompt_lengths"])[:-1])
    answers = np.split(arrays["answer_ids"].astype(int), np.cumsum(arrays["answer_lengths"])[:-1])
    for kind, prompt, answer in zip(arrays["kind"], prompts, answers, strict=True):
        yield str(kind), prompt.tolist(), answer.tolist()


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


_laboratory: Laboratory


def start_process(data: Data, settings: Settings, first: Any, compiled: Any) -> None:
    """Makes this process's laboratory; one process compiles, the others take its kernels."""
    global _laboratory
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    _laboratory = Laboratory(data, settings)
    if _laboratory.fast_path is None:
        return
    is_first = first.acquire(block=False)
    if not is_first:
        compiled.wait(120)
    try:
        zeros = torch.zeros(
            int(data.starts[-1]) + 1,
            len(data.layers) * data.hidden_size,
            dtype=torch.bfloat16,
            device=_laboratory.device,
        )
        _laboratory.train(Task(encoding="bf16", seed=0), zeros, steps=2)
    finally:
        compiled.set()


def run_task(task: Task) -> tuple[Task, dict[str, float] | None, float]:
    """Trains and walks one drafter in this process; None when the time was up."""
    start_s = time.perf_counter()
    states = _laboratory.encoded_states(task.encoding)
    drafter = _laboratory.train(task, states, _laboratory.settings.train.max_steps or 1)
    walked = None if drafter is None else _laboratory.walk(drafter, states)
    return task, walked, time.perf_counter() - start_s


# --- all of them --------------------------------------------------------------------------------


def run_tasks(
    data: Data, settings: Settings, tasks: Sequence[Task], *, num_processes: int
) -> dict[Task, dict[str, float]]:
    """Acceptance lengths of every drafter that was finished in time."""
    context = multiprocessing.get_context("spawn")
    found: dict[Task, dict[str, float]] = {}
    with ProcessPoolExecutor(
        num_processes,
        mp_context=context,
        initializer=start_process,
        initargs=(data, settings, context.Lock(), context.Event()),
    ) as pool:
        for future in as_completed([pool.submit(run_task, task) for task in tasks]):
            task, walked, seconds = future.result()
            if walked is not None:
                found[task] = walked
                lengths = ", ".join(f"{name} {value:.3f}" for name, value in walked.items())
                print(f"{task.encoding} seed {task.seed}: {lengths} ({seconds:.0f} s)", flush=True)
    return found


def interval_of(ratios: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) of ratios, by the t interval of their logarithms."""
    logs = np.log(ratios)
    mean = float(logs.mean())
    if len(logs) < 2:
        return float(np.exp(mean)), 0.0, float("inf")
    quantile = _T_QUANTILE.get(len(logs) - 1, 2.1)
    half = quantile * float(logs.std(ddof=1)) / len(logs) ** 0.5
    return float(np.exp(mean)), float(np.exp(mean - half)), float(np.exp(mean + half))


def summarize(
    found: dict[Task, dict[str, float]], encodings: Sequence[str], bytes_of: Callable[[str], float]
) -> dict[str, tuple[float, str, str]]:
    """Prints the table and gives the figures to record."""
    mean = {task: statistics.fmean(walked.values()) for task, walked in found.items()}
    figures: dict[str, tuple[float, str, str]] = {}
    print("| encoding | bytes a token | acceptance | of bf16 | 95% interval | seeds |")
    print("|---|---|---|---|---|---|")
    for name in encodings:
        seeds = sorted(
            t.seed for t in mean if t.encoding == name and replace(t, encoding="bf16") in mean
        )
        if not seeds:
            continue
        values = [mean[Task(encoding=name, seed=seed)] for seed in seeds]
        ratios = [
            v / mean[Task(encoding="bf16", seed=s)] for v, s in zip(values, seeds, strict=True)
        ]
        ratio, low, high = interval_of(ratios)
        value = statistics.fmean(values)
        print(
            f"| {name} | {bytes_of(name):,.0f} | {value:.3f} | {ratio:.4f} | "
            f"{low:.4f} to {high:.4f} | {len(seeds)} |"
        )
        note = f"{low:.4f} to {high:.4f} (95%, {len(seeds)} paired seeds); mean of the suites"
        figures[f"encoding_{name}_acceptance_length"] = (value, "tokens", f"{len(seeds)} seeds")
        if name != "bf16":
            figures[f"encoding_{name}_acceptance_ratio"] = (ratio, "1", note)
    return figures


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", help="a store in bf16, or `lines`")
    parser.add_argument("paths", nargs="*", type=Path, help="with `lines`: OUT ANSWERS EVAL")
    parser.add_argument("--answers", type=int, default=3500, help="with `lines`: answers taken")
    parser.add_argument("--encodings", default="bf16,fp8,int8,int4,int3,int2")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--mask-token-id", type=int)
    parser.add_argument("--trained", default="math", help="first part of the ids to train on")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--budget-s", type=float, default=400.0)
    parser.add_argument("--no-record", action="store_true", help="print only")
    return parser.parse_args()


def main() -> None:
    """Trains, walks, prints, records."""
    arguments = parse_arguments()
    if arguments.store == "lines":
        out_path, *sources = arguments.paths
        write_lines(out_path, sources, num_answers=arguments.answers)
        return
    deadline_s = time.time() + arguments.budget_s
    encodings = arguments.encodings.split(",")
    check_round_trips()
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
        deadline_s=deadline_s,
    )
    tasks = [Task(encoding=e, seed=s) for s in range(arguments.seeds) for e in encodings]
    with tempfile.TemporaryDirectory() as folder:
        data = read_data(arguments.store, Path(folder, "states"))
        print(f"{len(data.ids)} sequences, {int(data.starts[-1]):,} tokens", flush=True)
        found = run_tasks(data, settings, tasks, num_processes=arguments.processes)
    figures = summarize(
        found, encodings, lambda name: len(data.layers) * bytes_per_token(name, data.hidden_size)
    )
    if not arguments.no_record:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        record("Acceptance by encoding", figures, device=device, packages=("torch", "triton"))


if __name__ == "__main__":
    main()
