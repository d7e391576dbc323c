"""Write docs/internet-scale.md: every number on that page follows from the lines below.

python docs/write_internet_scale_page.py
"""

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parent / "internet-scale.md"

SEQUENCE_TOKENS = 1_024
"""Mean length of a sequence; the store knows no padding."""
LAYERS = 5
"""Captured layers."""
BITS = {"bf16": 16, "fp8": 8, "int3": 3.125}
"""Bits a value; int3, the default, with its group scales, 8 bits a group of 64."""
SHARD_BYTES = 1_000_000_000
MATMUL_FLOPS = 790e12
"""What bf16 matrix products reach on an H200."""
EXTRACT_SHARE = {"dense": 0.5, "MoE": 0.25}
"""Assumed share of it in the target's forward pass."""
TRAIN_SHARE = 0.69
"""Share of it that a training step is built to reach."""
BLOCK_TOKENS = 512 * 16 / 3072
"""Trained block positions for one token of a sequence: 512 anchors of 16 in 3,072 tokens."""
DRAFTER_LAYERS = 5
GPUS_OF_A_NODE = 8
DAYS = 30
SEQUENCES = (1_000_000, 100_000_000, 10_000_000_000)
OPENING = (
    (1_008_000, 36_000, 0.19, 0.10),
    (10_080_000, 360_000, 1.35, 0.32),
    (100_800_000, 3_600_000, 15.4, 2.68),
)
"""Measured on simulated stores, two CPU cores (`benchmarks/store_open.py`): sequences, shards,
seconds to open the store and shuffle an epoch, peak memory of that process in GB."""
PLANNING = (0.37e-6, 19)
"""Seconds and bytes a sequence of an epoch's plan, order and batches, of 100 M sequences
(`benchmarks/stage2_plan.py`)."""
PUTS_OF_A_SHARD = 75
"""Requests of writing a shard of SHARD_BYTES (docs/object-storage.md)."""


@dataclass(frozen=True)
class Target:
    """What the arithmetic needs to know of a target."""

    name: str
    kind: str
    active_parameters: float
    hidden_size: int
    vocab_size: int


TARGETS = (
    Target("27B dense", "dense", 27e9, 5120, 248_000),
    Target("70B dense", "dense", 70e9, 8192, 128_000),
    Target("235B, 22B active", "MoE", 22e9, 4096, 152_000),
    Target("1T, 32B active", "MoE", 32e9, 7168, 164_000),
)


INTRO = f"""\
# To internet scale

What a run costs before it starts, from 1 M to 10 B sequences, from 27B to 1T targets. Written by
`docs/write_internet_scale_page.py`, where every constant and formula can be read and changed;
only the section on catalogs was measured at its sizes, on simulated stores.

Assumed: {SEQUENCE_TOKENS:,} tokens a sequence on average, {LAYERS} captured layers, shards of
{SHARD_BYTES / 1e9:.0f} GB, drafters of {DRAFTER_LAYERS} layers, 512 anchors of 16 in 3,072 tokens,
and of the {MATMUL_FLOPS / 1e12:.0f} TFLOP/s that bf16 products reach on an H200:
{EXTRACT_SHARE["dense"]:.0%} in a dense target's forward pass, {EXTRACT_SHARE["MoE"]:.0%} in a
mixture of experts, {TRAIN_SHARE:.0%} in training.
"""
CONCLUSIONS = """\
## What this says

- **1 M sequences**: a workstation or one node. Tens of TB, a few GPU-days.
- **100 M sequences**: a cluster. PB on shared or object storage; some hundred GPU-days of
  extraction, 40 to 130 for an epoch of one drafter. Workers need nothing of each other, so
  extraction grows with the array: up to 1,000 tasks, each of many units. Bits decide: int3
  in place of fp8 saves one to three PB. Sweeps scale by drafters, one a GPU; a single
  drafter on one GPU takes months.
- **10 B sequences**: more than is kept, hundreds of PB. There the states are a window, not
  an archive: one store for each slice of the data, each drafter started from its last
  checkpoint (`init_from`) on the next slice, the slice then deleted. Which slice is next is
  the user's to say; nothing here automates it.
- A target larger than one GPU's memory needs several GPUs a worker.
- Catalog and order hold to 100 M sequences on one machine; 10 B are a hundred stores.
"""


