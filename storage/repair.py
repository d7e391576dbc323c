"""Mend a store: take damaged shards out so that they are refilled, remove what nobody reads."""

import itertools
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from storage import layout
from storage.commits import read_added, read_commit
from storage.errors import DamagedShardError
from storage.files import Files, LocalFiles
from storage.identity import read_identity
from storage.places import files_at
from storage.records import create_record
from storage.schema import UnitId
from storage.verify import Problem, damaged_units


def bury_damaged(store_dir: str | Path, problems: Iterable[Problem]) -> list[UnitId]:
    """Gives each damaged shard a tombstone; the next plan refills its sequences.

    Data stays where it is: trainers that hold an older snapshot keep reading what is whole.

    Args:
        store_dir: the store.
        problems: of `verify_store`; those that concern no shard are passed over.
    """
    files = files_at(store_dir)
    problems = list(problems)
    units = sorted(damaged_units(problems))
    for unit in units:
        messages = [str(problem) for problem in problems if problem.shard == str(unit)]
        create_record(files, layout.tombstone(unit), {"unit": str(unit), "problems": messages})
    return units


def collect_garbage(store_dir: str | Path, *, older_than_s: float = 86_400.0) -> list[str]:
    """Removes attempts that no commit names and unfinished files; returns their paths.

    Args:
        store_dir: the store.
        older_than_s: only what was last written, or replaced by a newer catalog file, so long
            ago, in seconds. Choose it above the time a worker needs for a unit, for younger ones
            may still be written.

    Raises:
        StoreNotFoundError: there is no store; nothing of such a place is touched.
    """
    files = files_at(store_dir)
    read_identity(files)
    return collect_garbage_of(files, older_than_s=older_than_s)


def collect_garbage_of(files: Files, *, older_than_s: float) -> list[str]:
    """`collect_garbage` of a store that is open."""
    before = time.time() - older_than_s
    removed = []
    for path in _orphaned_attempts(files):
        if files.last_written(path) <= before:
            files.remove_tree(path)
            removed.append(path)
    for path in _unfinished_files(files):
        if files.last_written(path) <= before:
            files.remove(path)
            removed.append(path)
    catalogs = [layout.catalog(name) for name in files.names(layout.CATALOG)]
    for old, newer in itertools.pairwise(catalogs):
        if files.last_written(newer) <= before:
            files.remove(old)
            removed.append(old)
    return removed


def _orphaned_attempts(files: Files) -> Iterator[str]:
    """Attempts that no record names, each looked up when its turn comes.

    A copy that is resumed may commit an old attempt at any time.
    """
    for fan_out in files.names(layout.SHARDS):
        for name in files.names(f"{layout.SHARDS}/{fan_out}"):
            unit_text, _, attempt = name.partition(".")
            if not _may_be_in_use(files, UnitId.parse(unit_text), attempt):
                yield f"{layout.SHARDS}/{fan_out}/{name}"


def _may_be_in_use(files: Files, unit: UnitId, attempt: str) -> bool:
    """Whether a record of the unit names the attempt, or cannot be asked any more."""
    try:
        records = [read_commit(files, unit), *read_added(files, unit)]
    except FileNotFoundError:
        return False
    except DamagedShardError:
        return True
    return attempt in {record.attempt for record in records}


def _unfinished_files(files: Files) -> Iterator[str]:
    """Files that were being created; objects appear whole, so object stores have none."""
    if not isinstance(files, LocalFiles):
        return
    for folder, _, names in os.walk(files.root):
        for name in names:
            if name.startswith(layout.TEMPORARY):
                yield os.path.relpath(Path(folder, name), files.root)
