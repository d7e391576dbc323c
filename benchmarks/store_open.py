"""What opening a store and planning an epoch costs, by number of shards.

    python benchmarks/store_open.py [--scratch DIR] [--no-record]   # up to 10 M sequences
    python benchmarks/store_open.py --only-folded 3600000           # 100 M sequences, 3.6 M shards

Making the store of 100 M sequences takes minutes, 5 GB of memory and 5 GB of disk.

28 sequences a shard, as 27B-class targets give. "unfolded": every commit record is read once, as
the first reader after extraction does; "folded": a catalog file holds them. Each opening is a fresh
process; its peak memory includes Python and numpy. The latency rows add 10 ms to each file request.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from results import record

from storage import layout
from storage.catalog import Catalog, fold
from storage.commits import ArrayRecord, CommitRecord
from storage.files import LocalFiles, LocalRangeReader
from storage.order import epoch_order
from storage.reader import Store
from storage.records import create_record, dump_record
from storage.schema import StoreIdentity, UnitId, hash_id

SEQUENCES = 28
TOKENS = 2_000
IDS_AT_ONCE = 1_000_000
LATENCY_S = 0.010
Figures = dict[str, tuple[float, str, str]]
METHODS = ("create", "read", "size", "names")


def make_identity() -> StoreIdentity:
    """An identity without meaning."""
    return StoreIdentity(
        target_name="synthetic",
        target_revision=None,
        target_weights_sha256="",
        tokenizer_sha256="",
        chat_template_sha256="",
        template_arguments={},
        mask_rule_version=1,
        max_sequence_tokens=4096,
        long_conversations="truncate",
        compute_dtype="bfloat16",
        attention_backend="sdpa",
        hidden_size=5120,
        num_target_layers=64,
        vocab_size=150_000,
        held_out_fraction=0.05,
    )


def start_store(store_dir: Path, num_shards: int) -> LocalFiles:
    """A store with an identity and one generation of so many units."""
    files = LocalFiles(store_dir)
    create_record(files, layout.IDENTITY, make_identity().to_json())
    plan = {
        "num_units": num_shards,
        "num_units_in_use": num_shards,
        "num_sequences": num_shards * SEQUENCES,
        "ids_sha256": "",
    }
    create_record(files, layout.generation(0), plan)
    return files


def make_unfolded(store_dir: Path, num_shards: int) -> None:
    """Commit records of the size that five layers of 2,000-token sequences give."""
    start_store(store_dir, num_shards)
    blocks = SEQUENCES * -(-TOKENS // 256)
    checksums = np.random.default_rng(0).integers(0, 2**32, blocks).astype(np.uint32)
    array = ArrayRecord(
        dtype="uint8",
        num_tokens=SEQUENCES * TOKENS,
        width=5120,
        chunk_tokens=256,
        file_bytes=0,
        checksums=checksums,
        tail_crc32c=0,
        metadata_crc32c=0,
    )
    for index in range(num_shards):
        commit = CommitRecord(
            unit=UnitId(0, index),
            attempt=f"{index:032x}",
            layers={str(layer): array for layer in range(5)},
            scales=array,
            scale_columns=[str(layer) for layer in range(5)],
            sequence_ids=[f"conversation-{index}-{place}" for place in range(SEQUENCES)],
            num_tokens=[TOKENS] * SEQUENCES,
            num_supervised=[TOKENS // 2] * SEQUENCES,
            greedy=[False] * SEQUENCES,
            tokens_checksums=checksums[:SEQUENCES],
            skipped={},
        )
        path = store_dir / layout.commit(commit.unit)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(dump_record(commit.to_json()))


def make_folded(store_dir: Path, num_shards: int) -> None:
    """A catalog file that holds every unit of the plan."""
    files = start_store(store_dir, num_shards)
    count = num_shards * SEQUENCES
    hashes = np.empty(count, dtype=np.uint64)
    lengths = np.empty(count, dtype=np.int32)
    text = bytearray()
    for start in range(0, count, IDS_AT_ONCE):
        names = [f"conversation-{i}" for i in range(start, min(start + IDS_AT_ONCE, count))]
        hashes[start : start + len(names)] = [hash_id(name) for name in names]
        lengths[start : start + len(names)] = [len(name) for name in names]
        text += "".join(names).encode()
    catalog = Catalog(
        generation=np.zeros(num_shards, dtype=np.int32),
        unit_index=np.arange(num_shards, dtype=np.int32),
        attempt=np.zeros((num_shards, 16), dtype=np.uint8),
        num_sequences=np.full(num_shards, SEQUENCES, dtype=np.int32),
        num_tokens=np.full(count, TOKENS, dtype=np.int32),
        num_supervised=np.full(count, TOKENS // 2, dtype=np.int32),
        greedy=np.zeros(count, dtype=np.uint8),
        id_hash=hashes,
        id_bytes=lengths,
        id_text=np.frombuffer(text, dtype=np.uint8),
    )
    fold(files, catalog)


class SlowFiles(LocalFiles):
    """Counts file requests and delays each."""

    def __init__(self, root: Path, latency_s: float):
        super().__init__(root)
        self.latency_s = latency_s
        self.num_requests = 0

    def __getattribute__(self, name: str) -> Any:
        """Counts and delays the calls that would be requests to an object store."""
        if name in METHODS:
            self.num_requests += 1
            time.sleep(self.latency_s)
        return super().__getattribute__(name)

    def range_reader(self, path: str) -> Any:
        """A reader whose reads are delayed, as requests to an object store are."""
        return SlowReader(self, super().range_reader(path))


class SlowReader:
    """Counts reads by range and delays each."""

    def __init__(self, files: SlowFiles, reader: LocalRangeReader):
        self.files, self.reader = files, reader

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Reads after the delay."""
        self.files.num_requests += 1
        time.sleep(self.files.latency_s)
        self.reader.read_into(offset, buffers)


