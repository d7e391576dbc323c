"""Whether a drafter ever waits for its store: training from disk beside the same step without it.

    python benchmarks/stage2_loader.py [--encodings fp8,bf16] [--sequences 160] [--steps 100]
        [--shape qwen3-8b|small|tiny] [--fp8] [--scratch DIR] [--no-record]

A real store is written (random states of the shape's widths, 3,072 tokens a sequence), and the real
training runs on it: the reader, the packing, the copies, the steps. The synthetic rate is that of
the same steps, in the same process, on batches that lie on the device already; it is taken before
and after. The store is read with the page cache dropped (posix_fadvise of every file; all caches
where the process may) and warm. Waiting is counted by the device's own clock. What the reader gives
without a training behind it, cold, says what the disk allows.
"""

import argparse
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from results import device_name, record
from shapes import SHAPES
from synthetic_store import make_store

from stage2_train.batches import Window
from stage2_train.config import DrafterConfig, DrafterRun, OptimizerConfig, TrainConfig
from stage2_train.data import plan_epoch
from stage2_train.position import Position
from stage2_train.preparation import prepare
from stage2_train.signals import StopSignals
from stage2_train.training import StepBatches, Training
from storage.reader import Snapshot, open_store
from storage.stream import read_ahead

Figures = dict[str, tuple[float, str, str]]
WARMUP_STEPS = 6
NUM_RESIDENT = 4


def run_of(arguments: argparse.Namespace, store_dir: Path, drafter_dir: Path) -> DrafterRun:
    """Settings of a training that neither validates nor writes checkpoints."""
    return DrafterRun(
        drafter=DrafterConfig(
            name="loader", num_layers=SHAPES[arguments.shape].num_layers, block_size=16
        ),
        train=TrainConfig(
            epochs=1_000_000,
            batch_tokens=arguments.tokens,
            num_anchors=arguments.anchors,
            fp8="all" if arguments.fp8 else False,
            checkpoint_steps=10**9,
            validation_steps=10**9,
            log_steps=10**9,
            read_ahead_bytes=arguments.read_ahead_bytes,
            optimizer=OptimizerConfig(learning_rate=1e-5),
        ),
        store_dir=store_dir,
        drafter_dir=drafter_dir,
    )


def wait(device: torch.device) -> None:
    """Waits until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """How some steps went."""

    step_s: float
    wait_fraction: float
    """Share of the steps' time that the device waited for data, the first batch apart."""
    first_batch_s: float
    """Wait for the first batch, which an epoch has once: nothing was read ahead of it."""
    longest_wait_s: float
    num_waits: int
    """Steps that waited for more than a hundredth of their time."""


def timed_steps(training: Training, steps: Iterator[StepBatches]) -> Pass:
    """Trains steps and times all but the first."""
    device, waits = training.batches.device, training.monitor.waits
    position = Position(step=10)
    with StopSignals() as stop:
        waits.take_s()
        training.step(next(steps), position, steps=10**9, stop=stop)
        wait(device)
        first_batch_s = waits.take_s()
        waited_s, start_s = [], time.perf_counter()
        for batches in steps:
            training.step(batches, position, steps=10**9, stop=stop)
            # Of the steps that the device is through with: not always this one, but each once.
            waited_s.append(waits.take_s())
        wait(device)
        elapsed_s = time.perf_counter() - start_s
    step_s = elapsed_s / len(waited_s)
    return Pass(
        step_s=step_s,
        wait_fraction=(sum(waited_s) + waits.take_s()) / elapsed_s,
        first_batch_s=first_batch_s,
        longest_wait_s=max(waited_s),
        num_waits=sum(each > 0.01 * step_s for each in waited_s),
    )


