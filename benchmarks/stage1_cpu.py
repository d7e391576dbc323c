"""Stage 1 without a GPU: two workers against one, cost a token by number of sequences, resuming.

    python benchmarks/stage1_cpu.py [--only workers|cost|resume] [--scratch DIR] [--no-record]
        [--quick]

Needs two idle cores. Everything runs through the real command on small random targets:

- workers: an 8-layer target of width 384, one and two workers of one thread each, by the tokens
  that the workers commit a second once the target is loaded;
- cost: a 2-layer target of width 32, one worker, 1 K, 10 K and 100 K sequences of 24 tokens, the
  whole command by the clock and the worker's own loop;
- resume: `extract` once more on the store of 100 K sequences, with its receipt and without.

About 7 minutes: `workers` 3, `cost` 2, `resume` 2 (it fills its store first); `--quick` is a trial
of 1 minute whose figures mean nothing.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tomli_w
import torch
from results import record
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 512
SEQUENCE_TOKENS = 24
Figures = dict[str, tuple[float, str, str]]


def save_target(folder: Path, *, hidden_size: int, num_layers: int) -> None:
    """A random target of a size, with a tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 16,
        num_key_value_heads=hidden_size // 32,
        max_position_embeddings=4096,
        eos_token_id=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def save_data(path: Path, *, num_sequences: int, num_tokens: int) -> None:
    """Sequences of random tokens, the later half of each to be learnt."""
    numbers = random.Random(0)
    mask = [int(index >= num_tokens // 2) for index in range(num_tokens)]
    with path.open("w") as file:
        for index in range(num_sequences):
            token_ids = numbers.choices(range(256), k=num_tokens)
            line = {"id": f"s{index:07d}", "token_ids": token_ids, "loss_mask": mask}
            file.write(json.dumps(line) + "\n")


def save_run(
    folder: Path, *, target: Path, data: Path, num_workers: int, layers: list[int]
) -> None:
    """A run file for a target and data, in a folder of its own."""
    folder.mkdir()
    run = {
        "run_dir": "run",
        "target": {"model": str(target), "dtype": "float32"},
        "data": {"conversations": [str(data)], "max_sequence_tokens": 1024},
        "store": {"encoding": "fp8", "target_layer_ids": layers, "shard_bytes": 1_000_000},
        "extract": {"num_workers": num_workers, "torch_threads": 1, "batch_tokens": 2048},
        "drafter": [{"name": "none", "num_layers": 1, "block_size": 4, "mask_token_id": 300}],
    }
    (folder / "run.toml").write_text(tomli_w.dumps(run))


def extract(folder: Path) -> float:
    """Runs the command; gives the seconds it took."""
    command = [sys.executable, "-m", "dflash_offline.cli", "extract", str(folder / "run.toml")]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    start_s = time.perf_counter()
    subprocess.run(command, check=True, env={**os.environ, **threads}, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start_s


def worker_ends(folder: Path) -> list[dict[str, Any]]:
    """What each worker says at its end."""
    paths = sorted((folder / "run" / "extract").glob("worker-*.metrics.jsonl"))
    return [json.loads(path.read_text().splitlines()[-1]) for path in paths]


def tokens_per_s(folder: Path) -> float:
    """Committed tokens of all workers by the longest worker's time after loading."""
    ends = worker_ends(folder)
    return sum(end["num_tokens"] for end in ends) / max(end["elapsed_s"] for end in ends)


def measure_workers(scratch: Path, *, num_sequences: int) -> Figures:
    """One and two workers on the same data."""
    target, data = scratch / "wide", scratch / "wide.jsonl"
    save_target(target, hidden_size=384, num_layers=8)
    save_data(data, num_sequences=num_sequences, num_tokens=512)
    rates = {}
    # One, two, one: what drifts on the machine shows as a difference between the ones.
    for name, num_workers in (("one", 1), ("two", 2), ("again", 1)):
        folder = scratch / f"workers-{name}"
        save_run(folder, target=target, data=data, num_workers=num_workers, layers=[1, 3, 5])
        extract(folder)
        rates[name] = tokens_per_s(folder)
    alone = (rates["one"] + rates["again"]) / 2
    note = f"one worker before {rates['one']:.0f} and after {rates['again']:.0f} tok/s"
    return {
        "stage1_cpu_one_worker_tok_s": (alone, "tok/s", note),
        "stage1_cpu_two_workers_tok_s": (rates["two"], "tok/s", "one thread each"),
        "stage1_cpu_two_workers_ratio": (rates["two"] / alone, "x", "goal 1.7"),
    }


def fill_tiny_store(scratch: Path, *, num_sequences: int) -> tuple[Path, float]:
    """Folder of a run on a tiny target, extracted, and the seconds that took; made once."""
    target, folder = scratch / "tiny", scratch / f"cost-{num_sequences}"
    if folder.exists():
        return folder, 0.0
    if not target.exists():
        save_target(target, hidden_size=32, num_layers=2)
    data = scratch / f"{num_sequences}.jsonl"
    save_data(data, num_sequences=num_sequences, num_tokens=SEQUENCE_TOKENS)
    save_run(folder, target=target, data=data, num_workers=1, layers=[0, 1])
    return folder, extract(folder)


def measure_cost(scratch: Path, sizes: list[int]) -> Figures:
    """One worker on more and more sequences."""
    figures: Figures = {}
    for num_sequences in sizes:
        folder, wall_s = fill_tiny_store(scratch, num_sequences=num_sequences)
        loop_us = 1e6 / tokens_per_s(folder)
        wall_us = 1e6 * wall_s / (num_sequences * SEQUENCE_TOKENS)
        label = f"{num_sequences // 1000}k" if num_sequences >= 1000 else str(num_sequences)
        note = f"whole command {wall_s:.1f} s = {wall_us:.1f} us a token with start-up"
        figures[f"stage1_cpu_us_per_token_{label}"] = (loop_us, "us", note)
    values = [value for value, _, _ in figures.values()]
    figures["stage1_cpu_cost_growth"] = (
        values[-1] / values[0],
        "x",
        f"cost a token at {sizes[-1]:,} sequences by that at {sizes[0]:,}",
    )
    return figures


def measure_resume(scratch: Path, *, num_sequences: int) -> Figures:
    """The same command once more when there is nothing left to do."""
    folder, _ = fill_tiny_store(scratch, num_sequences=num_sequences)
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(3):
        seconds["with"].append(extract(folder))
        (folder / "run" / "extract" / "finished.json").unlink()
        seconds["without"].append(extract(folder))
    about = f"whole command on a finished store of {num_sequences:,} sequences, best of 3"
    return {
        "stage1_resume_finished_s": (min(seconds["with"]), "s", f"{about}, by its receipt; goal 5"),
        "stage1_resume_without_receipt_s": (
            min(seconds["without"]),
            "s",
            f"{about}, receipt removed: the data are looked at again; goal 5",
        ),
    }


def main() -> None:
    """Measures all three, or one, and records them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("workers", "cost", "resume"), help="One part alone.")
    parser.add_argument("--scratch", type=Path, help="Folder for stores, a few hundred MB.")
    parser.add_argument("--no-record", action="store_true", help="Print only.")
    parser.add_argument("--quick", action="store_true", help="A small trial.")
    arguments = parser.parse_args()
    sizes = [100, 1_000] if arguments.quick else [1_000, 10_000, 100_000]
    figures: Figures = {}
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        scratch = Path(folder)
        if arguments.only in (None, "cost"):
            figures |= measure_cost(scratch, sizes)
        if arguments.only in (None, "resume"):
            figures |= measure_resume(scratch, num_sequences=sizes[-1])
        if arguments.only in (None, "workers"):
            figures |= measure_workers(scratch, num_sequences=60 if arguments.quick else 600)
    device = f"{os.cpu_count()} CPU cores, {platform.machine()}"
    packages = ("numpy", "torch", "transformers")
    record(
        "Stage 1 on a CPU",
        figures,
        device=device,
        packages=packages,
        only_print=arguments.no_record,
    )


if __name__ == "__main__":
    main()