def peak_bytes() -> int:
    """Most memory this process has had; `getrusage` would count its parent's from before exec."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None, "Linux"
    return int(found[1]) * 1024


def open_and_plan(store_dir: Path, latency_s: float) -> dict[str, float]:
    """Opens, plans one epoch, names its first sequence."""
    files = SlowFiles(store_dir, latency_s)
    start = time.perf_counter()
    snapshot = Store(files, make_identity()).snapshot()
    opened_s = time.perf_counter() - start
    order = epoch_order(snapshot, seed=0, epoch=0, window_shards=64)
    snapshot.sequence_id(int(order[0]))
    return {
        "opened_s": opened_s,
        "seconds": time.perf_counter() - start,
        "peak_mb": peak_bytes() / 1e6,
        "requests": files.num_requests,
        "sequences": snapshot.num_sequences,
    }


def measure(store_dir: Path, latency_s: float) -> dict[str, float]:
    """`open_and_plan` in a fresh process."""
    command = [sys.executable, __file__, "--open", str(store_dir), "--latency", str(latency_s)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def main() -> None:
    """Measures all sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scratch", default=tempfile.gettempdir(), help="folder for the stores")
    parser.add_argument("--no-record", action="store_true", help="print only")
    parser.add_argument("--only-folded", type=int, nargs="+", help="shards of each folded store")
    parser.add_argument("--open", help=argparse.SUPPRESS)
    parser.add_argument("--latency", type=float, default=0.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.open:
        print(json.dumps(open_and_plan(Path(arguments.open), arguments.latency)))
        return
    figures: Figures = {}
    if not arguments.only_folded:
        for num_shards in (1_000, 36_000):
            figures |= measure_unfolded(num_shards, arguments.scratch)
    for num_shards in arguments.only_folded or (1_000, 36_000, 360_000):
        figures |= measure_folded(num_shards, arguments.scratch)
    if "store_open_folded_36000_shards_s" in figures:
        figures["store_open_1m_sequences_s"] = figures["store_open_folded_36000_shards_s"]
    record(
        "Opening a store",
        figures,
        device=f"{os.cpu_count()} CPU cores, warm page cache",
        only_print=arguments.no_record,
    )


def measure_unfolded(num_shards: int, scratch: str) -> Figures:
    """A first reader, who folds, and the next."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        store_dir = Path(folder) / "store"
        make_unfolded(store_dir, num_shards)
        first, again = measure(store_dir, 0.0), measure(store_dir, 0.0)
    note = f"peak memory {first['peak_mb']:.0f} MB, {first['requests']:.0f} file requests"
    next_note = f"the next reader; peak memory {again['peak_mb']:.0f} MB"
    return {
        f"store_open_unfolded_{num_shards}_shards_s": (first["seconds"], "s", note),
        f"store_open_again_{num_shards}_shards_s": (again["seconds"], "s", next_note),
    }


def measure_folded(num_shards: int, scratch: str) -> Figures:
    """A reader of a folded store, without and with latency."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        store_dir = Path(folder) / "store"
        make_folded(store_dir, num_shards)
        fast, slow = measure(store_dir, 0.0), measure(store_dir, LATENCY_S)
    note = (
        f"open {fast['opened_s']:.2f} s, the rest planning; peak memory {fast['peak_mb']:.0f} MB, "
        f"{fast['requests']:.0f} file requests"
    )
    slow_note = f"10 ms latency, {slow['requests']:.0f} requests"
    return {
        f"store_open_folded_{num_shards}_shards_s": (fast["seconds"], "s", note),
        f"store_open_latency_{num_shards}_shards_s": (slow["seconds"], "s", slow_note),
    }


if __name__ == "__main__":
    main()
