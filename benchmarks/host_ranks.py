"""What GPUs of one host do together: a drafter's step, a target's forward pass, sums between them.

    python benchmarks/host_ranks.py [--gpus 2] [--shape wide|qwen3-8b|tiny] [--target-layers 4]
        [--parts sums,drafter,target] [--repeats 10] [--no-record]

Starts one process a GPU and lets them do what the ranks of a drafter, and the processes of a
worker, do with the product's own parts:

- `sums`: the gradients of a drafter, summed over the ranks;
- `drafter`: training steps of data parallel ranks against steps of each alone, at the same time;
- `target`: a target spread over the GPUs against the whole one on the first: states and rate.

Nothing is compiled, so that all of it takes a minute from a cold start. A compiled step is shorter
while the sums stay as long, so its speedup is also given for the compiled step's measured rate.
Without GPUs it runs on the CPU, to try the script.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from host_figures import Figures
from host_inputs import make_target
from results import record
from shapes import SHAPES, Shape
from simulate_host import last_measured
from stage2_step import architecture_of, random_batch, random_drafter, random_head

from dflash_offline.rank_launch import rank_places
from stage1_extract.config import TargetConfig
from stage1_extract.parity import relative_differences
from stage1_extract.target_transformers import TransformersTarget
from stage2_train.clock import process_age_s
from stage2_train.collate import with_masks
from stage2_train.config import OptimizerConfig
from stage2_train.decode import LayerDecoder
from stage2_train.drafter import Drafter
from stage2_train.fast_path import make_fast_path
from stage2_train.gradients import WholeGradients
from stage2_train.optimizer import MasterAdamW
from stage2_train.ranks import Ranks, joined_ranks
from stage2_train.step import batch_loss

PARTS = ("sums", "drafter", "target")
# The compiled step's rate, as a whole host last measured it.
ALONE = r"host_\d+_\d+_alone_deep_train_tok_s"
FOLDER_VARIABLE = "HOST_RANKS_FOLDER"
PORT = 29_533
BATCH_SEQUENCES = 2


def seconds_of(call: Callable[[], object], ranks: Ranks, *, repeats: int) -> float:
    """Mean time of a call among several that are not waited for one by one; all ranks at once."""
    call()
    wait()
    ranks.sum(0.0)
    start_s = time.perf_counter()
    for _ in range(repeats):
        call()
    wait()
    return (time.perf_counter() - start_s) / repeats


def wait() -> None:
    """Waits until the device has done all it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def say(ranks: Ranks, what: str) -> None:
    """Says how far the first rank is: on a cold machine imports and loading take most of a run."""
    if ranks.is_first:
        print(f"{process_age_s() or 0.0:6.1f} s after start: {what}", flush=True)


def sums(shape: Shape, ranks: Ranks, device: torch.device, *, repeats: int) -> Figures:
    """Times the sum of a drafter's gradients over the ranks."""
    with torch.device("meta"):
        shapes = [parameter.shape for parameter in Drafter(architecture_of(shape)).parameters()]
    tensors = [torch.zeros(each, dtype=torch.bfloat16, device=device) for each in shapes]
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    taken_s = seconds_of(lambda: ranks.sum_tensors(tensors), ranks, repeats=repeats)
    sent = 2.0 * (ranks.size - 1) / ranks.size * num_bytes
    about = f"{num_bytes / 1e9:.2f} GB of bf16 gradients over {ranks.size} GPUs"
    return {
        "ms": (taken_s * 1e3, "ms", about),
        "rate": (sent / taken_s / 1e9, "GB/s", "sent by each GPU meanwhile"),
    }


