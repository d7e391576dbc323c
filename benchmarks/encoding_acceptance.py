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
import functools
import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from acceptance_data import (
    BatchSettings,
    Texts,
    calibration_rows,
    judged_batches,
    keep,
    make_batches,
    read_states,
    read_texts,
    write_lines,
)
from acceptance_states import resident_states
from acceptance_table import CONTROL, Outcomes, Suites, print_table
from drafter_lanes import BatchShape, FlatBatches, Lane, LaneSettings, walked_lengths
from encoding_round_trips import check_round_trips
from results import device_name, provenance, record

from stage2_train.architecture import DrafterArchitecture
from stage2_train.blocks import eligible_anchors
from stage2_train.config import DrafterConfig, DrafterRun, TrainConfig
from stage2_train.device import choose_device, choose_dtype
from stage2_train.drafter import Drafter, initialize
from stage2_train.fast_path import make_fast_path
from stage2_train.optimizer import learning_rate
from stage2_train.preparation import architecture_for
from stage2_train.target_head import TargetHead, load_target_head
from storage.reader import Store, open_store

DEFAULT_ENCODINGS = "bf16,bf16_again,fp8,int8,int4,int3,int2,klt2p"

_STEPS_OF_A_TASK = 50


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
    """The answers of each batch."""

    def train(
        self, seed: int, batches: Sequence[FlatBatches], deadline_s: float
    ) -> dict[str, float] | None:
        """Trains all drafters; gives the losses of the last step, None when the time is up."""
        self._start(seed)
        train, step = self.settings.train, 0
        total_steps = train.max_steps or 1
        for part in batches:
            numbers = torch.from_numpy(part.numbers).to(self.judged.device)
            weights = torch.from_numpy(part.weights).to(self.judged.device)
            _wait(self.judged.device)
            if time.time() > deadline_s:
                return None
            for each, row_weights in zip(numbers, weights, strict=True):
                rate = learning_rate(step, total_steps=total_steps, config=train.optimizer)
                for lane in self.lanes.values():
                    lane.step(each, row_weights, rate)
                step += 1
        return {name: lane.loss() for name, lane in self.lanes.items()}

    def _start(self, seed: int) -> None:
        lanes = self.lanes
        drafter = Drafter(next(iter(lanes.values())).settings.architecture)
        initialize(drafter, seed=seed)
        weights = {name: weight.detach() for name, weight in drafter.named_parameters()}
        for name, lane in lanes.items():
            is_control = name == CONTROL
            lane.start({n: w.bfloat16().float() if is_control else w for n, w in weights.items()})

    def judge(self) -> dict[str, Suites]:
        """Acceptance by drafter and suite."""
        accepted = {name: self._nothing_accepted() for name in self.lanes}
        _wait(self.judged.device)
        for number, each in enumerate(self.judged):
            for name, lane in self.lanes.items():
                lane.judge(each, accepted[name][number])
        _wait(self.judged.device)
        return {name: self._suites(found.cpu().numpy()) for name, found in accepted.items()}

    def judge_layers(self, encoding: str) -> list[Suites]:
        """Acceptance by suite of bf16's drafter where one layer alone is encoded, by layer."""
        lane, exact, other = self.lanes["bf16"], self.lanes["bf16"].states, self.lanes[encoding]
        found = []
        for number in range(len(exact.layers)):
            accepted = self._nothing_accepted()
            lane.states = exact.with_layer(number, of=other.states)
            _wait(self.judged.device)
            for each, out in zip(self.judged, accepted, strict=True):
                lane.judge(each, out, is_recorded=False)
            _wait(self.judged.device)
            found.append(self._suites(accepted.cpu().numpy()))
        lane.states = exact
        return found

    def _nothing_accepted(self) -> torch.Tensor:
        shape = (len(self.judged), self.settings.shape.num_anchors)
        return torch.zeros(shape, dtype=torch.int64, device=self.judged.device)

    def _suites(self, accepted: np.ndarray) -> Suites:
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


