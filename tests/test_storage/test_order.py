from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.order import epoch_order, mix, permutation, unmix


def sequences(counts: list[int], held_out_every: int = 5) -> SimpleNamespace:
    shard_index = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    held_out = np.arange(len(shard_index)) % held_out_every == 0
    return SimpleNamespace(shard_index=shard_index, held_out=held_out)


SHARDS = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@settings(deadline=None)
@given(
    counts=SHARDS,
    seed=st.integers(0, 2**70),
    epoch=st.integers(0, 9),
    num_readers=st.integers(1, 5),
    window_shards=st.none() | st.integers(1, 12),
)
def test_readers_split_an_epoch_exactly(
    counts: list[int], seed: int, epoch: int, num_readers: int, window_shards: int | None
) -> None:
    snapshot = sequences(counts)
    parts = [
        epoch_order(
            snapshot,
            seed=seed,
            epoch=epoch,
            reader=reader,
            num_readers=num_readers,
            window_shards=window_shards,
        )
        for reader in range(num_readers)
    ]
    read = np.sort(np.concatenate(parts))
    np.testing.assert_array_equal(read, np.flatnonzero(~snapshot.held_out))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    # Interleaved again, the parts are the order of a single reader.
    whole = epoch_order(snapshot, seed=seed, epoch=epoch, window_shards=window_shards)
    for reader, part in enumerate(parts):
        np.testing.assert_array_equal(part, whole[reader::num_readers])


@settings(deadline=None)
@given(counts=SHARDS, seed=st.integers(0, 99), window_shards=st.integers(1, 12))
def test_no_more_shards_than_the_window_are_half_read(
    counts: list[int], seed: int, window_shards: int
) -> None:
    snapshot = sequences(counts)
    order = epoch_order(snapshot, seed=seed, epoch=0, window_shards=window_shards)
    shards = snapshot.shard_index[order]
    for position in range(1, len(shards)):
        begun = set(shards[:position].tolist()) & set(shards[position:].tolist())
        assert len(begun) <= window_shards


def test_order_depends_on_seed_and_epoch_only() -> None:
    snapshot = sequences([50, 50])
    first = epoch_order(snapshot, seed=1, epoch=0)
    np.testing.assert_array_equal(first, epoch_order(snapshot, seed=1, epoch=0))
    for other in ({"seed": 2, "epoch": 0}, {"seed": 1, "epoch": 1}):
        assert not np.array_equal(first, epoch_order(snapshot, **other))


def test_the_order_is_the_same_for_ever() -> None:
    # A checkpoint's data position means nothing if this ever changes.
    assert permutation(10, seed=7, epoch=3, stream=0).tolist() == GOLDEN


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_mixing_can_be_undone(values: list[int]) -> None:
    numbers = np.array(values, dtype=np.uint64)
    np.testing.assert_array_equal(unmix(mix(numbers)), numbers)


@settings(deadline=None)
@given(counts=SHARDS, seed=st.integers(0, 99), window_shards=st.none() | st.integers(1, 12))
def test_order_is_its_plain_definition(
    counts: list[int], seed: int, window_shards: int | None
) -> None:
    """Keys of all indices, argsorted; then a stable sort by the window of the shard."""

    def plain_permutation(count: int, stream: int) -> np.ndarray:
        key = np.zeros(1, dtype=np.uint64)
        for part in (seed, 0, stream):
            key = mix(key ^ np.uint64(part))
        return np.argsort(mix(mix(np.arange(count, dtype=np.uint64)) ^ key))

    snapshot = sequences(counts)
    chosen = np.flatnonzero(~snapshot.held_out)
    order = chosen[plain_permutation(len(chosen), 0)]
    if window_shards is not None and len(order):
        shards = snapshot.shard_index[order]
        place = np.argsort(plain_permutation(int(shards.max()) + 1, 1))
        order = order[np.argsort(place[shards] // window_shards, kind="stable")]
    found = epoch_order(snapshot, seed=seed, epoch=0, window_shards=window_shards)
    np.testing.assert_array_equal(found, order)


GOLDEN = [9, 2, 4, 7, 0, 8, 5, 3, 1, 6]


def test_permutations_are_uniform_enough() -> None:
    first = [int(permutation(8, seed=seed, epoch=0, stream=0)[0]) for seed in range(4000)]
    counts = np.bincount(first, minlength=8)
    assert counts.min() > 420
    assert counts.max() < 580


def test_held_out_sequences_are_read_when_asked_for() -> None:
    snapshot = sequences([10, 10])
    order = epoch_order(snapshot, seed=0, epoch=0, include=snapshot.held_out)
    np.testing.assert_array_equal(np.sort(order), np.flatnonzero(snapshot.held_out))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="reader"):
        epoch_order(sequences([3]), seed=0, epoch=0, reader=2, num_readers=2)
    with pytest.raises(ValueError, match="window_shards"):
        epoch_order(sequences([3]), seed=0, epoch=0, window_shards=0)