def drafter(shape: Shape, ranks: Ranks, device: torch.device, *, repeats: int) -> Figures:
    """Times training steps of ranks that share their gradients, and of each alone."""
    trained = random_drafter(shape, device)
    optimizer = MasterAdamW(trained, OptimizerConfig(), device=device, dtype=torch.bfloat16)
    gradients = WholeGradients(optimizer.parameters, ranks)
    head = random_head(shape, device)
    batch = random_batch(
        shape,
        [shape.sequence_tokens],
        batch_tokens=shape.sequence_tokens,
        num_anchors=512,
        seed=ranks.rank,
        encoding="fp8",
    ).to(device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        batch = with_masks(batch, architecture=architecture_of(shape))

    def step(*, is_shared: bool) -> None:
        result = batch_loss(
            trained,
            batch,
            head=head,
            decoders=(LayerDecoder(encoding="fp8"),) * shape.num_layers,
            chunk_rows=2560,
            fast_path=make_fast_path(is_compiled=False) if on_gpu else None,
        )
        result.loss.backward()
        if is_shared:
            gradients.finish(1.0 / ranks.size)
        optimizer.step(1e-5)

    alone_s = seconds_of(lambda: step(is_shared=False), ranks, repeats=repeats)
    shared_s = seconds_of(lambda: step(is_shared=True), ranks, repeats=repeats)
    added_s = shared_s - alone_s
    figures: Figures = {
        "alone_ms": (alone_s * 1e3, "ms", "a step of one GPU, uncompiled"),
        "step_ms": (shared_s * 1e3, "ms", f"a step of {ranks.size} GPUs, a sequence each"),
        "speedup": (ranks.size * alone_s / shared_s, "times", "uncompiled"),
    }
    tok_s = last_measured(ALONE) if shape == SHAPES["wide"] else None
    if tok_s is not None:
        compiled_s = shape.sequence_tokens / tok_s
        about = f"if sharing adds {added_s * 1e3:.1f} ms to the compiled {compiled_s * 1e3:.0f} ms"
        speedup = ranks.size * compiled_s / (compiled_s + added_s)
        figures["compiled_speedup"] = (speedup, "times", about)
    return figures


def target(
    shape: Shape, ranks: Ranks, device: torch.device, *, num_layers: int, repeats: int
) -> Figures:
    """Times the forward pass of a target on one GPU and over all; compares their states."""
    folder = Path(os.environ[FOLDER_VARIABLE]) / "target"
    if ranks.is_first:
        make_target(folder, replace(shape, vocab_size=8192), num_layers=num_layers)
    ranks.sum(0.0)
    config = TargetConfig(model=str(folder))
    rng = np.random.default_rng(0)
    tokens = BATCH_SEQUENCES * shape.sequence_tokens
    token_ids = [
        rng.integers(2, min(8192, shape.vocab_size), shape.sequence_tokens).astype(np.int32)
        for _ in range(BATCH_SEQUENCES)
    ]
    layers = [str(number) for number in range(num_layers)]

    def run(loaded: TransformersTarget) -> dict[str, torch.Tensor]:
        return loaded.hidden_states(token_ids, layers=layers)

    figures: Figures = {}
    expected: dict[str, torch.Tensor] = {}
    if ranks.is_first:
        whole = TransformersTarget.load(config, device=str(device))
        whole.batching = "packed"
        say(ranks, "the whole target is loaded")
        alone_s = seconds_of(lambda: run(whole), Ranks(), repeats=repeats)
        expected = run(whole)
        del whole
    ranks.sum(0.0)
    if device.type == "cuda":
        os.environ["LOCAL_RANK"] = "0"  # As a worker's process, which sees one GPU, sets it.
    parted = TransformersTarget.load(config, device=str(device), is_parted=True)
    parted.batching = "packed"
    say(ranks, "the parted target is loaded")
    shared_s = seconds_of(lambda: run(parted), ranks, repeats=repeats)
    found = run(parted)
    if ranks.is_first:
        worst = max(
            float(relative_differences(found[name], expected[name]).mean()) for name in layers
        )
        about = f"{num_layers} layers, {tokens} tokens a pass, uncompiled"
        figures = {
            "whole_ms": (alone_s * 1e3 / num_layers, "ms", f"a layer on one GPU; {about}"),
            "parted_ms": (shared_s * 1e3 / num_layers, "ms", f"a layer over {ranks.size} GPUs"),
            "speedup": (alone_s / shared_s, "times", f"{ranks.size} GPUs over one, both eager"),
            "error": (worst, "fraction", "worst layer's states against one GPU's"),
        }
    return figures


def run_rank(arguments: argparse.Namespace) -> None:
    """What each rank does, part by part; the first prints and records."""
    shape = SHAPES[arguments.shape]
    with joined_ranks(expected=arguments.gpus) as ranks:
        device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        found: Figures = {}
        say(ranks, f"{ranks.size} ranks have met")
        for part in arguments.parts.split(","):
            if part == "target":
                of_part = target(
                    shape,
                    ranks,
                    device,
                    num_layers=arguments.target_layers,
                    repeats=arguments.repeats,
                )
            else:
                measure = {"sums": sums, "drafter": drafter}[part]
                of_part = measure(shape, ranks, device, repeats=arguments.repeats)
            named = {f"ranks_{ranks.size}_{part}_{name}": value for name, value in of_part.items()}
            found |= named
            if ranks.is_first:
                for name, (value, unit, about) in named.items():
                    print(f"{name:<32} {value:>10.4g} {unit:<9} {about}", flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()
        if ranks.is_first and not arguments.no_record:
            name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
            title = "GPUs of one host together"
            record(title, found, device=f"{ranks.size} x {name}", packages=("torch", "triton"))


def main() -> None:
    """Starts the ranks, or is one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--shape", choices=SHAPES, default="wide")
    parser.add_argument("--target-layers", type=int, default=4)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--no-record", action="store_true")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(arguments)
        return
    places = rank_places(
        arguments.gpus, available_gpus=torch.cuda.device_count(), port=PORT, setting="--gpus"
    )
    with tempfile.TemporaryDirectory(prefix="host-ranks-") as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, *sys.argv],
                env={**os.environ, **place.environment, FOLDER_VARIABLE: folder},
            )
            for place in places
        ]
        while any(process.poll() is None for process in processes):
            time.sleep(0.1)
            if any(process.poll() for process in processes):
                for process in processes:
                    process.kill()  # The others would wait for the one that failed.
    if any(process.returncode for process in processes):
        raise SystemExit("a rank failed")


if __name__ == "__main__":
    main()
