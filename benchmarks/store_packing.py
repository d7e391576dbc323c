"""What packing without loss saves and costs: stores of real states, raw and packed.

    python benchmarks/store_packing.py [STORE] [--encodings bf16,fp8,int8,int4,int3,int2]

STORE holds real states in bf16; without it a store is made of two layers of width 4096 in sequences
of 1 to 3 K tokens, normally distributed with channels of unlike size, which packs about as well.
Each encoding is derived twice, raw and packed. Figures are bytes of all layer files, and the rates
at which encoded sequences are written and read, in bytes of the raw form; reading is one thread,
warm, in random order, every byte verified. A chunk holds 256 tokens of whatever sequences: short
ones pay for unpacking their neighbours.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from results import record
from store_open import make_identity

from storage.derive import derive_store
from storage.encodings import ENCODINGS, EncodedStates, encode
from storage.reader import Snapshot, open_store
from storage.schema import LayerRecord
from storage.writer import create_store

HIDDEN_SIZE = 4096


def make_store(store_dir: Path) -> Path:
    """A store of synthetic states."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1000, 3001, 20).tolist()
    store = create_store(store_dir, make_identity())
    names = ("1", "9")
    store.add_layers(LayerRecord(name=n, encoding="bf16", hidden_size=HIDDEN_SIZE) for n in names)
    store.plan_generation([f"{number:03d}" for number in range(len(lengths))], num_units=1)
    channels = np.exp(rng.standard_normal(HIDDEN_SIZE)).astype(np.float32)
    states = encode("bf16", rng.standard_normal((3000, HIDDEN_SIZE), dtype=np.float32) * channels)
    with store.start_shard(store.units()[0]) as shard:
        for number, length in enumerate(lengths):
            shard.append(
                sequence_id=f"{number:03d}",
                token_ids=np.zeros(length, dtype=np.int32),
                loss_mask=np.ones(length, dtype=np.bool_),
                greedy=False,
                states=dict.fromkeys(names, EncodedStates(states.data[:length])),
            )
        shard.seal()
    return store_dir


def layer_bytes(store_dir: Path) -> int:
    """Bytes of all layer arrays, padding and index included."""
    return sum(path.stat().st_size for path in store_dir.glob("shards/*/*/layers/*/c/0/0"))


def seconds(action: Callable[[], None]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def read_all(snapshot: Snapshot, order: list[int]) -> None:
    """Every sequence, all layers, into memory of the reader's pool."""
    layers = list(snapshot.store.layers)
    for index in order:
        snapshot.read(index, layers=layers)


def write_again(source: Path, target: Path) -> None:
    """The same sequences and layers into a new store, flushed and committed."""
    old = open_store(source)
    snapshot, layers = old.snapshot(), list(old.layers)
    new = create_store(target, old.identity)
    new.add_layers(old.layers.values())
    ids = [snapshot.sequence_id(index) for index in range(snapshot.num_sequences)]
    new.plan_generation(ids, num_units=1)
    (unit,) = new.units()
    read = [
        snapshot.read(snapshot.index_of(name), layers=layers) for name in new.sequences_of(unit)
    ]
    start = time.perf_counter()
    with new.start_shard(unit) as shard:
        for each in read:
            shard.append(
                sequence_id=each.sequence_id,
                token_ids=each.token_ids,
                loss_mask=each.loss_mask,
                greedy=each.greedy,
                states=each.states,
            )
        shard.seal()
    write_again.seconds = time.perf_counter() - start  # type: ignore[attr-defined]


def measure(
    source: Path, folder: Path, encoding: str, packing: str | None, rounds: int
) -> tuple[int, float, float]:
    """(bytes of layers, bytes of raw rows read by second, written by second)."""
    store_dir = folder / f"{encoding}-{packing}"
    derive_store(source, store_dir, encoding=encoding, packing=packing)
    snapshot = open_store(store_dir).snapshot()
    entry = ENCODINGS[encoding]
    row_bytes = entry.width(snapshot.store.identity.hidden_size) * np.dtype(entry.dtype).itemsize
    raw_bytes = int(snapshot.num_tokens.sum()) * len(snapshot.store.layers) * row_bytes
    order = np.random.default_rng(0).permutation(snapshot.num_sequences).tolist()
    read_all(snapshot, order)
    read_s = statistics.median(seconds(lambda: read_all(snapshot, order)) for _ in range(rounds))
    written_s = []
    for number in range(rounds):
        write_again(store_dir, folder / f"{encoding}-{packing}-{number}")
        written_s.append(write_again.seconds)  # type: ignore[attr-defined]
    return layer_bytes(store_dir), raw_bytes / read_s, raw_bytes / statistics.median(written_s)


def main() -> None:
    """Measures and records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=Path, nargs="?", help="a store in bf16")
    parser.add_argument("--encodings", default=",".join(ENCODINGS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scratch", default=tempfile.gettempdir())
    parser.add_argument("--no-record", action="store_true")
    arguments = parser.parse_args()
    figures: dict[str, tuple[float, str, str]] = {}
    print("| encoding | size, packed | read, raw | read, packed | written, raw | written, packed |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        source = arguments.store or make_store(Path(folder, "source"))
        for encoding in arguments.encodings.split(","):
            raw = measure(source, Path(folder), encoding, None, arguments.rounds)
            packed = measure(source, Path(folder), encoding, "zstd", arguments.rounds)
            cells = [
                packed[0] / raw[0],
                raw[1] / 1e6,
                packed[1] / 1e6,
                raw[2] / 1e6,
                packed[2] / 1e6,
            ]
            print(
                f"| `{encoding}` | {cells[0]:.3f} | "
                + " | ".join(f"{c:,.0f}" for c in cells[1:])
                + " |"
            )
            figures |= {
                f"packing_{encoding}_size": (cells[0], "1", "packed over raw, all layer files"),
                f"packing_{encoding}_read_fraction": (cells[2] / cells[1], "1", "warm, one thread"),
                f"packing_{encoding}_read_mb_s": (cells[2], "MB/s", "of raw bytes"),
                f"packing_{encoding}_write_mb_s": (cells[4], "MB/s", "of raw bytes; committed"),
            }
    if not arguments.no_record:
        device = f"{os.cpu_count()} CPU cores"
        record("Packing without loss", figures, device=device, packages=("numpy", "numcodecs"))


if __name__ == "__main__":
    main()
