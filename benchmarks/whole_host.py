"""The whole system on the GPUs of one host: extraction and training side by side, and alone.

    python benchmarks/whole_host.py WORK [--extract-gpus 0,1,2,3,4] [--train-gpus 5,6,7]
        [--shape wide|qwen3-8b|tiny] [--target-layers 12] [--sequences 2000] [--seconds 60]
        [--target MODEL --conversations FILE] [--kill] [--no-record]

Writes a target of random weights and conversations of random tokens into WORK (or takes `--target`
and `--conversations`) and runs the product's own commands on them, as a user would:

1. one worker, then all workers extract;
2. all workers extract a second store while a drafter a training GPU streams it;
   `--kill` ends one worker and one drafter half-way with SIGKILL;
3. one, two, ... drafters train at once from the finished store.

Rates are those that the processes log themselves, taken from what they wrote between two moments;
the GPUs' utilisation is sampled every second. `benchmarks/simulate_host.py` predicts this table.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from results import record
from shapes import SHAPES, Shape
from stage2_step import PACKAGES
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

Figures = dict[str, tuple[float, str, str]]
POLL_S = 0.25
# Log records of a trainer that are left out: compilation, cold caches.
WARMUP_RECORDS = 3


def make_target(folder: Path, shape: Shape, *, num_layers: int) -> Path:
    """Writes a target of random weights with a tokenizer that nothing uses."""
    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=40_960,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    vocabulary = {f"<{number}>": number for number in range(shape.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<1>", chat_template="{{ messages }}"
    ).save_pretrained(folder)
    return folder


def make_conversations(path: Path, shape: Shape, *, count: int) -> Path:
    """Writes conversations of random tokens, all of one length."""
    rng = np.random.default_rng(0)
    length = shape.sequence_tokens
    mask = [0] * (length // 8) + [1] * (length - length // 8)
    with path.open("w") as lines:
        for number in range(count):
            token_ids = rng.integers(2, shape.vocab_size, length).tolist()
            line = {"id": f"r{number:06d}", "token_ids": token_ids, "loss_mask": mask}
            lines.write(json.dumps(line) + "\n")
    return path


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What runs where."""

    work: Path
    run_table: dict[str, Any]
    extract_gpus: tuple[int, ...]
    train_gpus: tuple[int, ...]
    seconds: float

    def run_file(self, name: str, *, workers: int, drafters: int, store_dir: Path) -> Path:
        """Writes the run file of one phase; gives its path."""
        table = json.loads(json.dumps(self.run_table))
        table["run_dir"] = str(self.work / name)
        table["store"]["dir"] = str(store_dir)
        if self.extract_gpus:
            table["extract"]["gpus"] = list(self.extract_gpus[:workers])
            table["train"]["gpus"] = list(self.train_gpus[:drafters])
        else:
            table["extract"]["num_workers"] = workers
        table["drafter"] = [
            {"name": f"d{number}", "num_layers": 5, "block_size": 16, "mask_token_id": 0}
            | ({"num_layers": 5 - number} if number else {})
            for number in range(drafters)
        ]
        path = self.work / f"{name}.toml"
        path.write_text(tomli_w.dumps(table))
        return path


