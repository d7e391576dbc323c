"""Which sequence comes next: a pure function of a few integers and the snapshot."""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int, Int64, Shaped, UInt64


@runtime_checkable
class Sequences(Protocol):
    """What order needs of a snapshot."""

    @property
    def shard_index(self) -> Int[np.ndarray, " sequences"]:
        """Shard of each sequence."""

    @property
    def held_out(self) -> Bool[np.ndarray, " sequences"]:
        """Whether a sequence is kept from training."""


_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_INCREMENT, _LAST_SHIFT = 0x9E3779B97F4A7C15, 31
_AT_ONCE = 2**20
"""Elements worked on at a time, so that whole arrays need no temporary of their size."""


def mix(values: UInt64[np.ndarray, " count"]) -> UInt64[np.ndarray, " count"]:
    """The splitmix64 finalizer: a fixed bijection that scatters 64-bit integers.

    Used instead of numpy's generators because their streams may change between versions.
    """
    mixed = values + np.uint64(_INCREMENT)
    for shift, factor in _STEPS:
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(_LAST_SHIFT))


def unmix(mixed: UInt64[np.ndarray, " count"]) -> UInt64[np.ndarray, " count"]:
    """The inverse of `mix`."""
    values = _unshift(mixed, _LAST_SHIFT)
    for shift, factor in reversed(_STEPS):
        inverse = np.uint64(pow(factor, -1, 2**64))
        values = _unshift(values * inverse, shift)
    values -= np.uint64(_INCREMENT)
    return values


def _unshift(values: UInt64[np.ndarray, " count"], shift: int) -> UInt64[np.ndarray, " count"]:
    """The inverse of `x ^ (x >> shift)`."""
    undone: UInt64[np.ndarray, " count"] = values ^ (values >> np.uint64(shift))
    undone ^= values >> np.uint64(2 * shift)
    return undone


def permutation(count: int, *, seed: int, epoch: int, stream: int) -> Int64[np.ndarray, " count"]:
    """A shuffle of 0..count-1 that depends on the three integers only.

    It is the order of the keys `mix(mix(i) ^ key)`. Keys are a bijection of `i`, so they are sorted
    in place and turned back: 8 bytes an element, and no ties.
    """
    key = np.zeros(1, dtype=np.uint64)
    for part in (seed, epoch, stream):
        key = mix(key ^ np.uint64(part % 2**64))
    shuffled = np.arange(count, dtype=np.uint64)
    for piece in _pieces(shuffled):
        piece[:] = mix(mix(piece) ^ key)
    shuffled.sort()
    for piece in _pieces(shuffled):
        piece[:] = unmix(unmix(piece) ^ key)
    return shuffled.view(np.int64)


def _pieces(values: Shaped[np.ndarray, " count"]) -> Iterator[Shaped[np.ndarray, " piece"]]:
    return (values[start : start + _AT_ONCE] for start in range(0, len(values), _AT_ONCE))


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
    sequence at most, and together they do not depend on `num_readers`. Takes 16 bytes of memory a
    sequence, 24 with windows.

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
    order = permutation(len(chosen), seed=seed, epoch=epoch, stream=0)
    for piece in _pieces(order):
        piece[:] = chosen[piece]
    del chosen
    if window_shards is not None and len(order):
        order = _by_window(order, snapshot.shard_index, seed, epoch, window_shards)
    return order if num_readers == 1 else order[reader::num_readers].copy()


def _by_window(
    order: Int64[np.ndarray, " chosen"],
    shard_index: Int[np.ndarray, " sequences"],
    seed: int,
    epoch: int,
    window_shards: int,
) -> Int64[np.ndarray, " chosen"]:
    """The order with windows of shards one after another, unchanged inside each."""
    num_shards = int(shard_index[order.max()]) + 1  # Sequences lie in the order of their shards.
    # The place of each shard among the shuffled ones.
    window = np.empty(num_shards, dtype=np.uint64)
    window[permutation(num_shards, seed=seed, epoch=epoch, stream=1)] = np.arange(num_shards)
    window //= np.uint64(window_shards)
    # Window and position in one number, which is sorted: a stable sort by window, in place.
    keys = np.arange(len(order), dtype=np.uint64)
    position_bits = np.uint64(max(1, len(order) - 1).bit_length())
    for piece, indices in zip(_pieces(keys), _pieces(order), strict=True):
        piece |= window[shard_index[indices]] << position_bits
    keys.sort()
    positions = keys.view(np.int64)
    positions &= (1 << int(position_bits)) - 1
    for piece in _pieces(positions):
        piece[:] = order[piece]
    return positions
