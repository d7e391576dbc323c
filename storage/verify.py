"""Find damage: every record, every file's size and, if asked, every byte of a store."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from crc32c import crc32c

from storage import layout
from storage.arrays import block_checksums, end_of_data, read_rows
from storage.catalog_file import parse_catalog
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
from storage.errors import DamagedShardError, StoreError
from storage.files import Files, LocalFiles
from storage.head import check_head_file, head_files
from storage.identity import read_identity, read_layers
from storage.places import files_at, refuse_same_place
from storage.plan import read_generation
from storage.records import read_record
from storage.schema import CHUNK_TOKENS, UnitId
from storage.verify_report import Problem, VerifyLog, VerifyReport

__all__ = [
    "Problem",
    "VerifyReport",
    "check_files",
    "damaged_units",
    "expected_files",
    "verify_store",
]

READ_BYTES = 16 * 2**20
"""Bytes of one read while a file is checked whole."""


def verify_store(
    store_dir: str | Path,
    *,
    full: bool,
    progress: Callable[[int, int], None] | None = None,
    num_threads: int = 4,
    log_path: Path | None = None,
) -> VerifyReport:
    """Checks a store; writes nothing into it.

    Tombstoned shards are not looked at. Attempts without a commit are no problem: they are
    invisible, and `collect_garbage` removes them.

    Args:
        store_dir: the store.
        full: also read every byte of shards and catalog files; else records, head and sizes.
        progress: called with (shards done, shards in all) after each.
        num_threads: shards checked at once.
        log_path: local file in which each checked shard is noted. A check that was interrupted
            goes on where the file ends; what was added since is checked, too. None keeps no log.
    """
    files = files_at(store_dir)
    read_identity(files)  # Before anything is written: raises where there is no store.
    if log_path is not None:
        refuse_same_place(files, LocalFiles(log_path))
    log = None if log_path is None else VerifyLog(log_path, full=full)
    units = sorted(committed_units(files) - tombstoned_units(files))
    report = VerifyReport(problems=list(_check_records(files)))
    planned = _planned(files, units, report.problems)

    def check(unit: UnitId) -> VerifyReport:
        if log is None:
            return _check_shard(files, unit, planned, full)
        return log.once(
            _name_of_state(files, unit), lambda: _check_shard(files, unit, planned, full)
        )

    with ThreadPoolExecutor(num_threads) as pool:
        for done, shard in enumerate(pool.map(check, units), start=1):
            report.num_shards += shard.num_shards
            report.num_sequences += shard.num_sequences
            report.num_bytes += shard.num_bytes
            report.problems += [p for p in shard.problems if p not in report.problems]
            if progress is not None:
                progress(done, len(units))
    return report


def _name_of_state(files: Files, unit: UnitId) -> str:
    """The unit and all attempts that make it up: it changes when layers are added."""
    try:
        records = [read_commit(files, unit), *read_added(files, unit)]
    except (StoreError, FileNotFoundError):
        return str(unit)
    return ".".join([str(unit), *(record.attempt for record in records)])


def _check_records(files: Files) -> Iterator[Problem]:
    """Problems of the files that concern the whole store."""
    folders = (layout.LAYERS, layout.PENDING_LAYERS, layout.TOMBSTONES, layout.ORIGINS)
    for folder in folders:
        for path in _record_paths(files, folder):
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
        places = (layout.layer_record(name), layout.pending_layer_record(name))
        if not any(_exists(files, place) for place in places):
            message = f"{files}/{layout.layer_record(name)} is missing; restore it from a copy"
            yield Problem(None, name, None, (), message)


def _exists(files: Files, path: str) -> bool:
    try:
        return files.size(path) > 0
    except FileNotFoundError:
        return False


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
            found = _size(files, path)
        except (FileNotFoundError, NotADirectoryError):
            message = f"{files}/{path} is missing"
        else:
            if found == size:
                continue
            message = f"{files}/{path} has {found} bytes, expected {size}"
        yield Problem(str(commit.unit), name, None, tuple(commit.sequence_ids), message)


def _size(files: Files, path: str) -> int:
    """A file's size, asked twice: clients of network file systems remember what was not there."""
    try:
        return files.size(path)
    except FileNotFoundError:
        files.names(path.rpartition("/")[0])
        return files.size(path)


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
    first_block = token = 0
    for place, num_tokens in enumerate(commit.num_tokens):
        data = memoryview(memory)[: num_tokens * array.row_bytes]
        hit = (commit.sequence_ids[place],)
        try:
            read_rows(reader, array, token, data)
        except DamagedShardError as error:
            if error.chunk is None:
                raise
            yield Problem(str(commit.unit), name, error.chunk, hit, str(error))
        else:
            for block, found in enumerate(block_checksums([data], array.row_bytes)):
                if found != array.checksums[first_block + block]:
                    chunk = (token + block * CHUNK_TOKENS) // CHUNK_TOKENS
                    yield Problem(str(commit.unit), name, chunk, hit, "checksum does not match")
        first_block += -(-num_tokens // CHUNK_TOKENS)
        token += num_tokens
    end = end_of_data(array)
    tail = bytearray(array.file_bytes - end)
    reader.read_into(end, [memoryview(tail)])
    reader.close()
    if crc32c(tail) != array.tail_crc32c:
        message = "padding or chunk index does not match its checksum (other Zarr readers may fail)"
        yield Problem(str(commit.unit), name, None, (), message)


def damaged_units(problems: Iterable[Problem]) -> set[UnitId]:
    """Units whose shard has a problem."""
    return {UnitId.parse(problem.shard) for problem in problems if problem.shard is not None}