def token_bytes(target: Target, encoding: str) -> float:
    """States and a scale a layer, and token id and mask: 4 + 1 bytes."""
    scale = 0 if encoding == "bf16" else 4
    return LAYERS * (target.hidden_size * BITS[encoding] / 8 + scale) + 5


def extract_rate(target: Target) -> float:
    """Tokens a second on one GPU: 2 operations a token and active weight."""
    return MATMUL_FLOPS * EXTRACT_SHARE[target.kind] / (2 * target.active_parameters)


def train_rate(target: Target) -> float:
    """Tokens a second on one GPU, for a drafter of the target's width and an MLP of three times it.

    Forward and backward cost 6 operations a weight of the 2 h^2 (q, o) and 9 h^2 (MLP) in a layer,
    and 4 a weight of the frozen LM head.
    """
    h = target.hidden_size
    operations = 6 * DRAFTER_LAYERS * (2 * h * h + 9 * h * h) + 4 * h * target.vocab_size
    return MATMUL_FLOPS * TRAIN_SHARE / (BLOCK_TOKENS * operations)


def inodes_of_a_shard() -> int:
    """Folder, tokens, layers folder, commit; five for each array: folder, zarr.json, c, 0, 0."""
    return 4 + 5 * (LAYERS + 1)


def files_of_a_shard() -> int:
    """Objects of an object store: tokens, commit, and zarr.json and data of each array."""
    return 2 + 2 * (LAYERS + 1)


def page() -> str:
    """The whole page as Markdown."""
    return "\n".join(
        [INTRO, *_token_table(), *_store_table(), *_time_table(), *_catalog(), CONCLUSIONS]
    )


def _token_table() -> list[str]:
    lines = [
        "## One token, one GPU",
        "",
        "```",
        "bytes = layers * (hidden * bits / 8 + 4) + 5          4: scale; 5: token id and mask",
        "extract tok/s = TFLOP/s * share / (2 * active weights)",
        "train tok/s = TFLOP/s * share / (blocks * (6 * 5 * 11 * hidden^2 + 4 * hidden * vocab))",
        f"  blocks = 512 * 16 / 3072 = {BLOCK_TOKENS:.2f} trained positions for a sequence token",
        "network = tok/s * bytes",
        "```",
        "",
        "| target | bytes: bf16, fp8, int3 | extract tok/s | it writes | train tok/s | it reads |",
        "|---|---|---|---|---|---|",
    ]
    for target in TARGETS:
        sizes = ", ".join(f"{token_bytes(target, encoding):,.0f}" for encoding in BITS)
        fp8 = token_bytes(target, "fp8")
        extract, train = extract_rate(target), train_rate(target)
        lines.append(
            f"| {target.name} | {sizes} | {extract:,.0f} | {extract * fp8 / 1e6:,.0f} MB/s |"
            f" {train:,.0f} | {train * fp8 / 1e6:,.0f} MB/s |"
        )
    return [
        *lines,
        "",
        "Written and read are fp8 states; int3, the default, takes 0.4 of that.",
        "A node of eight training GPUs reads eight times the",
        "last column: within one 100 Gb/s link (12.5 GB/s) in every row. Drafters on one host that",
        "share seed and order read a shard once from the network, then from the page cache.",
        "",
    ]


