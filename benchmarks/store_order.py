"""What a shuffle window costs and what it mixes: an epoch read in orders of windows K = 1, 16, all.

    python benchmarks/store_order.py [--scratch DIR] [--shards 32] [--sequences 28] [--no-record]

A store of one fp8 layer of width 1024, 28 sequences of 1 to 3 K tokens a shard, is read whole in
`epoch_order` with each window, cold (dropped from the page cache before) and warm, with
`read_ahead`. "Neighbours of one shard" is how often two sequences that follow each other lie in the
same shard; of orders without any memory it is one by the number of shards. "Distance" is the mean
distance, in places of the epoch, of sequences of one shard, by that of a random order: 1 is mixed.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from results import record
from store_open import make_identity

from storage.encodings import EncodedStates
from storage.order import epoch_order
from storage.reader import Snapshot, open_store
from storage.schema import LayerRecord
from storage.stream import read_ahead
from storage.writer import create_store

WIDTH = 1024
WINDOWS = {"1": 1, "16": 16, "all": None}


def make_store(store_dir: Path, *, num_shards: int, num_sequences: int) -> Snapshot:
    """A filled store of random bytes."""
    rng = np.random.default_rng(0)
    source = rng.integers(0, 127, (3000, WIDTH), dtype=np.uint8)
    scales = np.ones(3000, dtype=np.float32)
    store = create_store(store_dir, make_identity())
    store.add_layers([LayerRecord(name="9", encoding="fp8", hidden_size=WIDTH)])
    ids = [f"{number:06d}" for number in range(num_shards * num_sequences)]
    store.plan_generation(ids, num_units=num_shards)
    for unit in store.units():
        with store.start_shard(unit) as shard:
            for sequence_id in store.sequences_of(unit):
                length = int(rng.integers(1000, 3001))
                shard.append(
                    sequence_id=sequence_id,
                    token_ids=np.zeros(length, dtype=np.int32),
                    loss_mask=np.ones(length, dtype=np.bool_),
                    greedy=False,
                    states={"9": EncodedStates(source[:length], scales[:length])},
                )
            shard.seal()
    return open_store(store_dir).snapshot()


def drop_from_cache(folder: Path) -> None:
    """Makes the next reading a cold one."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def read_rate(snapshot: Snapshot, order: np.ndarray) -> float:
    """MB by second of an epoch read in this order, two threads ahead of the reader."""
    start = time.perf_counter()
    num_bytes = 0
    batches = ([int(index)] for index in order)
    for (sequence,) in read_ahead(
        snapshot, batches, layers=["9"], read_ahead_bytes=100_000_000, num_threads=2
    ):
        num_bytes += sequence.states["9"].data.nbytes
    return num_bytes / 1e6 / (time.perf_counter() - start)


def mixing(snapshot: Snapshot, order: np.ndarray) -> tuple[float, float]:
    """(share of neighbours of one shard, mean distance within a shard by that at random)."""
    shards = snapshot.shard_index[order]
    neighbours = float(np.mean(shards[1:] == shards[:-1]))
    distances = []
    for shard in range(snapshot.num_shards):
        places = np.flatnonzero(shards == shard)
        distances.append(np.abs(places[:, None] - places[None]).sum() / max(1, len(places) - 1))
    within = sum(distances) / len(order)
    return neighbours, float(within / ((len(order) + 1) / 3))


def main() -> None:
    """Measures and records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scratch", default=tempfile.gettempdir(), help="folder on the disk")
    parser.add_argument("--shards", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=28, help="of one shard, on average")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default=f"{os.cpu_count()} CPU cores")
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    rates: dict[str, list[float]] = {}
    figures: dict[str, tuple[float, str, str]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        store_dir = Path(folder, "store")
        snapshot = make_store(
            store_dir, num_shards=arguments.shards, num_sequences=arguments.sequences
        )
        everything = np.ones(snapshot.num_sequences, dtype=np.bool_)
        for round_number in range(arguments.rounds):
            for name, window in WINDOWS.items():
                order = epoch_order(
                    snapshot, seed=0, epoch=round_number, window_shards=window, include=everything
                )
                drop_from_cache(store_dir)
                rates.setdefault(f"{name}_cold", []).append(read_rate(snapshot, order))
                rates.setdefault(f"{name}_warm", []).append(read_rate(snapshot, order))
                neighbours, distance = mixing(snapshot, order)
                note = f"at random {1 / snapshot.num_shards:.3f}"
                figures[f"store_order_window_{name}_neighbours_of_one_shard"] = (
                    neighbours,
                    "1",
                    note,
                )
                figures[f"store_order_window_{name}_distance"] = (distance, "1", "1 is mixed")
    for name, values in rates.items():
        figures[f"store_order_window_{name}_mb_s"] = (statistics.median(values), "MB/s", "")
    title = f"Shuffle windows: {arguments.shards} shards"
    record(
        title,
        figures,
        device=arguments.device,
        packages=("numpy", "zarr"),
        only_print=arguments.no_record,
    )


if __name__ == "__main__":
    main()
