"""Committed shards as columns: what a reader knows of every sequence without opening its shard."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int32, Int64, UInt64

from storage.commits import CommitRecord
from storage.schema import UnitId, hash_id


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """Columns over shards, in unit order, and over their sequences, in shard order."""

    units: list[UnitId]
    attempts: list[str]
    sequences_per_shard: Int64[np.ndarray, " shards"]
    num_tokens: Int32[np.ndarray, " sequences"]
    num_supervised: Int32[np.ndarray, " sequences"]
    greedy: Bool[np.ndarray, " sequences"]
    id_hashes: UInt64[np.ndarray, " sequences"]
    id_bytes: Int32[np.ndarray, " sequences"]
    """Length of each id in UTF-8."""
    id_text: bytes
    """All ids, one after another, in UTF-8."""


def catalog_of(commits: Sequence[CommitRecord]) -> Catalog:
    """The columns of some commit records, in unit order."""
    commits = sorted(commits, key=lambda commit: commit.unit)
    ids = [sequence_id for commit in commits for sequence_id in commit.sequence_ids]
    encoded = [sequence_id.encode() for sequence_id in ids]
    return Catalog(
        units=[commit.unit for commit in commits],
        attempts=[commit.attempt for commit in commits],
        sequences_per_shard=np.array([len(c.sequence_ids) for c in commits], dtype=np.int64),
        num_tokens=np.array([n for c in commits for n in c.num_tokens], dtype=np.int32),
        num_supervised=np.array([n for c in commits for n in c.num_supervised], dtype=np.int32),
        greedy=np.array([flag for c in commits for flag in c.greedy], dtype=np.bool_),
        id_hashes=np.array([hash_id(sequence_id) for sequence_id in ids], dtype=np.uint64),
        id_bytes=np.array([len(text) for text in encoded], dtype=np.int32),
        id_text=b"".join(encoded),
    )