def _store_table() -> list[str]:
    lines = [
        "## The store",
        "",
        "```",
        "bytes = sequences * tokens * bytes of a token;  shards = bytes / shard_bytes",
        f"inodes = shards * (4 + 5 * (layers + 1)) = shards * {inodes_of_a_shard()};  "
        f"objects on S3 = shards * (2 + 2 * (layers + 1)) = shards * {files_of_a_shard()}",
        "```",
        "",
        "| target | sequences | fp8 | int3 | shards (fp8) | inodes | objects |",
        "|---|---|---|---|---|---|---|",
    ]
    for target in TARGETS:
        for sequences in SEQUENCES:
            num_tokens = sequences * SEQUENCE_TOKENS
            fp8, int3 = (num_tokens * token_bytes(target, name) for name in ("fp8", "int3"))
            shards = fp8 / SHARD_BYTES
            lines.append(
                f"| {target.name} | {_count(sequences)} | {_bytes(fp8)} | {_bytes(int3)} |"
                f" {_count(shards)} | {_count(shards * inodes_of_a_shard())} |"
                f" {_count(shards * files_of_a_shard())} |"
            )
    return [
        *lines,
        "",
        "Inodes grow with shards, not with sequences: a shard of 1 GB holds 24 to 48 sequences. At",
        "100 M sequences raise `store.shard_bytes` to 10 GB: a tenth of the files, while a killed",
        "worker still loses no more than a minute or two of one GPU.",
        "",
    ]


def _time_table() -> list[str]:
    lines = [
        "## Days and nodes",
        "",
        "```",
        "GPU-days = sequences * tokens / tok/s / 86,400;  "
        f"nodes = GPU-days / ({GPUS_OF_A_NODE} * {DAYS} days)",
        "```",
        "",
        f"| target | sequences | extract GPU-days | nodes for {DAYS} days | one epoch, one drafter:"
        f" GPU-days | nodes for {DAYS} days |",
        "|---|---|---|---|---|---|",
    ]
    for target in TARGETS:
        for sequences in SEQUENCES:
            num_tokens = sequences * SEQUENCE_TOKENS
            cells = []
            for rate in (extract_rate(target), train_rate(target)):
                gpu_days = num_tokens / rate / 86_400
                nodes = gpu_days / GPUS_OF_A_NODE / DAYS
                cells += [f"{gpu_days:,.1f}", f"{nodes:,.0f}" if nodes >= 10 else f"{nodes:.2g}"]
            lines.append(f"| {target.name} | {_count(sequences)} | {' | '.join(cells)} |")
    return [*lines, ""]


def _catalog() -> list[str]:
    """Measured: what a trainer does before its first step."""
    lines = [
        "## Catalog and order, measured",
        "",
        "| sequences | shards | open and shuffle an epoch | peak memory |",
        "|---|---|---|---|",
    ]
    for sequences, shards, seconds, gigabytes in OPENING:
        lines.append(
            f"| {_count(sequences)} | {_count(shards)} | {seconds:.3g} s | {gigabytes:.2g} GB |"
        )
    per_sequence, planned_bytes = PLANNING
    return [
        *lines,
        "",
        "A catalog file takes 41 bytes a sequence, with ids of 21 characters; planning reads 8 of",
        "them. A trainer plans an epoch, which sequences in which order and batch, in"
        f" {per_sequence * 1e6:.2f} us and {planned_bytes} bytes",
        f"a sequence: {per_sequence * 1e8:.0f} s and {planned_bytes * 1e8 / 1e9:.1f} GB for 100 M.",
        "It packs them in segments of 16,384, all at the same time.",
        "",
        f"On S3 a shard of {SHARD_BYTES / 1e9:.0f} GB costs about {PUTS_OF_A_SHARD} requests once,"
        f" a sequence {3 + LAYERS} in each epoch",
        "([how they are counted](object-storage.md#requests)), few with a cache on the node.",
        "",
    ]


def _bytes(value: float) -> str:
    for unit, size in (("PB", 1e15), ("TB", 1e12)):
        if value >= size:
            return f"{value / size:,.1f} {unit}"
    return f"{value / 1e9:,.0f} GB"


def _count(value: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= size:
            return f"{value / size:,.3g} {unit}"
    return f"{value:,.0f}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
