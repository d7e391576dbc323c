"""Whether several GPUs train one drafter as one does, and how much faster: DDP and FSDP2.

    python benchmarks/stage2_ranks.py [--gpus 2] [--shape qwen3-8b|small|tiny] [--steps 24]
        [--forms ddp,fsdp] [--no-record]

`dflash-offline train --drafter` runs on one store: one GPU that computes all batches of a step
itself, then so many GPUs that share them out, each way of `train.parallel`. All start from the same
weights and see the same batches in the same order, so their losses must agree up to rounding at
every report; else the script fails. Scaling is the rate over one GPU's, by the number of GPUs.
Later forms start from what the first has compiled. An interrupt (SIGINT) ends the run with the
figures of the forms that are through. Without GPUs it runs on the CPU, to try the script.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w
from results import device_name, record
from shapes import SHAPES
from synthetic_store import make_store

from stage2_train.compile_cache import ARCHIVE

Figures = dict[str, tuple[float, str, str]]
ROOT = Path(__file__).parents[1]
LOG_STEPS = 4
LOSS_TOLERANCE = 2e-3


def run_file(arguments: argparse.Namespace) -> dict[str, Any]:
    """The same drafter in each form."""
    shape = SHAPES[arguments.shape]
    drafter = {"num_layers": shape.num_layers, "block_size": shape.block_size}
    forms: dict[str, dict[str, Any]] = {"one": {"batches_per_step": arguments.gpus}}
    for form in arguments.forms.split(","):
        forms[form] = {"gpus_per_drafter": arguments.gpus, "parallel": form}
    return {
        "target": {"model": "none"},
        "data": {"conversations": ["none.jsonl"]},
        "store": {"dir": "store"},
        "train": {
            "batch_tokens": arguments.tokens,
            "num_anchors": arguments.anchors,
            # Sharded weights multiply in bf16: so does what they are compared with.
            "fp8": False,
            "epochs": 1000,
            "max_steps": arguments.steps,
            "log_steps": LOG_STEPS,
            "validation_steps": 10**9,
            "checkpoint_steps": 10**9,
            "validation_sequences": 1,
            "optimizer": {"learning_rate": 1e-4},
        },
        "drafter": [{"name": name, **drafter, "train": train} for name, train in forms.items()],
    }


def records_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """A drafter's records of steps."""
    path = folder / "runs" / "run" / "drafters" / name / "metrics.jsonl"
    return [
        line for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == "train"
    ]


def train(folder: Path, name: str) -> list[dict[str, Any]]:
    """Trains one form by the real command; gives its records."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "DFLASH_OFFLINE_COMPILE_DIR": str(folder / "compile"),
    }
    command = [sys.executable, "-m", "dflash_offline.cli", "train", "run.toml", "--drafter", name]
    with (folder / f"{name}.log").open("w") as log:
        done = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log)
    if done.returncode:
        words = (folder / f"{name}.log").read_text()[-3000:]
        raise SystemExit(f"{name} ended with exit code {done.returncode}:\n{words}")
    return records_of(folder, name)


def worst_difference(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> float:
    """Largest relative difference of two runs' losses, report by report."""
    return max(
        abs(ours["loss"] - plain["loss"]) / plain["loss"]
        for ours, plain in zip(found, expected, strict=True)
    )


def rate_of(records: list[dict[str, Any]]) -> float:
    """Sequence tokens by second once everything is warm."""
    return statistics.median(each["tokens_per_s"] for each in records[len(records) // 2 :])


def hand_on_what_is_compiled(folder: Path, names: Sequence[str]) -> None:
    """Lets these drafters start from the compile cache of the first one, if it compiled at all."""
    drafters = folder / "runs" / "run" / "drafters"
    if (drafters / "one" / ARCHIVE).exists():
        for name in names:
            (drafters / name).mkdir()
            shutil.copy(drafters / "one" / ARCHIVE, drafters / name)


def measure(arguments: argparse.Namespace, folder: Path, figures: Figures) -> None:
    """Writes the store, trains each form, compares; adds the figures by name as they come."""
    make_store(
        folder / "store",
        SHAPES[arguments.shape],
        [arguments.tokens] * arguments.sequences,
        encoding="fp8",
    )
    settings = run_file(arguments)
    (folder / "run.toml").write_text(tomli_w.dumps(settings))
    expected = train(folder, "one")
    one = rate_of(expected)
    print(f"one: {one:.0f} tokens/s", flush=True)
    note = f"{arguments.shape}, {arguments.gpus} batches of {arguments.tokens} tokens a step"
    figures["stage2_ranks_one_tok_s"] = (one, "tokens/s", f"{note}, one after the other")
    forms = arguments.forms.split(",")
    hand_on_what_is_compiled(folder, forms)
    for form in forms:
        found = train(folder, form)
        difference = worst_difference(found, expected)
        last = found[-1]
        memory = last.get("memory_peak_bytes", last.get("memory_used_bytes", 0)) / 2**30
        figures |= {
            f"stage2_ranks_{form}_{arguments.gpus}_tok_s": (
                rate_of(found),
                "tokens/s",
                f"{note}; {last['execution']}, {memory:.1f} GiB on a GPU",
            ),
            f"stage2_ranks_{form}_{arguments.gpus}_scaling": (
                rate_of(found) / one / arguments.gpus,
                "fraction",
                f"rate by GPU over that of one alone, {arguments.gpus} GPUs",
            ),
            f"stage2_ranks_{form}_{arguments.gpus}_loss_difference": (
                difference,
                "fraction",
                f"worst of {len(found)} reports in {arguments.steps} steps, against one GPU",
            ),
        }
        print(
            f"{form}: losses differ by {difference:.2e}, {rate_of(found):.0f} tokens/s", flush=True
        )
        if difference > LOSS_TOLERANCE:
            raise SystemExit(
                f"{form} does not train what one GPU trains: more than {LOSS_TOLERANCE}"
            )


def main() -> None:
    """Runs the forms asked for and records their figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--forms", default="ddp,fsdp")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=3072)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=24)
    parser.add_argument("--no-record", action="store_true")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="stage2-ranks-"))
    figures: Figures = {}
    try:
        measure(arguments, folder, figures)
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        shutil.rmtree(folder)
    if not figures:
        raise SystemExit("no form was through")
    record(
        "Several GPUs for one drafter",
        figures,
        device=device_name(),
        packages=("torch", "triton"),
        only_print=arguments.no_record,
    )


if __name__ == "__main__":
    main()
