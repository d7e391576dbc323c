"""What a host of several GPUs should do, predicted from rates measured on one GPU.

    python benchmarks/simulate_host.py [--workers 5] [--drafters 3] [--shape wide|qwen3-8b]
        [--bytes-per-value 1.0] [--disk-gb-s 2.2] [--page-cache-gb 400] [--sequences 30000]
        [--scaled [--bf16]] [--json OUT.json]

Workers extract, drafters of several kinds train: while the store grows, alone, and one, two, ... at
once; then one drafter over several GPUs, and a target over two. GPUs share nothing but the disk and
the page cache, so that is what is simulated, second by second. A GPU's own rate is the last one in
results.jsonl that a worker, or a drafter of its kind, had alone at the shape. Without one, or with
`--scaled`, it is scaled by arithmetic from Qwen3-8B's shape: as good as those rows are new, and as
the two shapes use the GPU alike. Figures are named as `whole_host.py` names what it measures; where
results.jsonl holds one, it is printed beside.

Assumed, not measured: the page cache forgets what was used longest ago, drafters read in orders of
their own, the disk serves everybody alike, and a collective moves `--nccl-gb-s` on each GPU.
"""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from host_runs import DRAFTER_NAMES, DRAFTERS
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


def last_record(name: str) -> tuple[str, float] | None:
    """Name and value of the last figure whose name fits a regular expression."""
    records = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    fitting = [each for each in records if re.fullmatch(name, each["name"])]
    return (fitting[-1]["name"], float(fitting[-1]["value"])) if fitting else None


def last_measured(name: str) -> float | None:
    """The last recorded value of a figure, named by a regular expression; None without one."""
    found = last_record(name)
    return None if found is None else found[1]


def measured(name: str) -> float:
    """The last recorded value of a figure.

    Raises:
        ValueError: it was never recorded.
    """
    if (value := last_measured(name)) is None:
        raise ValueError(f"{RESULTS.name} has no {name}; run its benchmark, or give the rate")
    return value


def target_flops_per_token(shape: Shape, *, context: int) -> float:
    """Operations of the target's forward pass, a token, up to its last captured layer."""
    last_layer = max(architecture_of(shape).target_layer_ids) + 1
    query = shape.num_heads * shape.head_dim
    key_value = 2 * shape.num_kv_heads * shape.head_dim
    weights = shape.hidden_size * (2 * query + key_value + 3 * shape.intermediate_size)
    return last_layer * (2.0 * weights + 4.0 * query * context / 2)