def measure(arguments: argparse.Namespace, encoding: str, scratch: Path) -> Figures:
    """Writes a store in one encoding and trains on it; gives the figures by name."""
    # The encoding before this one has forbidden to compile.
    torch.compiler.set_stance("default")
    start_s = time.perf_counter()
    store_dir = make_store(
        scratch / f"store-{encoding}",
        SHAPES[arguments.shape],
        [arguments.tokens] * arguments.sequences,
        encoding=encoding,
    )
    num_bytes = sum(path.stat().st_size for path in store_dir.rglob("*") if path.is_file())
    made_s = time.perf_counter() - start_s
    print(f"{encoding}: {num_bytes / 1e9:.1f} GB written in {made_s:.0f} s", flush=True)
    run = run_of(arguments, store_dir, scratch / f"drafter-{encoding}")
    store = open_store(store_dir)
    training, position = prepare(run, store)
    snapshot = store.snapshot()
    planned = plan_epoch(snapshot, seed=0, epoch=0, batch_tokens=arguments.tokens)

    def from_store(count: int) -> Iterator[StepBatches]:
        return itertools.islice(training.steps_of(snapshot, planned, position), count)

    resident = [batch for of_step in from_store(NUM_RESIDENT) for batch in of_step.arriving]

    def synthetic(count: int) -> Iterator[StepBatches]:
        for batch in itertools.islice(itertools.cycle(resident), count):
            yield StepBatches(arriving=iter([batch]), num_own=1, num_all=1)

    timed_steps(training, synthetic(WARMUP_STEPS))
    count = min(arguments.steps, len(planned))
    without = [timed_steps(training, synthetic(count // 2)).step_s]
    drop_page_cache(store_dir)
    reader_bytes_per_s = read_rate(training, snapshot, planned[:count])
    drop_page_cache(store_dir)
    cold = timed_steps(training, from_store(count))
    without.append(timed_steps(training, synthetic(count // 2)).step_s)
    for _ in training.batches.batches(snapshot, planned[:count], epoch=0):
        pass  # Everything is in the page cache now, as far as it fits.
    warm = timed_steps(training, from_store(count))
    without.append(timed_steps(training, synthetic(count // 2)).step_s)
    training.monitor.close()
    synthetic_s = statistics.median(without)
    needed = resident[0].num_state_bytes / synthetic_s
    note = (
        f"{encoding}, {arguments.shape}, {count} steps of {arguments.tokens} tokens"
        f"{', fp8 products' if arguments.fp8 else ''}"
    )
    return figures(
        f"{encoding}{'_fp8_step' if arguments.fp8 else ''}",
        note,
        tokens=arguments.tokens,
        synthetic_s=synthetic_s,
        needed_bytes_per_s=needed,
        reader_bytes_per_s=reader_bytes_per_s,
        passes={"cold": cold, "warm": warm},
    )


def read_rate(training: Training, snapshot: Snapshot, planned: Sequence[Sequence[Window]]) -> float:
    """Bytes of states by second that the reader gives when nobody trains on them."""
    maker = training.batches
    items = ([(w.sequence_index, slice(w.start, w.stop)) for w in batch] for batch in planned)
    num_bytes, start_s = 0, time.perf_counter()
    for sequences in read_ahead(
        snapshot,
        items,
        layers=maker.layer_names,
        read_ahead_bytes=maker.read_ahead_bytes,
        num_threads=maker.read_threads,
    ):
        num_bytes += sum(part.data.nbytes for each in sequences for part in each.states.values())
    return num_bytes / (time.perf_counter() - start_s)


def figures(
    label: str,
    note: str,
    *,
    tokens: int,
    synthetic_s: float,
    needed_bytes_per_s: float,
    reader_bytes_per_s: float,
    passes: dict[str, Pass],
) -> Figures:
    """Names what was measured."""
    found: Figures = {
        f"stage2_synthetic_tok_s_{label}": (tokens / synthetic_s, "tokens/s", note),
        f"stage2_read_needed_{label}": (needed_bytes_per_s / 1e9, "GB/s", "at the synthetic rate"),
        f"stage2_read_alone_{label}": (
            reader_bytes_per_s / 1e9,
            "GB/s",
            "page cache dropped, nobody trains",
        ),
    }
    for name, done in passes.items():
        cache = {"cold": "page cache dropped", "warm": "in the page cache"}[name]
        waits = f"{done.num_waits} steps waited, the longest {done.longest_wait_s * 1e3:.0f} ms"
        found |= {
            f"stage2_loader_fraction_of_synthetic_{label}_{name}": (
                synthetic_s / done.step_s,
                "fraction",
                f"{note}; {cache}; {done.step_s * 1e3:.1f} against {synthetic_s * 1e3:.1f} ms",
            ),
            f"stage2_data_wait_fraction_{label}_{name}": (
                done.wait_fraction,
                "fraction",
                f"{cache}; {waits}",
            ),
            f"stage2_first_batch_{label}_{name}": (
                done.first_batch_s,
                "s",
                f"once an epoch, not in the fractions; {cache}",
            ),
        }
    return found


def worst_of(found: Figures) -> Figures:
    """The headline figures: the worst of all encodings and both states of the cache."""
    worst: Figures = {}
    for name, choose in (
        ("stage2_loader_fraction_of_synthetic", min),
        ("stage2_data_wait_fraction", max),
    ):
        passes = {key: value for key, value in found.items() if key.startswith(name)}
        key = choose(passes, key=lambda key: passes[key][0])
        worst[name] = (passes[key][0], "fraction", f"the worst: {key.removeprefix(name + '_')}")
    return worst


def drop_page_cache(folder: Path) -> None:
    """Makes the next read of a folder's files come from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
    with suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1")


def main() -> None:
    """Runs the encodings asked for and records their figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--encodings", default="fp8,bf16")
    parser.add_argument("--sequences", type=int, default=160)
    parser.add_argument("--tokens", type=int, default=3072, help="tokens of a sequence, a batch")
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--fp8", action="store_true", help="all products of the step in fp8")
    parser.add_argument("--read-ahead-bytes", type=int, default=1_000_000_000)
    parser.add_argument("--scratch", type=Path, help="where the store is written; needs 20 GB")
    parser.add_argument("--no-record", action="store_true")
    arguments = parser.parse_args()
    found: Figures = {}
    for encoding in arguments.encodings.split(","):
        scratch = Path(tempfile.mkdtemp(dir=arguments.scratch, prefix="stage2-loader-"))
        try:
            found |= measure(arguments, encoding, scratch)
        finally:
            shutil.rmtree(scratch)
    found |= worst_of(found)
    record(
        "Training from a store on disk",
        found,
        device=device_name(),
        packages=("torch", "triton"),
        only_print=arguments.no_record,
    )


if __name__ == "__main__":
    main()
