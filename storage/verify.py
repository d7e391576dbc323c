"""Find damage: every record, every file's size and, if asked, every byte of a store."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from crc32c import crc32c

from storage import layout
from storage.arrays import block_checksums
from storage.catalog import parse_catalog
from storage.commits import (
    TOKEN_BYTES,
    ArrayRecord,
    CommitRecord,
    LayersRecord,
    committed_units,
    read_added,
    read_commit,
    tombstoned_units,
)
from storage.errors import StoreError
from storage.files import Files
from storage.head import check_head_file, head_files
from storage.identity import read_identity, read_layers
from storage.places import files_at
from storage.plan import read_generation
from storage.records import read_record
from storage.schema import CHUNK_TOKENS, UnitId

READ_BYTES = 16 * 2**20
"""Bytes of one read while a file is checked whole."""


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


def verify_store(
    store_dir: str | Path,
    *,
    full: bool,
    progress: Callable[[int, int], None] | None = None,
    num_threads: int = 4,
) -> VerifyReport:
    """Checks a store; writes nothing.

    Tombstoned shards are not looked at. Attempts without a commit are no problem: they are
    invisible, and `collect_garbage` removes them.

    Args:
        store_dir: the store.
        full: also read every byte of shards and catalog files; else records, head and sizes.
        progress: called with (shards done, shards in all) after each.
        num_threads: shards checked at once.
    """
    files = files_at(store_dir)
    units = sorted(committed_units(files) - tombstoned_units(files))
    report = VerifyReport(problems=list(_check_records(files)))
    planned = _planned(files, units, report.problems)

    def check(unit: UnitId) -> VerifyReport:
        return _check_shard(files, unit, planned, full)

    with ThreadPoolExecutor(num_threads) as pool:
        for done, shard in enumerate(pool.map(check, units), start=1):
            report.num_shards += shard.num_shards
            report.num_sequences += shard.num_sequences
            report.num_bytes += shard.num_bytes
            report.problems += [p for p in shard.problems if p not in report.problems]
            if progress is not None:
                progress(done, len(units))
    return report


def _check_records(files: Files) -> Iterator[Problem]:
    """Problems of the files that concern the whole store."""
    read_identity(files)
    for path in (*_record_paths(files, layout.LAYERS), *_record_paths(files, layout.TOMBSTONES)):
        yield from _problems_of(lambda path=path: read_record(files, path))  # type: ignore[misc]
    yield from _problems_of(lambda: read_layers(files))
    for name in head_files(files):
        yield from _problems_of(lambda name=name: check_head_file(files, name))  # type: ignore[misc]
    committed = committed_units(files)
    for name in files.names(layout.CATALOG):
        yield from _check_catalog(files, name, committed)


def _record_paths(files: Files, folder: str) -> Iterator[str]:
    return (f"{folder}/{name}" for name in files.names(folder))


def _problems_of(action: Callable[[], object]) -> Iterator[Problem]:
    try:
        action()
    except (StoreError, FileNotFoundError) as error:
        yield Problem(None, None, None, (), str(error))


def _check_catalog(files: Files, name: str, committed: set[UnitId]) -> Iterator[Problem]:
    place = f"{files}/{layout.catalog(name)}"
    try:
        catalog, _ = parse_catalog(files.read(layout.catalog(name)))
    except StoreError as error:
        # Readers fall back on the commit records, so nothing is lost.
        yield Problem(None, None, None, (), f"{place} is damaged: {error}; remove it")
        return
    for unit in sorted(set(catalog.units()) - committed):
        message = f"the commit record is lost, though {place} knows it"
        yield Problem(str(unit), None, None, (), message)


def _planned(files: Files, units: list[UnitId], problems: list[Problem]) -> dict[UnitId, list[str]]:
    """Ids by unit of all generations that have a plan, or shards and therefore should have one."""
    planned: dict[UnitId, list[str]] = {}
    numbers = range(len(files.names(layout.GENERATIONS)))
    for number in sorted({*numbers, *(unit.generation for unit in units)}):
        try:
            planned |= read_generation(files, number)
        except (StoreError, FileNotFoundError) as error:
            problems.append(Problem(None, None, None, (), f"plan of generation {number}: {error}"))
    return planned


def expected_files(record: LayersRecord) -> Iterator[tuple[str, str, int]]:
    """(layer, path, size in bytes) of each data file that a record names."""
    if isinstance(record, CommitRecord):
        yield "tokens", layout.tokens(record.attempt_dir), sum(record.num_tokens) * TOKEN_BYTES
    for name, array_dir, array in record.arrays():
        yield name, layout.array_data(array_dir), array.file_bytes


def _check_shard(
    files: Files, unit: UnitId, planned: dict[UnitId, list[str]], full: bool
) -> VerifyReport:
    report = VerifyReport(num_shards=1)
    try:
        commit = read_commit(files, unit)
        records = [commit, *read_added(files, unit)]
    except (StoreError, FileNotFoundError) as error:
        report.problems.append(Problem(str(unit), None, None, (), f"commit record: {error}"))
        return report
    report.num_sequences = len(commit.sequence_ids)
    report.problems += _check_layers(files, records)
    report.problems += _check_membership(commit, planned.get(unit))
    for record in records:
        report.problems += check_files(files, commit, record, full)
        report.num_bytes += sum(size for _, _, size in expected_files(record))
    return report


def _check_layers(files: Files, records: Sequence[LayersRecord]) -> Iterator[Problem]:
    """Problems of layers that nobody can decode."""
    for name in sorted({name for record in records for name in record.layers}):
        try:
            files.size(layout.layer_record(name))
        except FileNotFoundError:
            message = f"{files}/{layout.layer_record(name)} is missing; restore it from a copy"
            yield Problem(None, name, None, (), message)


def check_files(
    files: Files, commit: CommitRecord, record: LayersRecord, full: bool
) -> list[Problem]:
    """Problems of the data files that one record of a shard names."""
    damaged = list(_check_sizes(files, commit, record))
    if not full:
        return damaged
    broken = {problem.layer for problem in damaged}
    if record is commit and "tokens" not in broken:
        damaged += _check_tokens(files, commit)
    for name, array_dir, array in record.arrays():
        damaged += _check_metadata(files, commit, name, array_dir, array)
        if name not in broken:
            damaged += _check_array(files, commit, name, layout.array_data(array_dir), array)
    return damaged


def _check_membership(commit: CommitRecord, planned: list[str] | None) -> Iterator[Problem]:
    held = sorted([*commit.sequence_ids, *commit.skipped])
    if planned is not None and held != planned:
        differing = tuple(sorted(set(held) ^ set(planned)))
        yield Problem(str(commit.unit), None, None, differing, "sequences differ from the plan")


def _check_sizes(files: Files, commit: CommitRecord, record: LayersRecord) -> Iterator[Problem]:
    for name, path, size in expected_files(record):
        try:
            found = files.size(path)
        except (FileNotFoundError, NotADirectoryError):
            message = f"{files}/{path} is missing"
        else:
            if found == size:
                continue
            message = f"{files}/{path} has {found} bytes, expected {size}"
        yield Problem(str(commit.unit), name, None, tuple(commit.sequence_ids), message)


def _check_tokens(files: Files, commit: CommitRecord) -> Iterator[Problem]:
    data = memoryview(files.read(layout.tokens(commit.attempt_dir)))
    start = 0
    for place, num_tokens in enumerate(commit.num_tokens):
        packed = data[start : start + num_tokens * TOKEN_BYTES]
        start += len(packed)
        if crc32c(packed) != commit.tokens_checksums[place]:
            hit = (commit.sequence_ids[place],)
            yield Problem(str(commit.unit), "tokens", None, hit, "checksum does not match")


def _check_metadata(
    files: Files, commit: CommitRecord, name: str, array_dir: str, array: ArrayRecord
) -> Iterator[Problem]:
    path = layout.array_metadata(array_dir)
    try:
        if crc32c(files.read(path)) == array.metadata_crc32c:
            return
        message = f"{files}/{path} does not match its checksum (other Zarr readers may fail)"
    except FileNotFoundError:
        message = f"{files}/{path} is missing (other Zarr readers fail)"
    yield Problem(str(commit.unit), name, None, (), message)


def _check_array(
    files: Files, commit: CommitRecord, name: str, path: str, array: ArrayRecord
) -> Iterator[Problem]:
    reader = files.range_reader(path)
    memory = bytearray(max([READ_BYTES, *(n * array.row_bytes for n in commit.num_tokens)]))
    wanted = iter(array.checksums.tolist())
    token = 0
    for place, num_tokens in enumerate(commit.num_tokens):
        data = memoryview(memory)[: num_tokens * array.row_bytes]
        reader.read_into(token * array.row_bytes, [data])
        for block, found in enumerate(block_checksums([data], array.row_bytes)):
            if found != next(wanted):
                chunk = (token + block * CHUNK_TOKENS) // CHUNK_TOKENS
                hit = (commit.sequence_ids[place],)
                yield Problem(str(commit.unit), name, chunk, hit, "checksum does not match")
        token += num_tokens
    tail = bytearray(array.file_bytes - token * array.row_bytes)
    reader.read_into(token * array.row_bytes, [memoryview(tail)])
    reader.close()
    if crc32c(tail) != array.tail_crc32c:
        message = "padding or chunk index does not match its checksum (other Zarr readers may fail)"
        yield Problem(str(commit.unit), name, None, (), message)


def damaged_units(problems: Iterable[Problem]) -> set[UnitId]:
    """Units whose shard has a problem."""
    return {UnitId.parse(problem.shard) for problem in problems if problem.shard is not None}
