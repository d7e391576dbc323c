"""What opening a store and planning an epoch costs, by number of shards.

    python benchmarks/store_open.py [--scratch DIR] [--no-record]

28 sequences a shard, as 27B-class targets give. "unfolded": every commit record is read once, as
the first reader after extraction does; "folded": a catalog file holds them. Each opening is a fresh
process; its peak memory includes Python and numpy. The latency rows add 10 ms to each file request.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from results import record

from storage import layout
from storage.catalog import Catalog, fold
from storage.commits import ArrayRecord, CommitRecord
from storage.files import LocalFiles
from storage.order import epoch_order
from storage.reader import Store
from storage.records import create_record, dump_record
from storage.schema import StoreIdentity, UnitId, hash_id

SEQUENCES = 28
TOKENS = 2_000
LATENCY_S = 0.010
METHODS = ("create", "read", "size", "names", "range_reader")


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
    ids = [f"conversation-{index}".encode() for index in range(count)]
    catalog = Catalog(
        generation=np.zeros(num_shards, dtype=np.int32),
        unit_index=np.arange(num_shards, dtype=np.int32),
        attempt=np.zeros((num_shards, 16), dtype=np.uint8),
        num_sequences=np.full(num_shards, SEQUENCES, dtype=np.int32),
        num_tokens=np.full(count, TOKENS, dtype=np.int32),
        num_supervised=np.full(count, TOKENS // 2, dtype=np.int32),
        greedy=np.zeros(count, dtype=np.uint8),
        id_hash=np.array([hash_id(name.decode()) for name in ids], dtype=np.uint64),
        id_bytes=np.array([len(name) for name in ids], dtype=np.int32),
        id_text=np.frombuffer(b"".join(ids), dtype=np.uint8),
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


def open_and_plan(store_dir: Path, latency_s: float) -> dict[str, float]:
    """Opens, plans one epoch, names its first sequence."""
    files = SlowFiles(store_dir, latency_s)
    start = time.perf_counter()
    snapshot = Store(files, make_identity()).snapshot()
    order = epoch_order(snapshot, seed=0, epoch=0, window_shards=64)
    snapshot.sequence_id(int(order[0]))
    return {
        "seconds": time.perf_counter() - start,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
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
    parser.add_argument("--open", help=argparse.SUPPRESS)
    parser.add_argument("--latency", type=float, default=0.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.open:
        print(json.dumps(open_and_plan(Path(arguments.open), arguments.latency)))
        return
    figures: dict[str, tuple[float, str, str]] = {}
    for make, num_shards in (
        (make_unfolded, 1_000),
        (make_unfolded, 36_000),
        (make_folded, 1_000),
        (make_folded, 36_000),
        (make_folded, 360_000),
    ):
        store_dir = Path(tempfile.mkdtemp(dir=arguments.scratch)) / "store"
        make(store_dir, num_shards)
        kind = make.__name__.removeprefix("make_")
        first = measure(store_dir, 0.0)
        note = f"peak memory {first['peak_mb']:.0f} MB, {first['requests']:.0f} file requests"
        figures[f"store_open_{kind}_{num_shards}_shards_s"] = (first["seconds"], "s", note)
        if kind == "folded":
            slow = measure(store_dir, LATENCY_S)
            note = f"10 ms latency, {slow['requests']:.0f} requests"
            figures[f"store_open_latency_{num_shards}_shards_s"] = (slow["seconds"], "s", note)
        else:
            again = measure(store_dir, 0.0)
            note = f"the next reader; peak memory {again['peak_mb']:.0f} MB"
            figures[f"store_open_again_{num_shards}_shards_s"] = (again["seconds"], "s", note)
        shutil.rmtree(store_dir.parent)
    one_million = figures["store_open_folded_36000_shards_s"]
    figures["store_open_1m_sequences_s"] = one_million
    if arguments.no_record:
        print(
            "\n".join(f"{name:45s} {v:.3f} {u}  {note}" for name, (v, u, note) in figures.items())
        )
        return
    record("Opening a store", figures, device=f"{os.cpu_count()} CPU cores, warm page cache")


if __name__ == "__main__":
    main()
