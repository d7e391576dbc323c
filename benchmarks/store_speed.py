"""Reading and writing hidden states: this store beside raw files, zarr-python and safetensors.

    python benchmarks/store_speed.py [--scratch DIR] [--sequences 30] [--rounds 5] [--no-record]

One shard of random bytes in the shape of Qwen3-8B in fp8: five layers of hidden size 4096,
sequences of 1 to 3 K tokens. Every reader reads the same sequences, whole, in the same random
order, all layers. "raw" is `preadv` from the shard's own files into reused memory, unverified; ours
verifies every byte, in a thread beside the one that reads. The kinds take turns within each round;
a figure is the median over rounds. "cold" drops the files from the page cache before each reading
(posix_fadvise).
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from results import record
from safetensors import safe_open
from safetensors.numpy import save_file
from store_open import make_identity

from storage.arrays import open_with_zarr
from storage.encodings import EncodedStates
from storage.reader import Snapshot, open_store
from storage.schema import LayerRecord
from storage.stream import read_ahead
from storage.writer import create_store

HIDDEN_SIZE = 4096
LAYERS = ("1", "9", "17", "25", "33")
THREADS = 2


class Bench:
    """One data set in all forms, and a way to read each."""

    def __init__(self, folder: Path, num_sequences: int):
        self.folder = folder
        rng = np.random.default_rng(0)
        self.lengths = rng.integers(1000, 3001, num_sequences).tolist()
        self.order = rng.permutation(num_sequences).tolist()
        self.source = rng.integers(0, 127, (3000, HIDDEN_SIZE), dtype=np.uint8)
        self.scales = np.ones(3000, dtype=np.float32)
        self.num_bytes = sum(self.lengths) * len(LAYERS) * HIDDEN_SIZE
        self.memory = np.zeros((len(LAYERS), 3000, HIDDEN_SIZE), dtype=np.uint8)

    def write_ours(self) -> None:
        """A store with one shard, sealed: flushed and committed."""
        store = create_store(self.folder / "store", make_identity())
        store.add_layers(
            LayerRecord(name=name, encoding="fp8", hidden_size=HIDDEN_SIZE) for name in LAYERS
        )
        store.plan_generation([f"{i:05d}" for i in range(len(self.lengths))], num_units=1)
        with store.start_shard(store.units()[0]) as shard:
            for place, length in enumerate(self.lengths):
                states = EncodedStates(self.source[:length], self.scales[:length])
                shard.append(
                    sequence_id=f"{place:05d}",
                    token_ids=np.zeros(length, dtype=np.int32),
                    loss_mask=np.ones(length, dtype=np.bool_),
                    greedy=False,
                    states=dict.fromkeys(LAYERS, states),
                )
            shard.seal()

    def write_safetensors(self) -> None:
        """A file a sequence, each flushed."""
        folder = self.folder / "safetensors"
        folder.mkdir()
        for place, length in enumerate(self.lengths):
            path = folder / f"{place:05d}"
            save_file(dict.fromkeys(LAYERS, self.source[:length]), path)
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    def open_all(self) -> None:
        """Opens what the readers keep open."""
        self.snapshot: Snapshot = open_store(self.folder / "store").snapshot()
        arrays = [next(self.folder.glob(f"store/shards/*/*/layers/{n}")) for n in LAYERS]
        self.descriptors = [os.open(array / "c/0/0", os.O_RDONLY) for array in arrays]
        self.zarr_arrays = [open_with_zarr(array) for array in arrays]
        ends = np.cumsum(self.lengths)
        self.starts = (ends - self.lengths).tolist()

    def read_raw(self, places: list[int], memory: np.ndarray) -> None:
        """`preadv` into the same memory again and again."""
        for place in places:
            for layer, descriptor in enumerate(self.descriptors):
                target = memory[layer, : self.lengths[place]]
                os.preadv(descriptor, [target], self.starts[place] * HIDDEN_SIZE)

    def raw(self) -> None:
        """One thread."""
        self.read_raw(self.order, self.memory)

    def raw_threads(self) -> None:
        """The sequences shared out over threads."""
        memories = [self.memory, np.zeros_like(self.memory)]
        with ThreadPoolExecutor(THREADS) as pool:
            parts = [self.order[thread::THREADS] for thread in range(THREADS)]
            list(pool.map(self.read_raw, parts, memories))

    def ours(self) -> None:
        """One thread, memory from the pool."""
        for place in self.order:
            self.snapshot.read(place, layers=LAYERS)

    def ours_into(self) -> None:
        """One thread, into the caller's memory, as `raw` reads."""
        self.read_into(self.order)

    def read_into(self, places: list[int]) -> None:
        """The same memory again and again."""
        for place in places:
            length = self.lengths[place]
            out = {name: self.memory[layer, :length] for layer, name in enumerate(LAYERS)}
            self.snapshot.read(place, layers=LAYERS, out=out)

    def ours_threads(self) -> None:
        """`read_ahead`, a sequence a batch."""
        batches = ([place] for place in self.order)
        for _ in read_ahead(
            self.snapshot,
            batches,
            layers=LAYERS,
            read_ahead_bytes=200_000_000,
            num_threads=THREADS,
        ):
            pass

    def ours_shard(self) -> None:
        """The whole shard in the order of its bytes, into the caller's memory."""
        self.read_into(list(range(len(self.lengths))))

    def zarr(self) -> None:
        """zarr-python's own path."""
        for place in self.order:
            start, length = self.starts[place], self.lengths[place]
            for array in self.zarr_arrays:
                array[start : start + length]

    def safetensors(self) -> None:
        """One file a sequence."""
        for place in self.order:
            with safe_open(self.folder / "safetensors" / f"{place:05d}", framework="np") as file:
                for name in LAYERS:
                    # Copied out of the memory map: the others end with bytes in memory, too.
                    self.memory[0, : self.lengths[place]] = file.get_tensor(name)

    def drop_from_cache(self) -> None:
        """Makes the next reading a cold one."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


def rates_of(name: str, action: Callable[[], None], num_bytes: int) -> Iterator[tuple[str, float]]:
    """MB by second and, under `name_cpu`, by second of processor time of one run."""
    start, cpu_start = time.perf_counter(), time.process_time()
    action()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    yield name, num_bytes / 1e6 / seconds
    yield f"{name}_cpu", num_bytes / 1e6 / cpu_seconds


def measure(bench: Bench, rounds: int) -> Iterator[tuple[str, float]]:
    """(name, MB/s) and (name_cpu, MB by processor second) of every kind, in turns."""
    readers = {
        "raw": bench.raw,
        "ours": bench.ours,
        "ours_into": bench.ours_into,
        "ours_shard": bench.ours_shard,
        "raw_threads": bench.raw_threads,
        "ours_threads": bench.ours_threads,
        "zarr": bench.zarr,
        "safetensors": bench.safetensors,
    }
    for _ in range(rounds):
        for kind in ("ours", "safetensors"):
            shutil.rmtree(bench.folder / ("store" if kind == "ours" else kind), ignore_errors=True)
            os.sync()
            yield from rates_of(f"write_{kind}", getattr(bench, f"write_{kind}"), bench.num_bytes)
        bench.open_all()
        for name, reader in readers.items():
            bench.drop_from_cache()
            yield from rates_of(f"cold_{name}", reader, bench.num_bytes)
        bench.raw()
        bench.safetensors()
        for name, reader in readers.items():
            yield from rates_of(f"warm_{name}", reader, bench.num_bytes)


def summarize(rates: dict[str, list[float]]) -> dict[str, tuple[float, str, str]]:
    """Medians in MB/s, and the ratios that matter, each within its round."""

    def ratio(top: str, bottom: str) -> float:
        return statistics.median(a / b for a, b in zip(rates[top], rates[bottom], strict=True))

    figures: dict[str, tuple[float, str, str]] = {}
    note = "random sequences, all layers, read by one thread into its memory; goal 0.75"
    figures["store_read_random_fraction_of_raw"] = (ratio("warm_ours_into", "warm_raw"), "1", note)
    note = "the same by processor time of all threads, the verifying one included"
    cpu = ratio("warm_ours_into_cpu", "warm_raw_cpu")
    figures["store_read_random_fraction_of_raw_cpu"] = (cpu, "1", note)
    note = "into memory of the reader's pool"
    figures["store_read_pooled_fraction_of_raw"] = (ratio("warm_ours", "warm_raw"), "1", note)
    note = f"both with {THREADS} threads"
    threads = ratio("warm_ours_threads", "warm_raw_threads")
    figures["store_read_threads_fraction_of_raw"] = (threads, "1", note)
    cold = ratio("cold_ours_into", "cold_raw")
    figures["store_read_cold_fraction_of_raw"] = (cold, "1", "random, cold; goal 0.75")
    cold = ratio("cold_ours_shard", "cold_raw")
    figures["store_read_shard_cold_fraction_of_raw"] = (cold, "1", "in byte order, cold")
    shard = ratio("warm_ours_shard", "warm_raw")
    figures["store_read_shard_fraction_of_raw"] = (shard, "1", "in byte order; goal 0.75")
    figures["store_read_times_zarr"] = (ratio("warm_ours_into", "warm_zarr"), "1", "warm; goal 4")
    cpu = ratio("warm_ours_into_cpu", "warm_zarr_cpu")
    figures["store_read_times_zarr_cpu"] = (cpu, "1", "warm, by processor time")
    safetensors = ratio("warm_ours_into", "warm_safetensors")
    figures["store_read_times_safetensors"] = (safetensors, "1", "warm")
    written = ratio("write_ours", "write_safetensors")
    note = "both flushed; ours committed; goal 0.8"
    figures["store_write_fraction_of_safetensors"] = (written, "1", note)
    for name, values in rates.items():
        unit = "MB/CPU-s" if name.endswith("_cpu") else "MB/s"
        figures[f"store_{name}_mb_s"] = (statistics.median(values), unit, "")
    return figures


def main() -> None:
    """Measures and records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--scratch", default=tempfile.gettempdir(), help="folder on the disk to test"
    )
    parser.add_argument("--sequences", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default=f"{os.cpu_count()} CPU cores")
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        bench = Bench(Path(folder), arguments.sequences)
        for name, value in measure(bench, arguments.rounds):
            rates.setdefault(name, []).append(value)
    figures = summarize(rates)
    packages = ("numpy", "zarr", "safetensors", "crc32c")
    record(
        "Reading and writing the store",
        figures,
        device=arguments.device,
        packages=packages,
        only_print=arguments.no_record,
    )


if __name__ == "__main__":
    main()
