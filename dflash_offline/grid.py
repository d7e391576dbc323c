"""A sweep in one table: a drafter with a grid stands for one drafter of each combination. Pure."""

import copy
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

GRID = "grid"


def expand_grids(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Gives the run file's tables with every drafter that has a grid replaced by its combinations.

    Combinations come in the order of the file: the last setting changes first. Their names are the
    drafter's own with the settings' names and values: `sweep.block_size-8.seed-1`. Two of one name
    are refused where names are checked.

    Raises:
        ValueError: a grid is not a table of lists, or a list is empty.
    """
    drafters = tables.get("drafter")
    if not isinstance(drafters, Sequence):
        return dict(tables)
    expanded = [one for drafter in drafters for one in _combinations(drafter)]
    return {**tables, "drafter": expanded}


def _combinations(drafter: Any) -> Iterator[Any]:
    grid = drafter.get(GRID) if isinstance(drafter, Mapping) else None
    if not grid:
        yield drafter
        return
    name = drafter.get("name", "")
    grid = dict(_flat(grid, name=name))
    for values in itertools.product(*grid.values()):
        one = copy.deepcopy({key: value for key, value in drafter.items() if key != GRID})
        chosen = dict(zip(grid, values, strict=True))
        for key, value in chosen.items():
            _set(one, key.split("."), value)
        one["name"] = ".".join([name, *(_label(key, value) for key, value in chosen.items())])
        yield one


def _flat(grid: Any, *, name: str, prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    """The lists of a grid by dotted setting; `train.seed = [0, 1]` may be written either way."""
    if not isinstance(grid, Mapping):
        raise ValueError(f"drafter {name}: grid must be a table of lists, found {grid!r}")
    for key, values in grid.items():
        if isinstance(values, Mapping):
            yield from _flat(values, name=name, prefix=f"{prefix}{key}.")
        elif isinstance(values, list) and values:
            yield prefix + key, values
        else:
            raise ValueError(
                f"drafter {name}: grid.{prefix}{key} must list the values to try, found {values!r}"
            )


def _set(table: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *parents, leaf = path
    for parent in parents:
        table = table.setdefault(parent, {})
    table[leaf] = value


def _label(key: str, value: Any) -> str:
    """The setting's own name and its value, in the characters that folder names may have."""
    text = "_".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"{key.rsplit('.', 1)[-1]}-{re.sub(r'[^A-Za-z0-9._-]', '_', text)}"
