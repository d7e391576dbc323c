"""Copy a store to another place: any of folder and object store to any, as often as one likes."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from storage import layout
from storage.catalog import read_catalog
from storage.commits import (
    CommitRecord,
    LayersRecord,
    committed_units,
    read_added,
    read_commit,
    tombstoned_units,
)
from storage.errors import DamagedShardError, StoreError
from storage.files import Files
from storage.head import check_head_file, head_files
from storage.identity import add_layers, create_identity, read_identity, read_layers
from storage.places import files_at, refuse_same_place
from storage.records import read_record
from storage.schema import UnitId
from storage.verify import Problem, check_files, expected_files

READ_BYTES = 16 * 2**20
"""Bytes of one read."""


@dataclass(frozen=True, kw_only=True)
class CopyReport:
    """What a copy did."""

    num_shards: int
    """Shards of the source, tombstoned ones left out."""
    num_copied: int
    """Those that the target did not hold yet."""
    num_bytes: int
    """Bytes of states and tokens of those."""


def copy_store(
    source_dir: str | Path,
    target_dir: str | Path,
    *,
    progress: Callable[[int, int], None] | None = None,
    num_threads: int = 4,
) -> CopyReport:
    """Makes the target hold what the source holds now, under the same names.

    Each shard is read back from the target and held against its checksums before its commit record
    is created there, exclusively and last. So the target is a good store at every moment: an
    interrupted copy goes on where it stopped, a later one adds what is new, several may run at
    once, and trainers may read meanwhile. A checkpoint of the source is resumed on the copy.

    Args:
        source_dir: a store; a damaged shard of it stops the copy, a tombstoned one is left out.
        target_dir: an empty place, or a store of the same identity and plan.
        progress: called with (shards done, shards to copy) after each.
        num_threads: shards copied at once.

    Raises:
        IdentityMismatchError: the target is another store.
        DamagedShardError: a shard fails its checksums; the source is damaged.
    """
    source, target = files_at(source_dir), files_at(target_dir)
    refuse_same_place(source, target)
    create_identity(target, read_identity(source))
    # Listed before their plans are copied, for the source may grow meanwhile.
    dead = tombstoned_units(source)
    units = committed_units(source) - dead
    grown = [unit for unit in _units_with_added_layers(source) if unit in units]
    for name in source.names(layout.PENDING_LAYERS):
        _copy_record(source, target, f"{layout.PENDING_LAYERS}/{name}")
    layers = read_layers(source)
    # Readers of the target see a layer that was added later when all its shards hold it there.
    late = _added_names(source, grown) - read_layers(target).keys()
    add_layers(target, [record for name, record in layers.items() if name not in late])
    _copy_head(source, target)
    _copy_plans(source, target)
    for name in source.names(layout.ORIGINS):
        _copy_record(source, target, f"{layout.ORIGINS}/{name}")
    for unit in sorted(dead):
        _copy_record(source, target, layout.tombstone(unit))
    new = sorted(units - committed_units(target))

    def copy(unit: UnitId) -> int:
        return _copy_shard(source, target, unit)

    num_bytes = 0
    with ThreadPoolExecutor(num_threads) as pool:
        for done, size in enumerate(pool.map(copy, new), start=1):
            num_bytes += size
            if progress is not None:
                progress(done, len(new))
    for unit in grown:
        num_bytes += _copy_added(source, target, unit)
    add_layers(target, list(layers.values()))
    read_catalog(target)  # Folds, so that readers of the copy open fast.
    return CopyReport(num_shards=len(units), num_copied=len(new), num_bytes=num_bytes)


def _copy_record(source: Files, target: Files, path: str) -> None:
    read_record(source, path)  # Its checksum.
    if not target.create(path, source.read(path)):
        raise StoreError(
            f"{target} and {source} differ in {path}: they grew apart; copy to another place"
        )


def _copy_plans(source: Files, target: Files) -> None:
    for name in source.names(layout.GENERATIONS):
        plan = read_record(source, f"{layout.GENERATIONS}/{name}")
        ids = layout.planned_ids(plan["ids_sha256"])
        target.create(ids, source.read(ids))
        _copy_record(source, target, f"{layout.GENERATIONS}/{name}")


def _copy_head(source: Files, target: Files) -> None:
    """Copies what the target lacks; a file's record, which says it is there, comes last."""
    present = set(head_files(target))
    for name in head_files(source):
        if name not in present:
            check_head_file(source, name)
            path = layout.head_file(name)
            _copy_file(source, target, path, source.size(path))
            target.sync_tree(layout.HEAD)
            _copy_record(source, target, layout.head_record(name))
            check_head_file(target, name)