def drafter_flops_per_token(shape: Shape, *, num_layers: int) -> float:
    """Operations of a training step, a sequence token."""
    tokens, block_size = shape.sequence_tokens, shape.block_size
    architecture = replace(
        architecture_of(shape),
        num_hidden_layers=num_layers,
        layer_types=architecture_of(shape).layer_types[:1] * num_layers,
    )
    flops = step_flops(
        architecture,
        num_context_tokens=tokens,
        num_blocks=ANCHORS,
        num_rows=ANCHORS * (block_size - 1),
        num_seen_pairs=ANCHORS * block_size * (tokens // 2 + block_size),
    )
    return flops / tokens


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


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Tokens a second of processes that wait for nothing."""

    worker: float
    eager_worker: float
    """Of a target that runs uncompiled, as one over several GPUs does."""
    drafters: dict[str, float]
    """By kind of drafter."""


def rates(arguments: argparse.Namespace, shape: Shape) -> Rates:
    """The rates of one GPU: as given, as measured at the shape, or scaled from Qwen3-8B's."""
    # Whole hosts have been measured at one shape.
    is_measured = arguments.shape == "wide" and not arguments.scaled
    worker = arguments.extract_tok_s
    if worker is None and is_measured:
        worker = last_measured(r"host_\d+_\d+_extract_1_extract_tok_s")
    if worker is None:
        known = SHAPES["qwen3-8b"]
        worker = measured("stage1_store_tok_s") * (
            target_flops_per_token(known, context=known.sequence_tokens)
            / target_flops_per_token(shape, context=shape.sequence_tokens)
        )
    eager = measured("stage1_forward_packed_eager_4") / measured("stage1_forward_packed_compiled_4")
    return Rates(
        worker=worker,
        eager_worker=worker * eager,
        drafters=drafter_rates(
            shape,
            deep=arguments.train_tok_s,
            is_measured=is_measured,
            step="stage2_step_bf16_tok_s" if arguments.bf16 else "stage2_step_fp8_all_tok_s",
        ),
    )


def drafter_rates(
    shape: Shape, *, deep: float | None, is_measured: bool, step: str
) -> dict[str, float]:
    """Tokens a second of each kind of drafter.

    Args:
        shape: its widths.
        deep: the rate of a deep one; None takes what is recorded.
        is_measured: whether to take the last run at the shape that had a deep one alone, and what
            other kinds had alone in that run.
        step: the figure that is scaled where nothing else is known.
    """
    run = None
    if deep is None and is_measured:
        found = last_record(r"host_\d+_\d+_alone_deep_train_tok_s")
        if found is not None:
            run, deep = found[0].removesuffix("_alone_deep_train_tok_s"), found[1]
    flops = {
        each["name"]: drafter_flops_per_token(shape, num_layers=each["num_layers"])
        for each in DRAFTERS
    }
    if deep is None:
        known = SHAPES["qwen3-8b"]
        known_flops = drafter_flops_per_token(known, num_layers=known.num_layers)
        deep = measured(step) * known_flops / flops["deep"]
    scaled = {name: deep * flops["deep"] / each for name, each in flops.items()}
    if run is None:
        return scaled
    return {
        name: last_measured(f"{run}_alone_{name}_train_tok_s") or rate
        for name, rate in scaled.items()
    }


def phases(arguments: argparse.Namespace, shape: Shape) -> dict[str, list[Outcome]]:
    """Simulate every window of the run on the host, by its name there."""
    found = rates(arguments, shape)
    bytes_per_token = shape.num_layers * shape.hidden_size * arguments.bytes_per_value
    host = Host(
        disk_bytes_s=arguments.disk_gb_s * 1e9, page_cache_bytes=arguments.page_cache_gb * 1e9
    )

    def processes(num_workers: int, num_drafters: int) -> list[Process]:
        names = [DRAFTER_NAMES[number % len(DRAFTERS)] for number in range(num_drafters)]
        workers = {f"worker {number}": found.worker for number in range(num_workers)}
        # More drafters than kinds: the kinds come again, with a number.
        drafters = {
            name if number < len(DRAFTERS) else f"{name} {number}": found.drafters[name]
            for number, name in enumerate(names)
        }
        return [
            Process(
                name=name,
                tok_s=tok_s,
                bytes_per_token=bytes_per_token,
                is_writer=name in workers,
            )
            for name, tok_s in (workers | drafters).items()
        ]

    whole = arguments.sequences * shape.sequence_tokens * bytes_per_token
    num_workers, num_drafters = arguments.workers, arguments.drafters
    plans = {
        f"extract_{count}": (processes(count, 0), 0.0) for count in sorted({1, num_workers})
    } | {"together": (processes(num_workers, num_drafters), whole / 20)}
    plans |= {
        f"train_{count}": (processes(0, count), whole) for count in range(1, num_drafters + 1)
    }
    return {
        name: simulate(host, running, stored_bytes=stored, seconds=arguments.seconds)
        for name, (running, stored) in plans.items()
    }


def predicted(arguments: argparse.Namespace, shape: Shape) -> dict[str, tuple[float, str]]:
    """Figures by the names that `whole_host.py` gives them, and what each is."""
    key = f"host_{arguments.workers}_{arguments.drafters}"
    figures: dict[str, tuple[float, str]] = {}
    for phase, outcomes in phases(arguments, shape).items():
        for stage, is_writer in (("extract", True), ("train", False)):
            alike = [each for each in outcomes if each.name.startswith("worker") == is_writer]
            if not alike:
                continue
            # One drafter alone is measured by its name.
            name = f"alone_{DRAFTER_NAMES[0]}" if phase == "train_1" else phase
            each = ", ".join(f"{one.name} {one.tok_s:,.0f}" for one in alike)
            waiting = max(one.waiting for one in alike)
            disk = sum(one.disk_gb_s for one in alike)
            about = f"{each}; waiting {waiting:.1%}, disk {disk:.2f} GB/s"
            figures[f"{key}_{name}_{stage}_tok_s"] = (sum(one.tok_s for one in alike), about)
    found, nccl = rates(arguments, shape), arguments.nccl_gb_s * 1e9
    deep = found.drafters[DRAFTER_NAMES[0]]
    for count in sorted({2, max(2, arguments.drafters)}):
        rate = data_parallel_tok_s(shape, deep, num_gpus=count, nccl_bytes_s=nccl)
        figures[f"host_ddp_{count}_tok_s"] = (rate, f"{rate / deep:.2f} times one GPU's")
    rate = tensor_parallel_tok_s(shape, found.eager_worker, num_gpus=2, nccl_bytes_s=nccl)
    figures["host_target_2_tok_s"] = (rate, f"eager; {rate / found.worker:.2f} times one GPU's")
    return figures


def show(figures: dict[str, tuple[float, str]], arguments: argparse.Namespace) -> None:
    """Print the table, with what was measured beside it, and what follows from it."""
    layout = f"{arguments.workers} workers, {arguments.drafters} drafters"
    table = Table(title=f"Predicted: {arguments.shape}, {layout}")
    for column in ("figure", "predicted", "measured", "ratio", "of which"):
        table.add_column(column, overflow="fold")
    for name, (value, about) in figures.items():
        real = last_measured(name)
        compared = ("", "") if real is None else (f"{real:,.0f}", f"{real / value:.2f}")
        table.add_row(name, f"{value:,.0f}", *compared, about)
    console = Console()
    console.print(table)
    trained, _ = figures[f"host_{arguments.workers}_{arguments.drafters}_together_train_tok_s"]
    console.print(
        f"drafters beside extraction: {trained:,.0f} tok/s; the seed system, on other GPUs: "
        f"{SEED_TOK_S['measured']:,.0f} measured, {SEED_TOK_S['expected']:,.0f} expected"
    )


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="wide")
    parser.add_argument("--workers", type=int, default=5, help="GPUs that extract")
    parser.add_argument("--drafters", type=int, default=3, help="GPUs that train, a drafter each")
    parser.add_argument("--bytes-per-value", type=float, default=1.0, help="1 is fp8 or int8")
    parser.add_argument("--disk-gb-s", type=float, default=2.2)
    parser.add_argument("--page-cache-gb", type=float, default=400.0)
    parser.add_argument("--nccl-gb-s", type=float, default=240.0)
    parser.add_argument("--sequences", type=int, default=30_000, help="size of the whole store")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument(
        "--scaled", action="store_true", help="rates from those of Qwen3-8B's shape"
    )
    parser.add_argument("--bf16", action="store_true", help="scale steps in bf16, not in fp8")
    parser.add_argument("--extract-tok-s", type=float, help="of one worker; default: measured")
    parser.add_argument("--train-tok-s", type=float, help="of one deep drafter; default: measured")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    figures = predicted(arguments, SHAPES[arguments.shape])
    show(figures, arguments)
    if arguments.json is not None:
        rows = {name: {"value": value, "note": note} for name, (value, note) in figures.items()}
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
