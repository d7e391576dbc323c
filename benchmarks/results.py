"""Append measured figures to benchmarks/results.jsonl, and their table to benchmarks/RESULTS.md."""

import datetime
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def git_commit() -> str:
    """The commit the figures belong to, `+` when the tree differs from it."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=10"],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Installed versions, packages that are not there left out."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def command_line() -> str:
    """The command that runs, folders of this machine left out."""
    return shlex.join(["python", *(_relative(argument) for argument in sys.argv)])


def _relative(argument: str) -> str:
    path = Path(argument)
    if not path.is_absolute():
        return argument
    return str(path.relative_to(HERE.parent)) if path.is_relative_to(HERE.parent) else path.name


def provenance(packages: Iterable[str]) -> dict[str, Any]:
    """What says where a figure comes from: commit, date, command and versions, as of now."""
    return {
        "commit": git_commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "command": command_line(),
        "versions": versions_of(packages),
    }


def device_name() -> str:
    """What torch computes on here, in words."""
    # Imported here: most of what is measured on the store needs no torch.
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def record(
    title: str,
    figures: Mapping[str, tuple[float, str, str]],
    *,
    device: str,
    packages: Iterable[str] = ("numpy", "zarr", "torch"),
    measured: Mapping[str, Any] | None = None,
    only_print: bool = False,
) -> None:
    """Prints one run as a table under a heading, and appends it and one JSON line a figure.

    Args:
        title: what was measured.
        figures: (value, unit, note) by name.
        device: what it ran on, in words.
        packages: whose versions matter.
        measured: `provenance` of an earlier run elsewhere; None takes that of now.
        only_print: whether nothing is appended.
    """
    common = {"device": device, **(provenance(packages) if measured is None else measured)}
    rows = [f"| {n} | {v:.4g} | {u} | {note} |" for n, (v, u, note) in figures.items()]
    head = ["| figure | value | unit | note |", "|---|---|---|---|"]
    versions = ", ".join(f"{name} {number}" for name, number in common["versions"].items())
    about = f"{common['date']}, {device}, commit {common['commit']}, {versions}"
    text = "\n".join([f"## {title}", "", f"{about}; `{common['command']}`", "", *head, *rows, ""])
    print(text)
    if only_print:
        return
    with (HERE / "results.jsonl").open("a") as lines:
        for name, (value, unit, note) in figures.items():
            line = {"name": name, "value": value, "unit": unit, **common, "note": note}
            lines.write(json.dumps(line) + "\n")
    with (HERE / "RESULTS.md").open("a") as page:
        page.write(text + "\n")
