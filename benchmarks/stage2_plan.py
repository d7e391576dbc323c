"""How planning an epoch grows with the store: time and memory from a million sequences up.

    python benchmarks/stage2_plan.py [--sequences 100000,1000000,10000000,100000000] [--no-record]

Planned is what the trainer plans: which sequences it trains, their order, their batches, for
log-normal lengths (median 700, cap 4,096) and batches of 4,096 tokens. No store is read: what a
snapshot knows of its sequences is drawn. Each size has a process of its own; memory is its peak
above what it held before planning. "Plain" is `batches.pack` alone on a part of the sequences.
"""

import argparse
import multiprocessing
import os
import resource
import time
from dataclasses import dataclass

import numpy as np
from results import record

from stage2_train.batches import Window, pack
from stage2_train.data import plan_epoch

BATCH_TOKENS = 4096
PLAIN_SEQUENCES = 200_000


@dataclass(frozen=True, kw_only=True)
class DrawnSnapshot:
    """What planning asks of a snapshot."""

    num_tokens: np.ndarray
    num_supervised: np.ndarray
    held_out: np.ndarray
    shard_index: np.ndarray

    @property
    def num_sequences(self) -> int:
        """Sequences of the store."""
        return len(self.num_tokens)

    def sequence_id(self, index: int) -> str:
        """The id of a sequence."""
        return f"{index:012d}"


def draw_snapshot(count: int) -> DrawnSnapshot:
    """Sequences of a store of that size, 1,000 in a shard, one in a thousand held out."""
    rng = np.random.default_rng(0)
    num_tokens = np.empty(count, np.int32)
    for piece in np.array_split(num_tokens, -(-count // 2**20)):
        lengths = rng.lognormal(np.log(700), 1.0, len(piece))
        piece[:] = np.clip(lengths, 16, BATCH_TOKENS).astype(np.int32)
    indices = np.arange(count, dtype=np.int32)
    return DrawnSnapshot(
        num_tokens=num_tokens,
        num_supervised=num_tokens,
        held_out=indices % 1000 == 0,
        shard_index=indices // 1000,
    )


def measure(count: int) -> dict[str, float]:
    """Plans an epoch of so many sequences and takes its first batches."""
    snapshot = draw_snapshot(count)
    before_bytes = peak_bytes()
    start_s = time.perf_counter()
    planned = plan_epoch(snapshot, seed=0, epoch=0, batch_tokens=BATCH_TOKENS)  # type: ignore[arg-type]
    planned_s = time.perf_counter() - start_s
    first = [planned[number] for number in range(1000)]
    taken_s = time.perf_counter() - start_s - planned_s
    assert all(sum(window.num_tokens for window in batch) <= BATCH_TOKENS for batch in first)
    return {
        "planned_s": planned_s,
        "batch_s": taken_s / len(first),
        "bytes": peak_bytes() - before_bytes,
        "fill": float(snapshot.num_tokens[planned.order].sum(dtype=np.int64))
        / (BATCH_TOKENS * len(planned)),
    }


def peak_bytes() -> int:
    """Most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def plain_s() -> float:
    """Time of the plain packing for each sequence."""
    windows = [
        Window(sequence_index=index, start=0, stop=length)
        for index, length in enumerate(draw_snapshot(PLAIN_SEQUENCES).num_tokens.tolist())
    ]
    start_s = time.perf_counter()
    for _ in pack(windows, batch_tokens=BATCH_TOKENS):
        pass
    return (time.perf_counter() - start_s) / PLAIN_SEQUENCES


def main() -> None:
    """Measures and records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sequences", default="100000,1000000,10000000,100000000")
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    figures: dict[str, tuple[float, str, str]] = {}
    for count in map(int, arguments.sequences.split(",")):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.apply(measure, (count,))
        figures[f"stage2_plan_epoch_{count}_s"] = (
            found["planned_s"],
            "s",
            f"{found['planned_s'] / count * 1e6:.2f} us a sequence; fill {found['fill']:.4f}",
        )
        figures[f"stage2_plan_epoch_{count}_memory"] = (
            found["bytes"] / 2**30,
            "GiB",
            f"{found['bytes'] / count:.0f} bytes a sequence",
        )
        figures[f"stage2_plan_epoch_{count}_batch"] = (
            found["batch_s"] * 1e6,
            "us",
            "to take a batch of the plan",
        )
    figures["stage2_plan_plain_packing"] = (plain_s() * 1e6, "us", "a sequence, packed plainly")
    record(
        "Planning an epoch",
        figures,
        device=f"CPU, {os.cpu_count()} cores",
        packages=("numpy",),
        only_print=arguments.no_record,
    )


if __name__ == "__main__":
    main()
