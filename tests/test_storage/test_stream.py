import threading
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.errors import DamagedShardError
from storage.reader import Snapshot, open_store
from storage.stream import read_ahead

RELAXED = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


@RELAXED
@given(
    batches=st.lists(st.lists(st.integers(0, 11), max_size=4), max_size=8),
    read_ahead_bytes=st.integers(1, 200_000),
    num_threads=st.integers(1, 4),
)
def test_batches_come_whole_and_in_order(
    snapshot: Snapshot, batches: list[list[int]], read_ahead_bytes: int, num_threads: int
) -> None:
    stream = read_ahead(
        snapshot,
        batches,
        layers=["1", "9"],
        read_ahead_bytes=read_ahead_bytes,
        num_threads=num_threads,
    )
    got = list(stream)
    assert [[s.sequence_id for s in batch] for batch in got] == [
        [snapshot.sequence_id(i) for i in batch] for batch in batches
    ]
    for batch, indices in zip(got, batches, strict=True):
        for sequence, index in zip(batch, indices, strict=True):
            alone = snapshot.read(index, layers=["9"])
            np.testing.assert_array_equal(sequence.states["9"].data, alone.states["9"].data)
    assert reading_threads() == []


def test_long_sequences_are_read_layer_by_layer_and_come_whole(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.stream.SPLIT_BYTES", 0)
    read: list[tuple[int, tuple[str, ...]]] = []
    plain_read = snapshot.read

    def noted_read(index: int, *, layers: Sequence[str], **arguments: Any) -> Any:
        read.append((index, tuple(layers)))
        return plain_read(index, layers=layers, **arguments)

    monkeypatch.setattr(snapshot, "read", noted_read)
    stream = read_ahead(snapshot, [[(2, slice(1, 4))], [3]], layers=["1", "9"], num_threads=1)
    (first,), (second,) = stream
    assert read == [(2, ("1",)), (2, ("9",)), (3, ("1",)), (3, ("9",))]
    for sequence, index, tokens in ((first, 2, slice(1, 4)), (second, 3, slice(None))):
        whole = plain_read(index, layers=["1", "9"], tokens=tokens)
        np.testing.assert_array_equal(sequence.token_ids, whole.token_ids)
        assert list(sequence.states) == ["1", "9"]
        for name in ("1", "9"):
            np.testing.assert_array_equal(sequence.states[name].data, whole.states[name].data)


def test_small_sequences_are_not_all_handed_out_at_once(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.stream.MAX_READINGS", 4)
    pulled = []

    def batches() -> Iterator[list[int]]:
        for number in range(100):
            pulled.append(number)
            yield [0, 1]

    stream = read_ahead(snapshot, batches(), layers=["1"])
    assert len(next(stream)) == 2
    # Two batches of two, and the one that had no room.
    assert pulled == [0, 1, 2]
    assert len(list(stream)) == 99


def test_token_ranges_are_read_alone(snapshot: Snapshot) -> None:
    (batch,) = read_ahead(snapshot, [[(2, slice(1, 4)), 3]], layers=["1"])
    whole = snapshot.read(2, layers=["1"])
    np.testing.assert_array_equal(batch[0].states["1"].data, whole.states["1"].data[1:4])
    assert len(batch[1].token_ids) == snapshot.num_tokens[3]


def test_numpy_indices_are_indices(snapshot: Snapshot) -> None:
    (batch,) = read_ahead(snapshot, [np.array([4, 5])], layers=["1"])
    assert [s.sequence_id for s in batch] == [snapshot.sequence_id(4), snapshot.sequence_id(5)]


@pytest.fixture
def started(snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Indices in the order in which their reads started."""
    indices: list[int] = []
    read = snapshot.read

    def counted(index: int, **arguments: Any) -> Any:
        indices.append(index)
        return read(index, **arguments)

    monkeypatch.setattr(snapshot, "read", counted)
    return indices


def test_memory_is_bounded_even_for_endless_batches(snapshot: Snapshot, started: list[int]) -> None:
    token_bytes = 5 + 32
    budget = int(snapshot.num_tokens.max()) * token_bytes * 3
    batches: Iterator[Sequence[int]] = ([i % 12] for i in count())
    stream = read_ahead(snapshot, batches, layers=["9"], read_ahead_bytes=budget, num_threads=1)
    for taken in range(1, 30):
        next(stream)
        waiting = started[taken:]
        assert sum(int(snapshot.num_tokens[i]) for i in waiting) * token_bytes <= budget
    assert len(started) <= 30 + 12
    stream.close()  # type: ignore[attr-defined]
    assert reading_threads() == []


def test_errors_come_at_their_place(filled_dir: Path) -> None:
    snapshot = open_store(filled_dir).snapshot()
    (path,) = filled_dir.glob("shards/*/00000-00002.*/layers/1/c/0/0")
    path.unlink()
    bad = int(np.flatnonzero(snapshot.shard_index == 2)[0])
    stream = read_ahead(snapshot, [[0], [1], [bad], [0]], layers=["1"])
    assert next(stream)[0].sequence_id == snapshot.sequence_id(0)
    assert next(stream)[0].sequence_id == snapshot.sequence_id(1)
    with pytest.raises(DamagedShardError, match="00000-00002"):
        next(stream)
    assert reading_threads() == []


def test_damaged_sequences_can_be_left_out_and_counted(filled_dir: Path) -> None:
    snapshot = open_store(filled_dir).snapshot()
    (path,) = filled_dir.glob("shards/*/00000-00002.*/layers/1/c/0/0")
    path.unlink()
    bad = np.flatnonzero(snapshot.shard_index == 2).tolist()
    errors: list[DamagedShardError] = []
    batches = [[0, bad[0], 1], bad]
    got = list(read_ahead(snapshot, batches, layers=["1"], on_damage=errors.append))
    assert [[s.sequence_id for s in batch] for batch in got] == [
        [snapshot.sequence_id(0), snapshot.sequence_id(1)],
        [],
    ]
    assert len(errors) == 1 + len(bad)
    assert {error.shard for error in errors} == {"00000-00002"}


def test_errors_of_the_batches_come_through(snapshot: Snapshot) -> None:
    def batches() -> Iterator[list[int]]:
        yield [0]
        raise RuntimeError("no more")

    stream = read_ahead(snapshot, batches(), layers=["1"])
    with pytest.raises(RuntimeError, match="no more"):
        list(stream)
    assert reading_threads() == []


def test_a_forgotten_stream_leaves_no_thread(snapshot: Snapshot) -> None:
    stream = read_ahead(snapshot, [[i] for i in range(12)], layers=["1"])
    next(stream)
    del stream
    assert reading_threads() == []


def test_nothing_is_read_before_the_first_batch_is_asked_for(
    snapshot: Snapshot, started: list[int]
) -> None:
    read_ahead(snapshot, [[0]], layers=["1"])
    assert started == []
