"""Conversation index: ids and places of conversations, kept so that files are read through once.

Every worker of every run asks for them; reading and checking a million conversations takes minutes.
The index lies in the cache folder under a digest of paths, sizes, times of change and settings.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from stage1_extract.conversation_files import Row
from stage1_extract.embedded import cache_dir
from storage.files import replace_whole

INDEX_VERSION = 1
"""Raise it whenever other rows would be taken for conversations, or under other ids."""
MIN_KEPT = 10_000
"""Conversations below which reading the files again costs nothing."""
MAX_KEPT = 16
"""Indexes in the cache folder: one takes 60 bytes a conversation."""


class Place(NamedTuple):
    """Where a conversation lies."""

    file_index: int
    row: Row


@dataclass
class Index:
    """The usable conversations of some files and what was wrong with the other rows."""

    places: dict[str, Place] = field(default_factory=dict)
    """By id, in file order."""
    counts: Counter[str] = field(default_factory=Counter)
    """Unusable rows by reason."""
    messages: list[str] = field(default_factory=list)
    """The first few of them in words."""


def index_path(files: Sequence[Path], settings: Any) -> Path | None:
    """Where the index of some files under some settings is kept; None if a file is missing."""
    marks: list[Any] = [INDEX_VERSION, settings]
    try:
        for path in files:
            status = path.stat()
            marks.append([str(path.resolve()), status.st_size, status.st_mtime_ns])
    except OSError:
        return None
    digest = hashlib.sha256(json.dumps(marks).encode()).hexdigest()
    return cache_dir() / "conversations" / f"{digest[:32]}.index.json"


def load_index(path: Path) -> Index | None:
    """The index kept there; None if there is none that can be read."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(path.read_bytes())
        rows = map(Row, kept["starts"], kept["num_bytes"], kept["numbers"])
        places = map(Place, kept["file_indices"], rows)
        return Index(
            places=dict(zip(kept["ids"], places, strict=True)),
            counts=Counter(kept["counts"]),
            messages=kept["messages"],
        )
    return None


def keep_index(path: Path, index: Index) -> None:
    """Keeps a large index for the next time, if the cache folder can be written."""
    if len(index.places) < MIN_KEPT:
        return
    places = list(index.places.values())
    kept = {
        "ids": list(index.places),
        "file_indices": [place.file_index for place in places],
        "starts": [place.row.start for place in places],
        "num_bytes": [place.row.num_bytes for place in places],
        "numbers": [place.row.number for place in places],
        "counts": index.counts,
        "messages": index.messages,
    }
    with suppress(OSError):
        replace_whole(path, json.dumps(kept).encode())
        _remove_old(path.parent)


def _remove_old(folder: Path) -> None:
    """Removes all but the newest indexes: a file that grows gets another one each time."""
    dated = sorted((each.stat().st_mtime_ns, each) for each in folder.glob("*.index.json"))
    for _, path in dated[:-MAX_KEPT]:
        path.unlink(missing_ok=True)