# --- seed after seed ----------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> None:
    """Trains and judges seed after seed until the time is up."""
    start_s = time.time()
    deadline_s = start_s + arguments.budget_s
    check_round_trips()
    say = functools.partial(_say, start_s)
    store = open_store(arguments.store)
    snapshot = store.snapshot()
    texts, order = read_texts(snapshot, trained=arguments.trained, probe=arguments.probe)
    settings, architecture = settings_of(arguments, store)
    keep(texts, settings)
    say(f"{len(texts.ids)} sequences, {int(texts.starts[-1]):,} tokens, suites {texts.suites}")
    seeds = [arguments.first_seed + n * arguments.seed_step for n in range(arguments.seeds)]
    # Started before the GPU is touched: forked processes share the texts and need no GPU.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(arguments.processes, mp_context=context) as pool:
        ahead = start_batches(pool, seeds[0], arguments.steps)
        layers = [str(layer_id) for layer_id in architecture.target_layer_ids]
        host = read_states(snapshot, texts, order, layers)
        say("read")
        encodings = arguments.encodings.split(",")
        laboratory = make_laboratory(
            texts, settings, architecture, load_target_head(store), host, encodings, say=say
        )
        del host
        for seed, following in zip(seeds, [*seeds[1:], None], strict=True):
            batches = [part.result() for part in ahead]
            ahead = [] if following is None else start_batches(pool, following, arguments.steps)
            seconds = run_seed(arguments, laboratory, seed, batches, deadline_s, say=say)
            if seed == seeds[0] and arguments.by_layer:
                write_layers(arguments, laboratory, seed, say=say)
            if seconds is None or time.time() + seconds > deadline_s:
                break
        for part in ahead:
            part.cancel()
    if arguments.probe and torch.cuda.is_initialized():
        print_profile(laboratory)


def settings_of(
    arguments: argparse.Namespace, store: Store
) -> tuple[BatchSettings, DrafterArchitecture]:
    """How all drafters are trained, and their shape: the product's, by its settings."""
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
    run = DrafterRun(
        drafter=drafter, train=train, store_dir=arguments.store, drafter_dir=Path("unused")
    )
    architecture = architecture_for(run, store, load_target_head(store))
    shape = BatchShape(
        batch_tokens=train.batch_tokens,
        num_anchors=train.num_anchors,
        block_size=architecture.block_size,
    )
    mask_token_id = architecture.mask_token_id
    return BatchSettings(train=train, shape=shape, mask_token_id=mask_token_id), architecture


def make_laboratory(
    texts: Texts,
    settings: BatchSettings,
    architecture: DrafterArchitecture,
    head: TargetHead,
    host: Sequence[torch.Tensor],
    encodings: Sequence[str],
    *,
    say: Callable[[str], None],
) -> Laboratory:
    """Brings the states to the device, encodes them and makes a drafter for each encoding.

    Args:
        texts: the sequences.
        settings: of training.
        architecture: of the drafters.
        head: the target's.
        host: bf16 states of each layer.
        encodings: names.
        say: prints a line.
    """
    device = choose_device()
    dtype = choose_dtype(settings.train.dtype, device)
    torch.set_float32_matmul_precision("highest")
    lane_settings = LaneSettings(
        architecture=architecture,
        head=head.to(device, dtype),
        shape=settings.shape,
        optimizer=settings.train.optimizer,
        chunk_rows=settings.train.loss.chunk_rows,
        device=device,
        dtype=dtype,
        fast_path=make_fast_path(is_compiled=True) if device.type == "cuda" else None,
    )
    states = [each.to(device) for each in host]
    rows = torch.from_numpy(calibration_rows(texts)).to(device)
    samples = [each[rows] for each in states]
    lanes: dict[str, Lane] = {}
    for encoding in encodings:
        if encoding == CONTROL and "bf16" in lanes:
            resident = lanes["bf16"].states
        else:
            resident = resident_states(encoding, states, samples)
        lanes[encoding] = Lane(lane_settings, resident)
        lanes[encoding].record()
        say(f"{encoding} is ready")
    judged, groups = judged_batches(texts, settings)
    return Laboratory(
        texts=texts,
        settings=settings,
        lanes=lanes,
        judged=torch.from_numpy(judged).to(device),
        groups=groups,
    )


