"""What a check of a store found, and the log by which an interrupted check goes on."""

import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from storage.errors import StoreError, explain_os_errors


@dataclass(frozen=True)
class Problem:
    """One thing that is not as it was committed."""

    shard: str | None
    """The unit, as text; None for files of the whole store."""
    layer: str | None
    """Layer name, `scales` or `tokens`; None for records."""
    chunk: int | None
    """Zarr chunk of the layer's array; None when a whole file is concerned."""
    sequence_ids: tuple[str, ...]
    """Sequences hit."""
    message: str

    def __str__(self) -> str:
        place = [f"shard {self.shard}"] if self.shard else []
        place += [f"layer {self.layer}"] if self.layer else []
        place += [f"chunk {self.chunk}"] if self.chunk is not None else []
        hit = f" (sequences {', '.join(self.sequence_ids[:5])})" if self.sequence_ids else ""
        return f"{', '.join([*place, self.message])}{hit}"


@dataclass
class VerifyReport:
    """What was looked at and what is wrong."""

    num_shards: int = 0
    num_sequences: int = 0
    num_bytes: int = 0
    """Bytes read and checked, or sizes checked when not `full`."""
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


_FIRST_BYTES = '{"name": '
"""Of every line of a log."""


class VerifyLog:
    """Reports of shards that were checked, a JSON line each, in a file beside the store.

    A line that was cut off by a kill is passed over; its shard is checked again. Thread-safe.
    """

    def __init__(self, path: Path, *, full: bool):
        self._path, self._full = path, full
        self._lock = threading.Lock()
        self._reports = self._read() if path.exists() else {}

    def _read(self) -> dict[str, VerifyReport]:
        reports = {}
        text = self._path.read_text(encoding="utf-8", errors="replace")
        begin = text.lstrip()[: len(_FIRST_BYTES)]
        if not _FIRST_BYTES.startswith(begin):
            raise StoreError(f"{self._path} is no log of a check; name a new file")
        if not text.endswith("\n"):
            self._append("\n")
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                problems = [
                    Problem(**{**problem, "sequence_ids": tuple(problem["sequence_ids"])})
                    for problem in entry["report"].pop("problems")
                ]
                report = VerifyReport(**entry["report"], problems=problems)
            except (json.JSONDecodeError, KeyError, TypeError):
                continue
            # A check of sizes alone says nothing about the bytes.
            if entry["full"] or not self._full:
                reports[entry["name"]] = report
        return reports

    def once(self, name: str, check: Callable[[], VerifyReport]) -> VerifyReport:
        """The report under a name: an earlier one that found nothing, or one made and noted now.

        What was found damaged is looked at again: it may have been restored since.
        """
        known = self._reports.get(name)
        if known is not None and not known.problems:
            return known
        report = check()
        line = json.dumps({"name": name, "full": self._full, "report": asdict(report)})
        self._append(f"{line}\n")
        return report

    def _append(self, text: str) -> None:
        with self._lock, explain_os_errors("write", self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as log:
                log.write(text)
