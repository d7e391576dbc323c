"""Arrow and Parquet files of conversations, read batch by batch and again row by row.

Arrow files are mapped into memory, never loaded. Parquet has no rows to point at, so its columns of
use are copied once, batch by batch, into an Arrow file in the cache folder. The only user of
pyarrow.
"""

import bisect
import hashlib
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from stage1_extract.conversation_files import Row
from stage1_extract.embedded import cache_dir

try:
    import pyarrow
    from pyarrow import ipc, parquet
except ImportError as error:
    raise ValueError(
        "data.conversations: Arrow and Parquet files need pyarrow; install it (pip install"
        " pyarrow), or give JSONL files"
    ) from error

CONTENT_COLUMNS = ("messages", "conversations", "prompt", "token_ids")
"""One of these must be there; the first one that is there counts."""
OTHER_COLUMNS = ("id", "response", "loss_mask", "tools", "generation")

_LIST_COLUMNS = ("messages", "conversations", "token_ids", "loss_mask")
_TEXT_COLUMNS = ("prompt", "response")
_BATCH_ROWS = 1_000
_COPY_VERSION = 1


class ArrowRows:
    """An Arrow file, in the stream or the file format."""

    def __init__(self, path: Path, *, data_path: Path | None = None):
        """Names the file; nothing is read before the first row is asked for.

        Args:
            path: The user's file, by which rows are named.
            data_path: Where its rows lie, if elsewhere.
        """
        self._path = path
        self._data_path = data_path

    def data_path(self) -> Path:
        """The Arrow file that holds the rows."""
        return self._data_path or self._path

    def rows(self) -> Iterator[tuple[Row, dict[str, Any]]]:
        """Every row in order; a batch of them is in memory at a time.

        Raises:
            ValueError: The file is missing, unreadable, or lacks a column of use.
        """
        for start, batch in zip(self._starts, self._batches, strict=True):
            for first in range(0, batch.num_rows, _BATCH_ROWS):
                for index, record in enumerate(batch.slice(first, _BATCH_ROWS).to_pylist()):
                    number = start + first + index
                    yield Row(number, 0, number), record

    def read(self, row: Row) -> dict[str, Any]:
        """One row."""
        place = bisect.bisect_right(self._starts, row.start) - 1
        batch = self._batches[place].slice(row.start - self._starts[place], 1)
        record: dict[str, Any] = batch.to_pylist()[0]
        return record

    def parse(self, row: Row, content: dict[str, Any]) -> dict[str, Any]:
        """The row as JSON would have it: columns and fields without a value are left out."""
        record: dict[str, Any] = without_nulls(content)
        return record

    def source(self, row: Row) -> str:
        """File and row, counted from 0 as datasets do."""
        return f"{self._path} row {row.number}"

    @cached_property
    def _batches(self) -> list[Any]:
        """All batches, their bytes still on disk."""
        path = self.data_path()
        try:
            file = pyarrow.memory_map(str(path))
            if path.open("rb").read(6) == b"ARROW1":
                reader = ipc.open_file(file)
                columns = columns_of_use(reader.schema, path=self._path)
                batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            else:
                reader = ipc.open_stream(file)
                columns = columns_of_use(reader.schema, path=self._path)
                batches = iter(reader)
            return [batch.select(columns) for batch in batches]
        except (OSError, pyarrow.ArrowException) as error:
            raise unreadable(self._path, error) from error

    @cached_property
    def _starts(self) -> list[int]:
        """Number of each batch's first row."""
        starts, number = [], 0
        for batch in self._batches:
            starts.append(number)
            number += batch.num_rows
        return starts


class ParquetRows(ArrowRows):
    """A Parquet file, by way of its Arrow copy."""

    def data_path(self) -> Path:
        """The copy; made on first use, whole or not at all."""
        if self._data_path is None:
            self._data_path = arrow_copy(self._path)
        return self._data_path


def arrow_copy(path: Path) -> Path:
    """The Arrow copy of a Parquet file's columns of use, in the cache folder.

    Made once for a path, size and modification time; several processes may make it at once.

    Raises:
        ValueError: The file is missing, unreadable, or lacks a column of use.
    """
    try:
        status = path.stat()
        key = f"{_COPY_VERSION} {path.resolve()} {status.st_size} {status.st_mtime_ns}"
        name = f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.arrow"
        copy = cache_dir() / "conversations" / name
        if not copy.is_file():
            _copy_columns(path, copy)
    except (OSError, pyarrow.ArrowException) as error:
        raise unreadable(path, error) from error
    return copy


def _copy_columns(path: Path, copy: Path) -> None:
    copy.parent.mkdir(parents=True, exist_ok=True)
    temporary = copy.with_name(f".tmp-{copy.name}.{os.getpid()}")
    try:
        with parquet.ParquetFile(path) as source:
            columns = columns_of_use(source.schema_arrow, path=path)
            schema = pyarrow.schema([source.schema_arrow.field(name) for name in columns])
            with ipc.new_stream(str(temporary), schema) as stream:
                for batch in source.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
                    stream.write_batch(batch.select(columns).cast(schema))
        temporary.replace(copy)
    finally:
        temporary.unlink(missing_ok=True)


def columns_of_use(schema: Any, *, path: Path) -> list[str]:
    """The columns that make a conversation.

    Raises:
        ValueError: None of them is there, or one has a type that holds no conversation.
    """
    content = next((name for name in CONTENT_COLUMNS if name in schema.names), None)
    if content is None:
        raise ValueError(
            f"{path} has the columns {', '.join(schema.names)}; expected one of"
            f" {', '.join(CONTENT_COLUMNS)} (rename yours, for example with datasets'"
            " rename_column)"
        )
    columns = [name for name in (content, *OTHER_COLUMNS) if name in schema.names]
    for name in columns:
        kind = schema.field(name).type
        if name in _LIST_COLUMNS and not _is_list(kind):
            raise ValueError(f"{path}: column {name} is {kind}; expected a list")
        if name in _TEXT_COLUMNS and not _is_text(kind):
            raise ValueError(f"{path}: column {name} is {kind}; expected text")
    return columns


def _is_list(kind: Any) -> bool:
    types = pyarrow.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_text(kind: Any) -> bool:
    types = pyarrow.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind))


def without_nulls(value: Any) -> Any:
    """A value without the fields that hold nothing: columns make every struct alike."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [without_nulls(each) for each in value]
    return value


def unreadable(path: Path, error: Exception) -> ValueError:
    """The error for a file that is missing, damaged or of another format."""
    reason = " ".join(str(error).split())[:200]
    return ValueError(f"cannot read {path} ({reason}); check the path and the file")
