"""A run's plan as tables for people and as JSON for programs."""

from typing import Any

from rich.console import Console
from rich.table import Table

from dflash_offline.plan import ExtractionPlan, RunPlan
from dflash_offline.plan_training import TrainingPlan
from stage1_extract.plan_room import in_units

SMALL_DATA_SEQUENCES = 10_000
"""Sequences below which a drafter of use was never trained: 5,000 gave an acceptance of 1.47."""


def print_plan(plan: RunPlan) -> None:
    """Prints both stages, then whether it fits and what else would."""
    console = Console()
    console.print(_extraction_table(plan.extraction), _encoding_table(plan.extraction), sep="\n")
    console.print(_training_table(plan.training))
    for line in verdict(plan.extraction):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def verdict(extraction: ExtractionPlan) -> list[str]:
    """Whether the store fits, the ways to fit if not, and what deserves a warning."""
    lines = [f"does not fit: {extraction.problem}"] if extraction.problem else ["fits"]
    if extraction.count.num_sequences < SMALL_DATA_SEQUENCES:
        lines.append(
            f"small data: {extraction.count.num_sequences:,} sequences try a pipeline out; a"
            " drafter of use takes some hundred thousand that the target answered itself"
        )
    if extraction.worker_tokens_per_s is None:
        lines.append(f"no rate is known for {extraction.device}: use --measure")
    return lines


def plan_as_json(plan: RunPlan) -> dict[str, Any]:
    """The plan as plain values: sizes in bytes, rates a second."""
    extraction = plan.extraction
    count, size, room = extraction.count, extraction.size, extraction.room
    return {
        "target": {"name": extraction.target, "num_parameters": extraction.num_parameters},
        "data": {
            "num_conversations": count.num_conversations,
            "num_counted": count.num_counted,
            "num_sequences": count.num_sequences,
            "num_tokens": count.num_tokens,
            "num_tokens_error": count.num_tokens_error,
            "num_truncated": count.num_truncated,
            "longest_tokens": count.longest_tokens,
            "unusable": dict(count.unusable),
        },
        "store": {
            "layers": list(extraction.shape.layers),
            "encoding": extraction.shape.encoding,
            "token_bytes": extraction.shape.state_bytes,
            "num_bytes": size.num_bytes,
            "num_bytes_error": size.num_bytes_error,
            "bytes_by_encoding": extraction.bytes_by_encoding,
            "num_shards": size.num_shards,
            "num_inodes": size.num_inodes,
            "num_objects": size.num_objects,
            "free_bytes": room.free_bytes,
            "free_inodes": room.free_inodes,
            "max_bytes": room.max_bytes,
            "fits": extraction.problem is None,
            "problem": extraction.problem,
            "ways": [
                {"setting": way.setting, "num_bytes": way.num_bytes} for way in extraction.ways
            ],
        },
        "extract": {
            "device": extraction.device,
            "num_workers": extraction.num_workers,
            "worker_tokens_per_s": extraction.worker_tokens_per_s,
            "is_measured": extraction.is_measured,
            "hours": extraction.hours,
            "write_bytes_per_s": extraction.write_bytes_per_s,
            "worker_device_bytes": extraction.memory.device_bytes,
            "worker_host_bytes": extraction.memory.host_bytes,
        },
        "train": [
            {
                "drafter": each.name,
                "num_parameters": each.num_parameters,
                "memory_bytes": each.memory_bytes,
                "num_tokens": each.num_tokens,
                "tokens_per_s": each.tokens_per_s,
                "hours": each.hours,
                "read_token_bytes": each.read_token_bytes,
                "read_bytes_per_s": each.read_bytes_per_s,
            }
            for each in plan.training
        ],
    }


