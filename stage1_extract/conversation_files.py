"""Conversation files: which files a path of the run file stands for, and their rows in order.

A path is a JSONL, Parquet or Arrow file, a folder of them, or a dataset that Hugging Face's
`save_to_disk` left. Every kind of file gives its rows one after another and any row again later.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from stage1_extract.problems import UnusableConversationError

_ARROW_SUFFIXES = (".arrow", ".feather")
_PARQUET_SUFFIXES = (".parquet", ".pq")
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".zip")


class Row(NamedTuple):
    """Where one row of a file lies."""

    start: int
    """First byte of a line; number of a row in a columnar file."""
    num_bytes: int
    """Of a line; 0 in a columnar file."""
    number: int
    """As people count: lines from 1, rows from 0."""


@runtime_checkable
class RowFile(Protocol):
    """A file of conversations, one a row."""

    def rows(self) -> Iterator[tuple[Row, Any]]:
        """Every row that is not blank, in order: its place, and what `parse` takes."""
        ...

    def parse(self, row: Row, content: Any) -> dict[str, Any]:
        """The record of a row.

        Raises:
            UnusableConversationError: The row is no record.
        """
        ...

    def read(self, row: Row) -> Any:
        """A row's content once more, by its place."""
        ...

    def source(self, row: Row) -> str:
        """The row's name for people."""
        ...


def open_file(path: Path) -> RowFile:
    """One file by its suffix; an unknown one is taken for JSON lines.

    Raises:
        ValueError: It is compressed.
    """
    if path.suffix in _COMPRESSED_SUFFIXES:
        raise ValueError(f"{path} is compressed; unpack it first")
    if path.suffix not in (*_ARROW_SUFFIXES, *_PARQUET_SUFFIXES):
        return JsonLines(path)
    # Imported only here: JSON lines need no pyarrow.
    from stage1_extract.arrow_files import ArrowRows, ParquetRows

    return ArrowRows(path) if path.suffix in _ARROW_SUFFIXES else ParquetRows(path)


def files_of(path: Path) -> list[Path]:
    """The files of a path: itself, those of a saved dataset, or those in a folder, by name.

    Raises:
        ValueError: The folder holds none, or several splits of which none is named.
    """
    if not path.is_dir():
        return [path]
    if (path / "state.json").is_file():
        return _files_of_dataset(path)
    if (path / "dataset_dict.json").is_file():
        splits = _read_json(path / "dataset_dict.json").get("splits", [])
        if len(splits) != 1:
            raise ValueError(
                f"{path} holds the splits {', '.join(splits) or 'none'}; name one, for example"
                f" {path / (splits[0] if splits else 'train')}"
            )
        return _files_of_dataset(path / splits[0])
    known = (*_JSON_SUFFIXES, *_PARQUET_SUFFIXES, *_ARROW_SUFFIXES)
    files = sorted(each for each in path.iterdir() if each.suffix in known)
    if not files:
        raise ValueError(
            f"{path} is a folder without conversations: expected {', '.join(known)} files or a"
            " dataset saved with save_to_disk"
        )
    return files


def _files_of_dataset(folder: Path) -> list[Path]:
    """The Arrow files of a dataset that `save_to_disk` left, as its `state.json` lists them."""
    state = _read_json(folder / "state.json")
    if any(state.get(name) for name in ("_indices_files", "_indices_data_files")):
        raise ValueError(
            f"{folder} was saved with an index over its rows; save it again after flatten_indices()"
        )
    try:
        return [folder / each["filename"] for each in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / 'state.json'} lists no data files; save it again") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}; save the dataset again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object; save the dataset again")
    return value


class JsonLines:
    """A JSONL file."""

    def __init__(self, path: Path):
        self._path = path

    def rows(self) -> Iterator[tuple[Row, bytes]]:
        """Every line that is not blank.

        Raises:
            ValueError: The file is missing or unreadable.
        """
        try:
            with self._path.open("rb") as file:
                start = 0
                for number, text in enumerate(file, start=1):
                    if text.strip():
                        yield Row(start, len(text), number), text
                    start += len(text)
        except OSError as error:
            raise ValueError(
                f"cannot read {self._path} ({error.strerror}); check the path in the run file"
            ) from error

    def read(self, row: Row) -> bytes:
        """The bytes of a line."""
        with self._path.open("rb") as file:
            file.seek(row.start)
            return file.read(row.num_bytes)

    def parse(self, row: Row, content: bytes) -> dict[str, Any]:
        """The JSON object of a line."""
        return parse_line(content, source=self.source(row))

    def source(self, row: Row) -> str:
        """File and line."""
        return f"{self._path}:{row.number}"


def parse_line(text: bytes, *, source: str) -> dict[str, Any]:
    """The JSON object of one line.

    Raises:
        UnusableConversationError: The line is not JSON, not an object, or holds what is no text.
    """
    try:
        record = json.loads(text)
        if b"\\ud" in text.lower():  # Half of a pair of escapes alone is in no text.
            json.dumps(record, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise UnusableConversationError("bad JSON", source=source, detail=str(error)) from error
    if not isinstance(record, dict):
        raise UnusableConversationError(
            "unknown format", source=source, detail="expected a JSON object, one a line"
        )
    return record
