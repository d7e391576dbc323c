"""What one host of eight GPUs should do, predicted from rates measured on one GPU.

    python benchmarks/simulate_host.py [--shape wide|qwen3-8b] [--bytes-per-value 1.0]
        [--disk-gb-s 2.2] [--page-cache-gb 400] [--sequences 30000] [--json OUT.json]

Five workers extract, three drafters train: while the store grows, alone, and one, two, three at
once; then one drafter over several GPUs, and a target over two. GPUs share nothing but the disk and
the page cache, so that is what is simulated, second by second; a GPU's own rate is the measured one
(the last of its name in results.jsonl), scaled by arithmetic to the shape. To be held against the
run on the real host, `docs/eight-gpus.md`.

Assumed, not measured: the page cache forgets what was used longest ago, drafters read in orders of
their own, the disk serves everybody alike, and a collective moves `--nccl-gb-s` on each GPU.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from shapes import SHAPES, Shape
from stage2_step import architecture_of

from stage2_train.flops import step_flops

RESULTS = Path(__file__).with_name("results.jsonl")
ANCHORS = 512
# The seed system's aggregate on other hardware: five targets and three drafters in one process.
SEED_TOK_S = {"measured": 12_800.0, "expected": 20_000.0}


@dataclass(frozen=True, kw_only=True)
class Host:
    """What the processes of one host share."""

    disk_bytes_s: float
    """Bytes that the store's disk moves in a second, reads and writes together."""
    page_cache_bytes: float
    """Memory that keeps what was last read or written."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """A worker that writes, or a drafter that reads."""

    name: str
    tok_s: float
    """Tokens a second while it waits for nothing."""
    bytes_per_token: float
    is_writer: bool


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one process did in one phase."""

    name: str
    tok_s: float
    waiting: float
    """Share of time in which it had to wait for the disk."""
    disk_gb_s: float


def share_out(wanted: Sequence[float], capacity: float) -> list[float]:
    """Give each what it wants, or an equal share of what those leave who want less."""
    given = [0.0] * len(wanted)
    open_places = sorted(range(len(wanted)), key=lambda place: wanted[place])
    left = capacity
    while open_places:
        place = open_places.pop(0)
        given[place] = min(wanted[place], left / (len(open_places) + 1))
        left -= given[place]
    return given


def simulate(
    host: Host,
    processes: Sequence[Process],
    *,
    stored_bytes: float,
    seconds: int,
) -> list[Outcome]:
    """Run the processes side by side, second by second.

    Args:
        host: what they share.
        processes: workers and drafters.
        stored_bytes: size of the store when they start; it grows by what workers write.
        seconds: time simulated.
    """
    tokens = [0.0] * len(processes)
    disk = [0.0] * len(processes)
    for _ in range(seconds):
        kept = min(1.0, host.page_cache_bytes / stored_bytes) if stored_bytes else 1.0
        from_disk = [1.0 if each.is_writer else 1.0 - kept for each in processes]
        wanted = [
            each.tok_s * each.bytes_per_token * share
            for each, share in zip(processes, from_disk, strict=True)
        ]
        given = share_out(wanted, host.disk_bytes_s)
        for place, each in enumerate(processes):
            part = given[place] / wanted[place] if wanted[place] else 1.0
            tokens[place] += each.tok_s * part
            disk[place] += given[place]
            if each.is_writer:
                stored_bytes += given[place]
    return [
        Outcome(
            name=each.name,
            tok_s=tokens[place] / seconds,
            waiting=max(0.0, 1.0 - tokens[place] / seconds / each.tok_s),
            disk_gb_s=disk[place] / seconds / 1e9,
        )
        for place, each in enumerate(processes)
    ]


def measured(name: str) -> float:
    """Give the last recorded value of a figure.

    Raises:
        ValueError: it was never recorded.
    """
    records = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    values = [float(record["value"]) for record in records if record["name"] == name]
    if not values:
        raise ValueError(f"{RESULTS.name} has no {name}; run its benchmark, or give the rate")
    return values[-1]


def target_flops_per_token(shape: Shape, *, context: int) -> float:
    """Operations of the target's forward pass, a token, up to its last captured layer."""
    last_layer = max(architecture_of(shape).target_layer_ids) + 1
    query = shape.num_heads * shape.head_dim
    key_value = 2 * shape.num_kv_heads * shape.head_dim
    weights = shape.hidden_size * (2 * query + key_value + 3 * shape.intermediate_size)
    return last_layer * (2.0 * weights + 4.0 * query * context / 2)


