"""How an evaluation is told: a table, curves beside those of training, and an exit code.

The exit code says whether decoding was lossless.
"""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

EXIT_LOSSLESS, EXIT_NOT_LOSSLESS = 0, 1


def print_table(results: dict[str, dict[str, Any]]) -> None:
    """Prints one line for each drafter and suite."""
    table = Table(title="Real speculative decoding")
    for heading in ("drafter", "step", "suite", "prompts", "acceptance length", "untrained"):
        table.add_column(heading)
    for heading in ("lossless", "ties", "tokens/s target", "tokens/s drafted"):
        table.add_column(heading, justify="right")
    for name, result in results.items():
        for suite, found in result["suites"].items():
            low, high = found["acceptance_length_interval"]
            lossless = found["lossless_fraction"]
            table.add_row(
                name,
                str(result.get("step", "")),
                suite,
                str(found["num_prompts"]),
                f"{found['acceptance_length']:.3f} [{low:.3f}, {high:.3f}]",
                _untrained_cell(found.get("untrained")),
                "sampled" if lossless is None else f"{lossless:.1%}",
                str(found.get("num_ties", "")),
                f"{found['target_tokens_per_s']:.1f}",
                f"{found['drafted_tokens_per_s']:.1f}",
            )
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def log_decoding(drafter_dir: Path, result: Mapping[str, Any]) -> None:
    """Adds what a checkpoint reached to `decoded.jsonl` and TensorBoard.

    So real decoding has a curve beside those of the training, whose own log another process writes.

    Args:
        drafter_dir: the drafter's folder.
        result: as in `eval.json`, with the checkpoint's step.
    """
    from torch.utils.tensorboard import SummaryWriter

    reached = {name: found["acceptance_length"] for name, found in result["suites"].items()}
    record = {"time_s": time.time(), "step": result["step"], "settings": result["settings"]}
    with (drafter_dir / "decoded.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(record | {"acceptance_length": reached}) + "\n")
    with SummaryWriter(str(drafter_dir / "tensorboard")) as tensorboard:
        for name, length in reached.items():
            tensorboard.add_scalar(f"decoding/{name}", length, result["step"])


def _untrained_cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    low, high = found["acceptance_length_interval"]
    return f"{found['acceptance_length']:.3f} [{low:.3f}, {high:.3f}]"


def lossless_exit_code(results: dict[str, dict[str, Any]], *, tie_margin: float) -> int:
    """Gives 0 when every answer equals the target's own up to ties; else 1, and says where not."""
    judged = [
        (f"{prefix}{name}, {suite}", found)
        for name, result in results.items()
        for suite, trained in result["suites"].items()
        for prefix, found in (("", trained), ("untrained ", trained.get("untrained") or {}))
        if found.get("num_differing")
    ]
    for name, found in judged:
        print(
            f"{name}: {found['num_differing']} of {found['num_prompts']} answers differ from the "
            f"target's own where its top-2 margin is above {tie_margin}",
            file=sys.stderr,
        )
    return EXIT_NOT_LOSSLESS if judged else EXIT_LOSSLESS
