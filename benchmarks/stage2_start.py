"""How long a drafter takes from its process's start to step 1, on a store of many sequences.

    python benchmarks/stage2_start.py [--sequences 1000000] [--shape tiny|small] [--store DIR]
        [--only-store] [--no-record]

A real store of short sequences of tiny states is written, then `dflash-offline train` runs on two
drafters of one shape. On a GPU it primes their compile cache first; both start from copies of it.
The seconds are those that each process's first log record gives. Without a GPU nothing is compiled:
the figure is what opening the store and planning an epoch cost. `--store` names a folder for the
store, which stays: `--only-store` writes it beforehand.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tomli_w
import torch
from results import device_name, record
from shapes import SHAPES
from synthetic_store import make_store

from storage.reader import open_store

ROOT = Path(__file__).parents[1]
SEQUENCES_OF_SHARD = 2000


def run_file(arguments: argparse.Namespace) -> dict[str, Any]:
    """Two drafters that differ in their seed only."""
    drafter = {"num_layers": SHAPES[arguments.shape].num_layers, "block_size": 8}
    settings: dict[str, Any] = {
        "target": {"model": "none"},
        "data": {"conversations": ["none.jsonl"]},
        "store": {"dir": str(arguments.store)},
        "train": {
            "batch_tokens": 2048,
            "num_anchors": 256,
            "max_steps": 4,
            "log_steps": 1,
            "validation_steps": 1000,
        },
        "launch": {"max_processes": 1},
        "drafter": [{"name": f"seed-{i}", **drafter, "train": {"seed": i}} for i in range(2)],
    }
    if torch.cuda.is_available():
        settings["launch"]["gpus"] = [0]
    return settings


def first_and_last(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A drafter's first and last record of a step."""
    lines = (folder / "runs" / "run" / "drafters" / name / "metrics.jsonl").read_text().splitlines()
    records = [line for line in map(json.loads, lines) if line["kind"] == "train"]
    return records[0], records[-1]


def write_store(arguments: argparse.Namespace) -> None:
    """Writes the store unless it is there.

    Raises:
        SystemExit: one is there that holds other sequences, or not all.
    """
    if arguments.store.exists():
        found = open_store(arguments.store).snapshot().num_sequences
        if found != arguments.sequences:
            raise SystemExit(f"{arguments.store} holds {found} sequences, not those asked for")
        return
    start_s = time.perf_counter()
    make_store(
        arguments.store,
        SHAPES[arguments.shape],
        [arguments.tokens] * arguments.sequences,
        encoding="fp8",
        num_units=max(1, arguments.sequences // SEQUENCES_OF_SHARD),
    )
    print(f"{arguments.sequences} sequences in {time.perf_counter() - start_s:.0f} s", flush=True)


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, tuple[float, str, str]]:
    """Trains, gives the figures by name."""
    (folder / "run.toml").write_text(tomli_w.dumps(run_file(arguments)))
    start_s = time.perf_counter()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "DFLASH_OFFLINE_COMPILE_DIR": str(folder / "compile"),
    }
    # A cache that is warm already would hide what priming gives.
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    subprocess.run(
        [sys.executable, "-m", "dflash_offline.cli", "train", "run.toml"],
        cwd=folder,
        env=environment,
        check=True,
    )
    whole_s = time.perf_counter() - start_s
    note = f"{arguments.sequences} sequences, {arguments.shape}"
    figures: dict[str, tuple[float, str, str]] = {}
    for name in ("seed-0", "seed-1"):
        first, last = first_and_last(folder, name)
        figures[f"stage2_start_{name}_s"] = (
            first["first_report_s"],
            "s",
            f"{note}; process start to step 1; {first['execution']}, "
            f"{first.get('num_compiles_cold', 0)} kernels cold, "
            f"{first.get('num_compiles_cached', 0)} from the primed cache; "
            f"step {last['step']} takes {last['step_s'] * 1e3:.0f} ms",
        )
    figures["stage2_start_all"] = (whole_s, "s", "priming and both drafters, one after the other")
    return figures


def main() -> None:
    """Runs the benchmark and records its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sequences", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--shape", choices=("tiny", "small"), default="tiny")
    parser.add_argument("--store", type=Path, help="where the store is, or is written to and stays")
    parser.add_argument("--only-store", action="store_true", help="train nothing")
    parser.add_argument("--no-record", action="store_true")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="stage2-start-"))
    arguments.store = (arguments.store or folder / "store").absolute()
    try:
        write_store(arguments)
        if arguments.only_store:
            return
        figures = measure(arguments, folder)
    finally:
        shutil.rmtree(folder)
    record(
        "From start to the first step",
        figures,
        device=device_name(),
        packages=("torch", "triton"),
        only_print=arguments.no_record,
    )


if __name__ == "__main__":
    main()
