"""Paths of a run file: where relative ones start.

Those written in a run file start at its folder, those given with `--set` at the working folder.
What a preset writes goes there, too: the preset itself lies among the program's files.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Anchor = Callable[[str], str]

_ONE_SLASH = re.compile(r"[a-z][a-z0-9]+:/(?!/)")


def with_absolute_paths(
    tables: Mapping[str, Any], *, inputs_dir: Path, outputs_dir: Path
) -> dict[str, Any]:
    """A run file's tables with every relative path made absolute; other values are left alone.

    Values of a wrong type are left for the check of the settings; an empty path, and a URL with one
    slash, are ValueErrors.

    Args:
        tables: As read from TOML.
        inputs_dir: Where paths of what is read start.
        outputs_dir: Where paths of what is written start.
    """

    def read(path: str) -> str:
        return str(inputs_dir / Path(path).expanduser())

    def write(path: str) -> str:
        if _ONE_SLASH.match(path):
            raise ValueError(f"{path}: a URL has two slashes, such as s3://bucket/prefix")
        return path if is_url(path) else str(outputs_dir / Path(path).expanduser())

    def model(name: str) -> str:
        is_path = name.endswith(".gguf") or _is_folder(name, inputs_dir)
        return read(name) if is_path else name

    def suite(name: str) -> str:
        return read(name) if name.endswith(".jsonl") else name

    def start(name: str) -> str:
        return name if name in ("fresh", "target") else read(name)

    changed = dict(tables)
    changed = _changed(changed, "run_dir", write)
    for table, key, anchor in (
        ("target", "model", model),
        ("data", "conversations", read),
        ("store", "dir", write),
        ("regenerate", "prompts", read),
        ("regenerate", "output", write),
        ("eval", "suites", suite),
    ):
        if isinstance(changed.get(table), dict):
            changed[table] = _changed(changed[table], key, anchor)
    if isinstance(changed.get("drafter"), list):
        changed["drafter"] = [
            _with_cache_dir(_changed(each, "init_from", start), write)
            if isinstance(each, dict)
            else each
            for each in changed["drafter"]
        ]
    return _with_cache_dir(changed, write)


def _with_cache_dir(table: dict[str, Any], anchor: Anchor) -> dict[str, Any]:
    """The run's tables, or a drafter's, with `train.read_cache_dir` changed."""
    train = table.get("train")
    if not isinstance(train, dict):
        return table
    return {**table, "train": _changed(train, "read_cache_dir", anchor)}


def is_url(place: str) -> bool:
    """Whether a place is an object store's."""
    return "://" in place


def _is_folder(name: str, folder: Path) -> bool:
    """Whether a target's name is a path: it looks like one, or a folder of that name is there."""
    return name.startswith((".", "~", "/")) or (":" not in name and (folder / name).is_dir())


def _changed(table: Mapping[str, Any], key: str, anchor: Anchor) -> dict[str, Any]:
    """A table with the text, or the list of texts, under a key changed.

    Raises:
        ValueError: A text is empty, as `--set` leaves it for an unset variable of the shell: it
            would stand for the working folder.
    """
    value = table.get(key)
    if value == "" or (isinstance(value, list) and "" in value):
        raise ValueError(f"{key} is empty; give a path, or leave the setting out")
    if isinstance(value, str):
        return {**table, key: anchor(value)}
    if isinstance(value, list):
        return {**table, key: [anchor(each) if isinstance(each, str) else each for each in value]}
    return dict(table)