def run_seed(
    arguments: argparse.Namespace,
    laboratory: Laboratory,
    seed: int,
    batches: Sequence[FlatBatches],
    deadline_s: float,
    *,
    say: Callable[[str], None],
) -> float | None:
    """Trains, judges and writes one seed; gives the seconds it took, None if the time was up."""
    start_s = time.time()
    losses = laboratory.train(seed, batches, deadline_s)
    if losses is None:
        say(f"seed {seed}: the time is up")
        return None
    trained_s = time.time() - start_s
    found = laboratory.judge()
    with arguments.out.open("a", encoding="utf-8") as file:
        for name, suites in found.items():
            row = {"encoding": name, "seed": seed, "loss": losses[name], "suites": suites}
            row |= {key: vars(arguments)[key] for key in ("steps", "anchors", "block_size")}
            row |= {"device": device_name(), "measured": provenance(("torch", "triton"))}
            file.write(json.dumps(row) + "\n")
    num_steps = arguments.steps * len(found)
    say(
        f"seed {seed}: {trained_s:.1f} s, {1000 * trained_s / num_steps:.2f} ms a step, judged in "
        f"{time.time() - start_s - trained_s:.1f} s; loss, acceptance: "
        + ", ".join(f"{name} {losses[name]:.3f} {_mean(s):.3f}" for name, s in found.items())
    )
    return time.time() - start_s


def write_layers(
    arguments: argparse.Namespace,
    laboratory: Laboratory,
    seed: int,
    *,
    say: Callable[[str], None],
) -> None:
    """Judges bf16's drafter of this seed with one layer at a time encoded, and notes it."""
    exact = _mean(laboratory.judge()["bf16"])
    found = laboratory.judge_layers(arguments.by_layer)
    with arguments.out.with_suffix(".layers.jsonl").open("a", encoding="utf-8") as file:
        for number, suites in enumerate(found):
            row = {"encoding": arguments.by_layer, "layer": number, "seed": seed, "suites": suites}
            file.write(json.dumps(row) + "\n")
    ratios = ", ".join(f"{_mean(suites) / exact:.4f}" for suites in found)
    say(f"bf16's drafter with one layer in {arguments.by_layer}, of bf16: {ratios}")


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


def _say(start_s: float, text: str) -> None:
    memory = ""
    if torch.cuda.is_initialized():
        memory = f", {torch.cuda.memory_allocated() / 1e9:.1f} GB"
    print(f"[{time.time() - start_s:.0f} s{memory}] {text}", flush=True)


def start_batches(pool: ProcessPoolExecutor, seed: int, steps: int) -> list[Future[FlatBatches]]:
    """Has all batches of a seed made, in order."""
    return [
        pool.submit(make_batches, seed, first, min(_STEPS_OF_A_TASK, steps - first))
        for first in range(0, steps, _STEPS_OF_A_TASK)
    ]


def _mean(suites: Suites) -> float:
    return float(np.mean([each["walk"] for each in suites.values()]))


# --- the command --------------------------------------------------------------------------------


def add_training_arguments(
    parser: argparse.ArgumentParser, *, num_seeds: int, num_steps: int, budget_s: float
) -> None:
    """Adds what says how drafters are trained side by side, and on what."""
    parser.add_argument("store", help="a store in bf16")
    parser.add_argument("--seeds", type=int, default=num_seeds, help="how many")
    parser.add_argument("--steps", type=int, default=num_steps)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--mask-token-id", type=int)
    parser.add_argument("--trained", default="math", help="first part of the ids to train on")
    parser.add_argument("--processes", type=int, default=6, help="that make batches")
    parser.add_argument("--budget-s", type=float, default=budget_s)
    parser.add_argument("--probe", action="store_true", help="a store of random states: judge some")


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
    train.add_argument("--out", type=Path, default=Path("acceptance.jsonl"))
    train.add_argument("--encodings", default=DEFAULT_ENCODINGS)
    train.add_argument("--first-seed", type=int, default=0)
    train.add_argument("--seed-step", type=int, default=1)
    train.add_argument("--by-layer", help="after the first seed: bf16's drafter, one layer in this")
    add_training_arguments(train, num_seeds=8, num_steps=2000, budget_s=400.0)
    shown = commands.add_parser("table", help="the table of what was trained")
    shown.add_argument("rows", type=Path, nargs="+")
    shown.add_argument("--hidden-size", type=int, default=576)
    shown.add_argument("--layers", type=int, default=5)
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
            first = json.loads(arguments.rows[0].read_text().partition("\n")[0])
            title = "Acceptance by encoding"
            record(title, figures, device=first["device"], measured=first["measured"])


if __name__ == "__main__":
    main()
