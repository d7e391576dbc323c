"""Committed shards as columns, folded into files so that opening does not read every commit.

What a reader knows of all sequences without touching a shard lies in a Catalog. It is built from
commit records, or read from a catalog file (`catalog_file`) plus the records that came after it.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32, Int64, UInt8, UInt64

from storage import layout
from storage.commits import CommitRecord, committed_units, read_commit_values
from storage.errors import DamagedShardError, StoreWriteError
from storage.files import Files
from storage.plan import complete_generations
from storage.schema import UnitId, hash_id, held_out_mask

FOLD_COMMITS = 256
"""Commit records newer than the newest catalog file from which on a reader writes another."""

_PARALLEL_READS = 16


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """Columns over shards, in unit order, and over their sequences, in shard order."""

    generation: Int32[np.ndarray, " shards"]
    unit_index: Int32[np.ndarray, " shards"]
    attempt: UInt8[np.ndarray, "shards 16"]
    num_sequences: Int32[np.ndarray, " shards"]
    num_tokens: Int32[np.ndarray, " sequences"]
    num_supervised: Int32[np.ndarray, " sequences"]
    greedy: UInt8[np.ndarray, " sequences"]
    id_hash: UInt64[np.ndarray, " sequences"]
    id_bytes: Int32[np.ndarray, " sequences"]
    """Length of each id in UTF-8."""
    id_text: UInt8[np.ndarray, " text"]
    """All ids, one after another, in UTF-8."""

    def __len__(self) -> int:
        return len(self.generation)

    def unit(self, shard: int) -> UnitId:
        """The unit of a shard."""
        return UnitId(int(self.generation[shard]), int(self.unit_index[shard]))

    def held_out(self, fraction: float) -> Bool[np.ndarray, " sequences"]:
        """Which sequences are kept from training."""
        return held_out_mask(self.id_hash, fraction)

    def text(self, start: int, stop: int) -> bytes:
        """A piece of `id_text`."""
        return self.id_text[start:stop].tobytes()

    def units(self) -> list[UnitId]:
        """The units of all shards, in order."""
        pairs = zip(self.generation.tolist(), self.unit_index.tolist(), strict=True)
        return [UnitId(generation, index) for generation, index in pairs]


_PER_SHARD = ("generation", "unit_index", "attempt", "num_sequences")
_PER_SEQUENCE = ("num_tokens", "num_supervised", "greedy", "id_hash", "id_bytes")


def catalog_of(commits: Iterable[CommitRecord]) -> Catalog:
    """The columns of some commit records, in unit order."""
    return select([_one_shard(commit.to_json()) for commit in commits])


def _one_shard(commit: Mapping[str, Any]) -> Catalog:
    """The columns of a commit record as it lies on disk: its checksums are not unpacked."""
    unit = UnitId.parse(commit["unit"])
    ids = [sequence_id.encode() for sequence_id in commit["sequence_ids"]]
    return Catalog(
        generation=np.array([unit.generation], dtype=np.int32),
        unit_index=np.array([unit.index], dtype=np.int32),
        attempt=np.frombuffer(bytes.fromhex(commit["attempt"]), dtype=np.uint8)[None],
        num_sequences=np.array([len(ids)], dtype=np.int32),
        num_tokens=np.array(commit["num_tokens"], dtype=np.int32),
        num_supervised=np.array(commit["num_supervised"], dtype=np.int32),
        greedy=np.array(commit["greedy"], dtype=np.uint8),
        id_hash=np.array([hash_id(name) for name in commit["sequence_ids"]], dtype=np.uint64),
        id_bytes=np.array([len(text) for text in ids], dtype=np.int32),
        id_text=np.frombuffer(b"".join(ids), dtype=np.uint8),
    )


EMPTY = Catalog(
    generation=np.zeros(0, dtype=np.int32),
    unit_index=np.zeros(0, dtype=np.int32),
    attempt=np.zeros((0, 16), dtype=np.uint8),
    num_sequences=np.zeros(0, dtype=np.int32),
    num_tokens=np.zeros(0, dtype=np.int32),
    num_supervised=np.zeros(0, dtype=np.int32),
    greedy=np.zeros(0, dtype=np.uint8),
    id_hash=np.zeros(0, dtype=np.uint64),
    id_bytes=np.zeros(0, dtype=np.int32),
    id_text=np.zeros(0, dtype=np.uint8),
)


def select(parts: Sequence[Catalog], *, keep: Bool[np.ndarray, " shards"] | None = None) -> Catalog:
    """Catalogs joined, some shards kept, in unit order."""
    joined = {
        field.name: np.concatenate([getattr(part, field.name) for part in (EMPTY, *parts)])
        for field in fields(Catalog)
    }
    order = np.lexsort((joined["unit_index"], joined["generation"]))
    if keep is not None:
        order = order[keep[order]]
    if len(order) == len(joined["generation"]) and np.all(np.diff(order) == 1):
        return Catalog(**joined)
    counts = joined["num_sequences"].astype(np.int64)
    sequences = _gather(counts, order)
    id_bytes = joined["id_bytes"].astype(np.int64)
    columns = {name: joined[name][order] for name in _PER_SHARD}
    columns |= {name: joined[name][sequences] for name in _PER_SEQUENCE}
    return Catalog(**columns, id_text=joined["id_text"][_gather(id_bytes, sequences)])


def _gather(
    counts: Int64[np.ndarray, " groups"], order: Int64[np.ndarray, " chosen"]
) -> Int64[np.ndarray, " members"]:
    """Places of the members of groups, the groups taken in `order`."""
    starts = (np.cumsum(counts) - counts)[order]
    sizes = counts[order]
    shift = starts - (np.cumsum(sizes) - sizes)
    return np.repeat(shift, sizes) + np.arange(sizes.sum())


def newest_catalog(files: Files) -> tuple[Catalog, int]:
    """The largest catalog file that is whole and how many generations it holds completely.

    An empty catalog if there is none. Of a large file the columns are read when they are used.
    """
    # Imported here, for it builds on this module.
    from storage.catalog_file import open_catalog

    for name in reversed(files.names(layout.CATALOG)):
        try:
            return open_catalog(files, name)
        except (DamagedShardError, FileNotFoundError):
            # Catalog files repeat what commit records say, so an older one serves as well.
            continue
    return EMPTY, 0


def read_catalog(
    files: Files, known: Catalog | None = None, *, without: Set[UnitId] = frozenset()
) -> Catalog:
    """All commits there are now; writes a catalog file if many are new and it may.

    Args:
        files: of the store.
        known: an earlier answer, which saves reading its commits again.
        without: units whose commit need not be read; their records may be damaged.
    """
    folded, num_complete = newest_catalog(files)
    if num_complete and num_complete == len(files.names(layout.GENERATIONS)):
        return folded
    base = known if known is not None and len(known) > len(folded) else folded
    new = sorted(committed_units(files) - set(base.units()) - without)
    catalog = select([base, *_read_shards(files, new)]) if new else base
    if _is_worth_folding(files, catalog, num_folded=len(folded)):
        _fold_if_writable(files, catalog)
    return catalog


def _is_worth_folding(files: Files, catalog: Catalog, *, num_folded: int) -> bool:
    """Whether many commits are new: a share of all, so that folding costs little, or the last."""
    num_new = len(catalog) - num_folded
    if num_new < FOLD_COMMITS:
        return False
    num_generations = len(files.names(layout.GENERATIONS))
    is_complete = complete_generations(files, catalog.generation) == num_generations
    return is_complete or num_new >= num_folded // 4


def _read_shards(files: Files, units: Sequence[UnitId]) -> list[Catalog]:
    def read(unit: UnitId) -> Catalog:
        return _one_shard(read_commit_values(files, unit))

    if len(units) < 2 * _PARALLEL_READS:
        return [read(unit) for unit in units]
    with ThreadPoolExecutor(_PARALLEL_READS) as pool:
        return list(pool.map(read, units))


def fold(files: Files, catalog: Catalog) -> None:
    """Writes a catalog file, from which later readers start."""
    from storage.catalog_file import write_catalog

    num_generations = complete_generations(files, catalog.generation)
    write_catalog(files, catalog, num_generations=num_generations)


def _fold_if_writable(files: Files, catalog: Catalog) -> None:
    try:
        fold(files, catalog)
    except StoreWriteError:
        # A reader of a read-only or full disk does without; the next one may write it.
        return