def drafter_flops_per_token(shape: Shape) -> float:
    """Operations of a training step, a sequence token."""
    tokens, block = shape.sequence_tokens, shape.block_size
    return (
        step_flops(
            architecture_of(shape),
            num_context_tokens=tokens,
            num_blocks=ANCHORS,
            num_rows=ANCHORS * (block - 1),
            num_seen_pairs=ANCHORS * block * (tokens // 2 + block),
        )
        / tokens
    )


def drafter_gradient_bytes(shape: Shape) -> float:
    """Bytes of a drafter's bf16 gradients."""
    query = shape.num_heads * shape.head_dim
    key_value = 2 * shape.num_kv_heads * shape.head_dim
    layer = shape.hidden_size * (2 * query + key_value + 3 * shape.intermediate_size)
    return 2.0 * shape.num_layers * (layer + shape.hidden_size**2)


def data_parallel_tok_s(shape: Shape, tok_s: float, *, num_gpus: int, nccl_bytes_s: float) -> float:
    """Rate of one drafter over several GPUs, a sequence each a step, gradients sent at its end."""
    step_s = shape.sequence_tokens / tok_s
    sent = 2.0 * (num_gpus - 1) / num_gpus * drafter_gradient_bytes(shape)
    return num_gpus * shape.sequence_tokens / (step_s + sent / nccl_bytes_s)


def tensor_parallel_tok_s(
    shape: Shape, tok_s: float, *, num_gpus: int, nccl_bytes_s: float
) -> float:
    """Rate of one target over several GPUs: two sums of the hidden states a layer, in bf16."""
    last_layer = max(architecture_of(shape).target_layer_ids) + 1
    sent = 2.0 * last_layer * 2.0 * shape.hidden_size * 2.0 * (num_gpus - 1) / num_gpus
    return 1.0 / (1.0 / (num_gpus * tok_s) + sent / nccl_bytes_s)


def rates(arguments: argparse.Namespace, shape: Shape) -> tuple[float, float]:
    """Tokens a second of one worker and of one drafter that wait for nothing."""
    known = SHAPES["qwen3-8b"]
    extract = arguments.extract_tok_s or measured("stage1_store_tok_s") * (
        target_flops_per_token(known, context=known.sequence_tokens)
        / target_flops_per_token(shape, context=shape.sequence_tokens)
    )
    train = arguments.train_tok_s or measured("stage2_step_bf16_tok_s") * (
        drafter_flops_per_token(known) / drafter_flops_per_token(shape)
    )
    return extract, train


def phases(arguments: argparse.Namespace, shape: Shape) -> dict[str, list[Outcome]]:
    """Simulate every phase of the run on the host."""
    extract_tok_s, train_tok_s = rates(arguments, shape)
    bytes_per_token = shape.num_layers * shape.hidden_size * arguments.bytes_per_value
    host = Host(
        disk_bytes_s=arguments.disk_gb_s * 1e9, page_cache_bytes=arguments.page_cache_gb * 1e9
    )

    def workers(count: int) -> list[Process]:
        return [
            Process(
                name=f"worker {number}",
                tok_s=extract_tok_s,
                bytes_per_token=bytes_per_token,
                is_writer=True,
            )
            for number in range(count)
        ]

    def drafters(count: int) -> list[Process]:
        return [
            Process(
                name=f"drafter {number}",
                tok_s=train_tok_s,
                bytes_per_token=bytes_per_token,
                is_writer=False,
            )
            for number in range(count)
        ]

    whole = arguments.sequences * shape.sequence_tokens * bytes_per_token
    begun = whole / 20
    plans = {
        "extract, one worker": (workers(1), 0.0),
        "extract, five workers": (workers(5), 0.0),
        "three drafters while five workers extract": (workers(5) + drafters(3), begun),
        "train, one drafter": (drafters(1), whole),
        "train, two drafters": (drafters(2), whole),
        "train, three drafters": (drafters(3), whole),
    }
    return {
        name: simulate(host, processes, stored_bytes=stored, seconds=arguments.seconds)
        for name, (processes, stored) in plans.items()
    }


def show(found: dict[str, list[Outcome]], arguments: argparse.Namespace, shape: Shape) -> None:
    """Print the table and what follows from it."""
    table = Table(title=f"Predicted: {arguments.shape}, eight GPUs")
    columns = ("phase", "who", "tok/s each", "together", "waiting", "disk GB/s")
    for column in columns:
        table.add_column(column)
    for phase, outcomes in found.items():
        for kind in ("worker", "drafter"):
            alike = [each for each in outcomes if each.name.startswith(kind)]
            if alike:
                table.add_row(
                    phase,
                    f"{len(alike)} x {kind}",
                    f"{alike[0].tok_s:,.0f}",
                    f"{sum(each.tok_s for each in alike):,.0f}",
                    f"{alike[0].waiting:.1%}",
                    f"{sum(each.disk_gb_s for each in alike):.2f}",
                )
    console = Console()
    console.print(table)
    extract_tok_s, train_tok_s = rates(arguments, shape)
    nccl = arguments.nccl_gb_s * 1e9
    parallel = data_parallel_tok_s(shape, train_tok_s, num_gpus=3, nccl_bytes_s=nccl)
    console.print(
        f"one drafter over three GPUs: {parallel:,.0f} tok/s, {parallel / train_tok_s:.2f}x one"
    )
    tensor = tensor_parallel_tok_s(shape, extract_tok_s, num_gpus=2, nccl_bytes_s=nccl)
    console.print(
        f"one target over two GPUs: {tensor:,.0f} tok/s, {tensor / extract_tok_s:.2f}x one"
    )
    both = found["three drafters while five workers extract"]
    trained = sum(each.tok_s for each in both if each.name.startswith("drafter"))
    console.print(
        f"three drafters beside extraction: {trained:,.0f} tok/s; the seed system, on other GPUs: "
        f"{SEED_TOK_S['measured']:,.0f} measured, {SEED_TOK_S['expected']:,.0f} expected"
    )


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="wide")
    parser.add_argument("--bytes-per-value", type=float, default=1.0, help="1 is fp8 or int8")
    parser.add_argument("--disk-gb-s", type=float, default=2.2)
    parser.add_argument("--page-cache-gb", type=float, default=400.0)
    parser.add_argument("--nccl-gb-s", type=float, default=300.0)
    parser.add_argument("--sequences", type=int, default=30_000, help="size of the whole store")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--extract-tok-s", type=float, help="of one worker; default: measured")
    parser.add_argument("--train-tok-s", type=float, help="of one drafter; default: measured")
    parser.add_argument("--json", type=Path, help="also write the outcomes here")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    found = phases(arguments, shape)
    show(found, arguments, shape)
    if arguments.json is not None:
        rows = {name: [asdict(each) for each in outcomes] for name, outcomes in found.items()}
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