def _copy_shard(source: Files, target: Files, unit: UnitId) -> int:
    commit = read_commit(source, unit)
    num_bytes = _copy_files(source, target, commit, commit)
    # False: somebody else filled this unit of the target meanwhile; that is as good.
    target.create(layout.commit(unit), source.read(layout.commit(unit)))
    return num_bytes


def _copy_added(source: Files, target: Files, unit: UnitId) -> int:
    """Copies layers that were added to a shard; their rows are in the order of its commit."""
    folder = layout.added_folder(unit)
    present = set(target.names(folder))
    new = [name for name in source.names(folder) if name not in present]
    if not new:
        return 0
    commit = read_commit(target, unit)
    if read_commit(source, unit).attempt != commit.attempt:
        raise StoreError(
            f"shard {unit} of {target} was not copied from {source}, so its added layers do not "
            "fit; copy to another place"
        )
    num_bytes = 0
    for added in read_added(source, unit):
        num_bytes += _copy_files(source, target, commit, added)
        _copy_record(source, target, layout.added_layers(unit, added.layers))
    return num_bytes


def _added_names(files: Files, units: Iterable[UnitId]) -> set[str]:
    """Names of the layers that some of these units got later."""
    return {name for unit in units for added in read_added(files, unit) for name in added.layers}


def _units_with_added_layers(files: Files) -> Iterator[UnitId]:
    for fan_out in files.names(layout.ADDED):
        for name in files.names(f"{layout.ADDED}/{fan_out}"):
            yield UnitId.parse(name)


def _copy_files(source: Files, target: Files, commit: CommitRecord, record: LayersRecord) -> int:
    """Copies the data that a record names and checks it at the target; returns its bytes."""
    sizes = _file_sizes(source, record)
    for path, size in sizes.items():
        if not _holds(target, path, size):  # Left by a copy that was interrupted.
            _copy_file(source, target, path, size)
    if check_files(target, commit, record, True):
        # What was left may be damaged; what is damaged now came so from the source.
        for path, size in sizes.items():
            _copy_file(source, target, path, size)
        _raise_first(check_files(target, commit, record, True), source)
    target.sync_tree(record.attempt_dir)
    return sum(sizes.values())


def _raise_first(problems: list[Problem], source: Files) -> None:
    if problems:
        raise DamagedShardError(
            f"{source} cannot be copied: {problems[0]}; run `store verify --full`, then "
            "`store repair` on it"
        )


def _file_sizes(source: Files, record: LayersRecord) -> dict[str, int]:
    """Size in bytes of each file that a record names, the Zarr metadata included."""
    sizes = {path: size for _, path, size in expected_files(record)}
    metadata = [layout.array_metadata(array_dir) for _, array_dir, _ in record.arrays()]
    return sizes | {path: source.size(path) for path in metadata}


def _holds(files: Files, path: str, size: int) -> bool:
    try:
        return files.size(path) == size
    except FileNotFoundError:
        return False


def _copy_file(source: Files, target: Files, path: str, size: int) -> None:
    """Copies a file piece by piece; at the target it appears whole or not at all."""
    memory = memoryview(bytearray(min(size, READ_BYTES)))
    reader = source.range_reader(path)
    stream = target.replacing_stream(path)
    try:
        for offset in range(0, size, READ_BYTES):
            part = memory[: min(READ_BYTES, size - offset)]
            reader.read_into(offset, [part])
            stream.write(part)
        stream.close()
    except BaseException:
        stream.abandon()
        raise
    finally:
        reader.close()
