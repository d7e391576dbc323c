"""Which sequence comes next: a pure function of a few integers and the snapshot."""

from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int, Int64, UInt64


@runtime_checkable
class Sequences(Protocol):
    """What order needs of a snapshot."""

    @property
    def shard_index(self) -> Int[np.ndarray, " sequences"]:
        """Shard of each sequence."""

    @property
    def held_out(self) -> Bool[np.ndarray, " sequences"]:
        """Whether a sequence is kept from training."""


def mix(values: UInt64[np.ndarray, " count"]) -> UInt64[np.ndarray, " count"]:
    """The splitmix64 finalizer: a fixed bijection that scatters 64-bit integers.

    Used instead of numpy's generators because their streams may change between versions.
    """
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def permutation(count: int, *, seed: int, epoch: int, stream: int) -> Int64[np.ndarray, " count"]:
    """A shuffle of 0..count-1 that depends on the three integers only."""
    key = np.zeros(1, dtype=np.uint64)
    for part in (seed, epoch, stream):
        key = mix(key ^ np.uint64(part % 2**64))
    return np.argsort(mix(mix(np.arange(count, dtype=np.uint64)) ^ key), kind="stable")


def epoch_order(
    snapshot: Sequences,
    *,
    seed: int,
    epoch: int,
    reader: int = 0,
    num_readers: int = 1,
    window_shards: int | None = None,
    include: Bool[np.ndarray, " sequences"] | None = None,
) -> Int64[np.ndarray, " chosen"]:
    """Indices of the sequences one reader reads in one epoch, in order.

    Over all readers each included sequence comes exactly once; their shares differ by one
    sequence at most, and together they do not depend on `num_readers`.

    Args:
        snapshot: the committed sequences.
        seed: of the run.
        epoch: 0-based.
        reader: this reader, 0..num_readers-1.
        num_readers: readers that share the epoch.
        window_shards: shards are shuffled, then sequences within each window of so many
            shards; None shuffles over all.
        include: sequences to read; None takes all that are not held out.
    """
    if not 0 <= reader < num_readers:
        raise ValueError(f"reader must lie in 0..{num_readers - 1}, got {reader}")
    if window_shards is not None and window_shards < 1:
        raise ValueError(f"window_shards must be at least 1 or None, got {window_shards}")
    chosen = np.flatnonzero(~snapshot.held_out if include is None else include)
    order = chosen[permutation(len(chosen), seed=seed, epoch=epoch, stream=0)]
    if window_shards is not None and len(order):
        shards = snapshot.shard_index[order]
        place = np.argsort(permutation(int(shards.max()) + 1, seed=seed, epoch=epoch, stream=1))
        order = order[np.argsort(place[shards] // window_shards, kind="stable")]
    return np.asarray(order[reader::num_readers], dtype=np.int64)
