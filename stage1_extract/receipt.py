"""Receipt: that an extraction came to its end, so that the same one need not read its data again.

A finished extraction notes a digest of all that decides its work: settings, data files and target
files by size and modification time. While that is the same and the store is still whole, there is
nothing to do, and saying so takes no model code and no pass over the data.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stage1_extract.config import ExtractRun
from stage1_extract.conversation_files import files_of
from stage1_extract.embedded import is_embedded
from stage1_extract.gguf_target import gguf_sources
from stage1_extract.head_needs import lacking_head_files
from storage.commits import tombstoned_units
from storage.errors import StoreError
from storage.files import replace_whole
from storage.writer import open_for_writing

RECEIPT = "finished.json"


def note_finished(run: ExtractRun, *, digest: str | None) -> None:
    """Notes that every unit of a run is committed and few enough sequences failed.

    Args:
        run: The run's settings.
        digest: `run_digest` from before the data were read: what was appended since is not in the
            store. None notes nothing.
    """
    if digest is not None:
        given_up = tombstoned_units(open_for_writing(run.store_dir).files)
        receipt = {"digest": digest, "num_given_up": len(given_up)}
        replace_whole(_receipt_path(run), json.dumps(receipt).encode())


def is_finished(run: ExtractRun) -> bool:
    """Whether the same run came to its end and its store still holds every unit and the head."""
    try:
        receipt = json.loads(_receipt_path(run).read_bytes())
        noted, num_given_up = receipt["digest"], receipt["num_given_up"]
        if noted is None or noted != run_digest(run):
            return False
        store = open_for_writing(run.store_dir)
    except (OSError, ValueError, KeyError, TypeError, StoreError):
        return False  # No receipt, or none that can be read: the long way tells.
    # A shard that was given up since is planned nowhere until preparing plans its sequences anew.
    is_whole = len(tombstoned_units(store.files)) == num_given_up
    is_committed = is_whole and set(store.units()) <= store.committed()
    return is_committed and not lacking_head_files(store, run)


def run_digest(run: ExtractRun) -> str | None:
    """A digest of all that decides a run's work; None where files here do not tell.

    A hub's model may change under its name, so only local targets and embedded ones are told.
    """
    try:
        facts = {
            "target": run.target.model_dump(mode="json"),
            "data": run.data.model_dump(mode="json"),
            "store": run.store.model_dump(mode="json"),
            "store_dir": str(run.store_dir),
            "max_failed_fraction": run.extract.max_failed_fraction,
            "files": sorted(_marks_of(run)),
        }
    except (OSError, ValueError):
        return None
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _marks_of(run: ExtractRun) -> Iterator[list[Any]]:
    """Path, size and modification time of every file that the run reads.

    Raises:
        ValueError: The target does not lie here.
    """
    files = [file for path in run.data.conversations for file in files_of(Path(path))]
    if not is_embedded(run.target.model):
        files += _target_files(Path(run.target.model))
    for file in files:
        status = file.stat()
        yield [str(file), status.st_size, status.st_mtime_ns]


def _target_files(target: Path) -> list[Path]:
    """The files of a target's folder, or a GGUF file with the tokenizer beside it."""
    if target.is_dir():
        return [Path(each.path) for each in os.scandir(target) if each.is_file()]
    if target.is_file():
        return gguf_sources(target)
    raise ValueError(f"{target} is neither a folder nor a file")


def _receipt_path(run: ExtractRun) -> Path:
    return run.run_dir / "extract" / RECEIPT
