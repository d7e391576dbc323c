"""Origins: which settings and versions filled a store. For people; no reader needs them."""

import hashlib
from collections.abc import Mapping
from typing import Any

from storage import layout
from storage.files import Files
from storage.records import create_record, dump_record, read_record


def note_origin(files: Files, origin: Mapping[str, Any]) -> None:
    """Keeps a record of JSON values under its own digest: an equal one is kept once."""
    digest = hashlib.sha256(dump_record(origin)).hexdigest()
    create_record(files, layout.origin(digest), origin)


def read_origins(files: Files) -> list[dict[str, Any]]:
    """All that was noted, in no order that means anything."""
    names = sorted(files.names(layout.ORIGINS))
    return [read_record(files, f"{layout.ORIGINS}/{name}") for name in names]
