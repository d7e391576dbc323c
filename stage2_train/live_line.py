"""The lines a person reads while a drafter trains, and their warnings in words. Pure."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

# Above this share of a step the reader, not the arithmetic, sets the pace.
BAD_WAIT_FRACTION = 0.05
# Below this, a noticeable part of the arithmetic is padding.
GOOD_FILL_FRACTION = 0.85
# Below this, a step is so small that handing over a batch shows in it.
SHORT_STEP_S = 0.05
# Below this, one larger batch of a neighbour, or a validation, no longer fits a GPU.
LITTLE_MEMORY_FRACTION = 0.02


def live_line(record: Mapping[str, Any], *, total_steps: int) -> str:
    """Gives the line a person reads: what is learned, how fast, and what holds it up."""
    first_offsets = record["accuracy_by_offset"][:4]
    offsets = " ".join(f"{value:.2f}".removeprefix("0") for value in first_offsets)
    left_s = (total_steps - record["step"]) * record["step_s"]
    # The first step waited for the compiler; it says nothing of the others.
    is_known = left_s > 0 and record.get("first_report_s") is None
    left = f" {time_words(left_s)} left" if is_known else ""
    line = (
        f"step {record['step']}/{total_steps} {record['step_s'] * 1e3:.0f}ms{left} "
        f"loss {record['loss']:.3f} acc {offsets} "
        f"sim {record['simulated_acceptance_length']:.2f} | "
        f"{thousands(record['tokens_per_s'])} tok/s "
        f"{thousands(record['block_tokens_per_s'])} block tok/s, "
        f"{count_words(record['num_tokens_seen'])} tokens seen | "
        f"{execution_words(record)} | wait {record['wait_fraction']:.1%} "
        f"copy {record['copy_fraction']:.1%} compute {record['compute_fraction']:.1%} "
        f"read {byte_rate(record['read_bytes_per_s'])}"
    )
    if "memory_peak_bytes" in record:
        line += (
            f" | mem {record['memory_peak_bytes'] / 2**30:.0f}"
            f"/{record['memory_total_bytes'] / 2**30:.0f} GiB"
            f" free {record['memory_free_bytes'] / 2**30:.0f} retries {record['memory_retries']}"
        )
    if record.get("first_report_s") is not None:
        line += f" | {record['first_report_s']:.0f} s after start"
    warnings = warning_words(record)
    return f"{line} | {warnings}" if warnings else line


def warning_words(record: Mapping[str, Any]) -> str:
    """Says in words which numbers of a record are bad, and what to do; empty where none is."""
    words = []
    is_first = record.get("first_report_s") is not None  # The first batch is always waited for.
    is_slow = record["wait_fraction"] > BAD_WAIT_FRACTION and record["step_s"] > SHORT_STEP_S
    if is_slow and not is_first:
        words.append(
            f"waiting for data {record['wait_fraction']:.0%}: the store gives "
            f"{byte_rate(record['read_bytes_per_s'])}, this drafter needs "
            f"{byte_rate(record['read_bytes_per_s_needed'])}: a faster disk, or a smaller encoding"
        )
    if record["block_fill_fraction"] < GOOD_FILL_FRACTION:
        words.append(
            f"only {record['block_fill_fraction']:.0%} of the blocks are real: the data has fewer "
            "supervised positions than train.num_anchors"
        )
    if record["token_fill_fraction"] < GOOD_FILL_FRACTION:
        words.append(
            f"only {record['token_fill_fraction']:.0%} of a batch are tokens: "
            "train.batch_tokens suits other lengths"
        )
    if record.get("memory_retries"):
        words.append("the GPU's memory is nearly full: allocations were tried again")
    elif "memory_free_bytes" in record:
        free_bytes, total_bytes = record["memory_free_bytes"], record["memory_total_bytes"]
        if free_bytes < LITTLE_MEMORY_FRACTION * total_bytes:
            words.append(
                f"the GPU's memory is nearly full: {free_bytes / 2**30:.1f} GiB are left by all "
                "that run on it; lower train.batch_tokens or train.num_anchors"
            )
    # What was compiled is counted where compiling is wanted.
    if "num_compiles" in record and record["execution"] != "compiled":
        words.append(
            f"only {record['num_compiled_steps']} of these steps ran compiled code: slower, and no "
            "setting of yours; please report it with this log"
        )
    return "; ".join(words)


def execution_words(record: Mapping[str, Any]) -> str:
    """Says how the steps ran, what was compiled for them, and how well they used the GPU."""
    words = str(record["execution"])
    if "num_compiles" in record:
        words += (
            f", compiles {record['num_compiles']} (cold {record['num_compiles_cold']} "
            f"disk {record['num_compiles_cached']}) breaks {record['num_graph_breaks']}"
        )
    if "mfu_fraction" in record:
        words += f" | MFU {record['mfu_fraction']:.2f}"
    return words


def validation_line(step: int, validation: Mapping[str, Any]) -> str:
    """Gives the line of a validation."""
    if not validation:
        return f"step {step} validation: nothing is held out"
    line = (
        f"step {step} held out: loss {validation['loss']:.3f} "
        f"accuracy {validation['accuracy']:.3f} "
        f"sim {validation['simulated_acceptance_length']:.2f}"
    )
    if "acceptance_length" in validation:
        line += (
            f" acceptance length {validation['acceptance_length']:.3f} "
            f"on {validation['num_walked']} greedy answers"
        )
    return line


def epoch_words(
    lengths: Int[np.ndarray, "sequences"],
    *,
    num_batches: int,
    batch_tokens: int,
    window_tokens: int | None = None,
) -> str:
    """Gives what an epoch trains, and whether some sequences are too long to be trained whole."""
    setting, window = "batch_tokens", batch_tokens
    if window_tokens is not None:
        setting, window = "window_tokens", window_tokens
    num_tokens = int(np.minimum(lengths, window).sum())
    words = (
        f"{len(lengths):,} sequences, {count_words(num_tokens)} tokens in {num_batches:,} batches"
    )
    num_long = int((lengths > window).sum())
    if num_long:
        words += (
            f"; {num_long:,} sequences are longer than train.{setting} = {window:,}: of each a "
            "window of so many tokens is trained, another one each epoch"
        )
    return words


def thousands(value: float) -> str:
    """Gives a rate in few characters."""
    return f"{value / 1e3:.1f}k" if value >= 1e3 else f"{value:.0f}"


def count_words(count: int) -> str:
    """Gives a count in few characters: 950, 12.3 K, 4.6 M, 1.2 B."""
    for size, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.1f} {name}"
    return str(count)


def byte_rate(bytes_per_s: float) -> str:
    """Gives a rate of bytes in few characters."""
    is_large = bytes_per_s >= 1e8
    return f"{bytes_per_s / (1e9 if is_large else 1e6):.2g} {'GB' if is_large else 'MB'}/s"


def time_words(seconds: float) -> str:
    """A time in few characters: 40 s, 12 min, 3.5 h, 2.1 days."""
    for size, name in ((86_400.0, "days"), (3600.0, "h")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