def _extraction_table(plan: ExtractionPlan) -> Table:
    count, size, shape, room = plan.count, plan.size, plan.shape, plan.room
    table = Table("", "", title="stage 1: extract", title_justify="left", show_header=False)
    table.add_row("target", f"{plan.target}, {plan.num_parameters / 1e9:.3g} B parameters")
    table.add_row("sequences", _sequences(plan))
    table.add_row("tokens", f"{count.num_tokens:,}{_error(count.num_tokens_error)}")
    table.add_row(
        "layers", f"{', '.join(shape.layers)} as {shape.encoding}, {shape.state_bytes:,} B a token"
    )
    table.add_row("store", f"{in_units(size.num_bytes)}{_error_bytes(size.num_bytes_error)}")
    is_on_disk = room.free_bytes is not None
    files = f"{size.num_inodes:,} inodes" if is_on_disk else f"{size.num_objects:,} objects"
    table.add_row("shards", f"{size.num_shards:,} ({files})")
    if room.free_bytes is not None:
        table.add_row("free disk", f"{in_units(room.free_bytes)} at {room.place}")
    if room.max_bytes is not None:
        table.add_row("extract.max_store_bytes", in_units(room.max_bytes))
    table.add_row("time", _extraction_time(plan))
    if plan.write_bytes_per_s is not None:
        table.add_row("disk must take", f"{in_units(plan.write_bytes_per_s)}/s")
    table.add_row(
        "memory of a worker",
        f"{in_units(plan.memory.device_bytes)} for the target and a batch,"
        f" {in_units(plan.memory.host_bytes)} for writing",
    )
    return table


def _sequences(plan: ExtractionPlan) -> str:
    count = plan.count
    text = f"{count.num_sequences:,} of {count.num_conversations:,} conversations"
    if not count.is_exact:
        text += f" ({count.num_counted:,} counted)"
    if count.num_truncated:
        text += f"; {count.num_truncated:,} truncated"
    if count.unusable:
        reasons = (f"{number} x {reason}" for reason, number in count.unusable.items())
        text += f"; unusable: {', '.join(reasons)}"
    return text


def _extraction_time(plan: ExtractionPlan) -> str:
    if plan.hours is None or plan.worker_tokens_per_s is None:
        return "unknown"
    source = (
        "measured"
        if plan.is_measured
        else "by the table, within a factor of two from 1 B parameters on"
    )
    return (
        f"{_hours(plan.hours)} on {plan.num_workers} x {plan.device},"
        f" {plan.worker_tokens_per_s:,.0f} tok/s each ({source})"
    )


def _encoding_table(plan: ExtractionPlan) -> Table:
    table = Table("encoding", "store", title="in other encodings", title_justify="left")
    for name, num_bytes in plan.bytes_by_encoding.items():
        chosen = " (chosen)" if name == plan.shape.encoding else ""
        table.add_row(name + chosen, in_units(num_bytes))
    for way in plan.ways:
        table.add_row(f"fits: {way.setting}", in_units(way.num_bytes))
    return table


def _training_table(plans: list[TrainingPlan]) -> Table:
    columns = ("drafter", "parameters", "memory", "tokens", "tok/s", "time", "reads")
    table = Table(*columns, title="stage 2: train", title_justify="left")
    for plan in plans:
        rate = plan.tokens_per_s
        reads = plan.read_bytes_per_s
        table.add_row(
            plan.name,
            f"{plan.num_parameters / 1e6:,.4g} M",
            in_units(plan.memory_bytes),
            f"{plan.num_tokens:,}",
            "unknown" if rate is None else f"{rate:,.0f}",
            "unknown" if plan.hours is None else _hours(plan.hours),
            "unknown" if reads is None else f"{in_units(reads)}/s",
        )
    return table


def _hours(hours: float) -> str:
    if hours < 1:
        return f"{hours * 60:.1f} min"
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"


def _error(tokens: int) -> str:
    return f" ± {tokens:,}" if tokens else ""


def _error_bytes(num_bytes: int) -> str:
    return f" ± {in_units(num_bytes)}" if num_bytes else ""