@contextmanager
def running(command: str, run_file: Path, *, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command of the product; ends it by SIGTERM if it still runs."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "dflash_offline.cli", command, str(run_file)],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait()


class Utilisation:
    """Samples how busy each GPU is, every second."""

    def __init__(self, path: Path) -> None:
        self.path = path
        query = "--query-gpu=index,utilization.gpu"
        with path.open("wb") as output:
            self.process = subprocess.Popen(
                ["nvidia-smi", query, "--format=csv,noheader,nounits", "-l", "1"], stdout=output
            )

    def stop(self) -> None:
        """Ends the sampling."""
        self.process.terminate()
        self.process.wait()

    def mean(self, gpus: Sequence[int], *, last_s: int) -> float:
        """Mean share of the last seconds in which these GPUs ran a kernel."""
        samples: dict[int, list[float]] = {gpu: [] for gpu in gpus}
        for line in self.path.read_text().splitlines():
            index, _, busy = line.partition(",")
            if index.strip().isdigit() and int(index) in samples:
                samples[int(index)].append(float(busy))
        busy_of = [value for values in samples.values() for value in values[-last_s:]]
        return statistics.mean(busy_of) / 100.0 if busy_of else float("nan")


def records(path: Path) -> list[dict[str, Any]]:
    """The whole lines that a process has logged so far."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def train_records(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """What one drafter has logged of its steps, warm-up left out."""
    every = records(run_dir / "drafters" / name / "metrics.jsonl")
    return [each for each in every if each["kind"] == "train"][WARMUP_RECORDS:]


def worker_lines(run_dir: Path, index: int) -> list[dict[str, Any]]:
    """What one worker has logged while it worked."""
    lines = records(run_dir / "extract" / f"worker-{index:05d}.metrics.jsonl")
    return [line for line in lines if line["num_tokens"] > 0]


def worker_rate(lines: Sequence[dict[str, Any]]) -> float:
    """Tokens a second between a worker's first and last line."""
    if len(lines) < 2:
        return float("nan")
    first, last = lines[0], lines[-1]
    return float((last["num_tokens"] - first["num_tokens"]) / (last["time_s"] - first["time_s"]))


def process_of(argument: str, value: str, run_file: Path) -> int:
    """The id of the process that the launcher started with these arguments."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        here = str(run_file) in words and argument in words
        if here and words[words.index(argument) + 1] == value:
            return int(folder.name)
    raise ValueError(f"no process {argument} {value} of {run_file.name} is running")


def extract_phase(plan: Plan, *, workers: int) -> Figures:
    """Extracts a fresh store with some workers."""
    name = f"extract-{workers}"
    run_file = plan.run_file(name, workers=workers, drafters=1, store_dir=plan.work / name / "s")
    with running("extract", run_file, log=plan.work / f"{name}.log") as process:
        exit_code = process.wait()
    if exit_code != 0:
        raise ValueError(f"extraction ended with exit code {exit_code}; see {name}.log")
    return worker_figures(plan, name, workers=workers)


def worker_figures(plan: Plan, name: str, *, workers: int) -> Figures:
    """What the workers of a phase say of themselves."""
    lines = [worker_lines(plan.work / name, index) for index in range(workers)]
    every = [worker_rate(each) for each in lines]
    rates = [rate for rate in every if rate == rate]
    total_bytes = sum(each[-1]["num_bytes"] for each in lines if each)
    seconds = max(each[-1]["elapsed_s"] for each in lines if each)
    note = f"{workers} workers: {', '.join(f'{rate:,.0f}' for rate in every)}"
    key = name.replace("-", "_")
    return {
        f"host_{key}_tok_s": (sum(rates), "tokens/s", note),
        f"host_{key}_rate": (total_bytes / seconds / 1e9, "GB/s", "written to the store"),
    }


def together_phase(plan: Plan, *, kill: bool) -> Figures:
    """Extracts and trains at once; may kill a worker and a drafter half-way."""
    name, workers, drafters = "together", len(plan.extract_gpus) or 1, len(plan.train_gpus) or 1
    run_file = plan.run_file(name, workers=workers, drafters=drafters, store_dir=plan.work / "s")
    logs = plan.work / "together-extract.log", plan.work / "together-train.log"
    with (
        running("extract", run_file, log=logs[0]) as extract,
        running("train", run_file, log=logs[1]) as train,
    ):
        before: list[int] = []
        while extract.poll() is None and train.poll() is None:
            time.sleep(POLL_S)
            counts = [
                len(train_records(plan.work / name, f"d{index}")) for index in range(drafters)
            ]
            if kill and not before and min(counts) >= 5:
                before = counts
                os.kill(process_of("--worker", str(workers - 1), run_file), signal.SIGKILL)
                os.kill(process_of("--drafter", f"d{drafters - 1}", run_file), signal.SIGKILL)
        extract.wait()
    figures = worker_figures(plan, name, workers=workers)
    for index in range(drafters):
        found = train_records(plan.work / name, f"d{index}")
        figures |= drafter_figures(f"together_d{index}", found)
        if before and index < drafters - 1:
            rate, rate_after = (mean_rate(part) for part in halves(found, before[index]))
            figures[f"host_kill_d{index}_ratio"] = (
                rate_after / rate,
                "ratio",
                "rate after a worker and a drafter were killed over before",
            )
    return figures


def mean_rate(found: Sequence[dict[str, Any]]) -> float:
    """Tokens a second over some records of a drafter."""
    return statistics.mean(each["tokens_per_s"] for each in found)


def halves(found: list[Any], place: int) -> tuple[list[Any], list[Any]]:
    """The list in two parts."""
    return found[:place], found[place:]


def drafter_figures(key: str, found: Sequence[dict[str, Any]]) -> Figures:
    """What one drafter says of itself."""
    if not found:
        raise ValueError(f"{key} logged no step after its warm-up; give it more --sequences")
    waiting = statistics.mean(each["wait_fraction"] for each in found)
    compiles = sum(each.get("num_compiles", 0) for each in found)
    mfu = statistics.mean(each.get("mfu_fraction", float("nan")) for each in found)
    note = f"waiting {waiting:.1%}, MFU {mfu:.2f}, recompiles {compiles}, {found[-1]['execution']}"
    return {f"host_{key}_tok_s": (mean_rate(found), "tokens/s", note)}


def train_phase(plan: Plan, *, drafters: int) -> Figures:
    """Trains some drafters at once from the finished store, for a while."""
    name = f"train-{drafters}"
    run_file = plan.run_file(name, workers=1, drafters=drafters, store_dir=plan.work / "s")
    sampled = Utilisation(plan.work / f"{name}.gpus") if plan.train_gpus else None
    with running("train", run_file, log=plan.work / f"{name}.log") as process:
        while process.poll() is None:
            time.sleep(POLL_S)
            counts = [
                len(train_records(plan.work / name, f"d{index}")) for index in range(drafters)
            ]
            if min(counts) >= 1:
                time.sleep(plan.seconds)
                break
        if sampled is not None:
            sampled.stop()
    figures: Figures = {}
    for index in range(drafters):
        found = train_records(plan.work / name, f"d{index}")
        figures |= drafter_figures(f"train_{drafters}_d{index}", found)
    if sampled is not None:
        busy = sampled.mean(plan.train_gpus[:drafters], last_s=int(plan.seconds))
        figures[f"host_train_{drafters}_busy"] = (busy, "fraction", "utilisation of the GPUs")
    return figures


def gpu_list(text: str) -> tuple[int, ...]:
    """GPU indices from `0,1,2`; none on a machine without."""
    if not torch.cuda.is_available():
        return ()
    return tuple(int(part) for part in text.split(","))


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Writes what all phases read."""
    shape = SHAPES[arguments.shape]
    work: Path = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    target = arguments.target or str(
        make_target(work / "target", shape, num_layers=arguments.target_layers)
    )
    conversations = arguments.conversations or make_conversations(
        work / "conversations.jsonl", shape, count=arguments.sequences
    )
    tokens = shape.sequence_tokens
    return Plan(
        work=work,
        run_table={
            "target": {"model": target},
            "data": {"conversations": [str(conversations)], "max_sequence_tokens": tokens},
            "store": {"encoding": "fp8", "held_out_fraction": 0.02},
            "extract": {"batch_tokens": 4 * tokens},
            "train": {
                "batch_tokens": tokens,
                "num_anchors": arguments.anchors,
                "epochs": 1000,
                "log_steps": arguments.log_steps,
                "checkpoint_steps": 1_000_000,
                "validation_steps": 1_000_000,
                "validation_sequences": 1,
            },
        },
        extract_gpus=gpu_list(arguments.extract_gpus),
        train_gpus=gpu_list(arguments.train_gpus),
        seconds=arguments.seconds,
    )


def main() -> None:
    """Runs every phase and records its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("work", type=Path, help="folder for inputs, stores and logs")
    parser.add_argument("--extract-gpus", default="0,1,2,3,4")
    parser.add_argument("--train-gpus", default="5,6,7")
    parser.add_argument("--shape", choices=SHAPES, default="wide")
    parser.add_argument("--target-layers", type=int, default=12)
    parser.add_argument("--target", help="a real target instead of a random one")
    parser.add_argument("--conversations", type=Path, help="its conversations")
    parser.add_argument("--sequences", type=int, default=2000)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--log-steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each training phase")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--no-record", action="store_true")
    arguments = parser.parse_args()
    plan = make_plan(arguments)
    figures: Figures = {}

    def add(found: Figures) -> None:
        figures.update(found)
        for name, (value, unit, note) in found.items():
            print(f"{name:<32} {value:>12.4g} {unit:<9} {note}", flush=True)

    num_workers, num_drafters = len(plan.extract_gpus) or 1, len(plan.train_gpus) or 1
    for workers in sorted({1, num_workers}):
        add(extract_phase(plan, workers=workers))
    add(together_phase(plan, kill=arguments.kill))
    for drafters in range(1, num_drafters + 1):
        add(train_phase(plan, drafters=drafters))
    if not arguments.no_record:
        name = "CPU"
        if torch.cuda.is_available():
            name = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        record("The whole system on one host", figures, device=name, packages=PACKAGES)


if __name__ == "__main__":
    main()
