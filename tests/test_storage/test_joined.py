"""Joined stores are read as the one store that would hold all their sequences."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from storage.derive import derive_store
from storage.errors import IdentityMismatchError, StoreError, StoreNotFoundError
from storage.head import LAST_LAYERS_FILE
from storage.joined import JoinedStore, join_stores
from storage.order import epoch_order
from storage.reader import open_store
from storage.stream import read_ahead
from storage.writer import create_store, open_for_writing


def make_part(making: SimpleNamespace, store_dir: Path, ids: list[str]) -> Path:
    store = create_store(store_dir, making.make_identity())
    store.add_layers(making.LAYERS)
    store.put_head_file("tokenizer/tokenizer.json", b"{}")
    store.plan_generation(ids, num_units=2)
    making.fill(store)
    return store_dir


@pytest.fixture
def parts(tmp_path: Path, making: SimpleNamespace) -> list[Path]:
    ids = [f"s{i}" for i in range(12)]
    return [
        make_part(making, tmp_path / "one", ids[:5]),
        make_part(making, tmp_path / "two", ids[5:]),
    ]


def test_joined_stores_read_as_one(parts: list[Path], tmp_path: Path, filled_dir: Path) -> None:
    joined, whole = join_stores(tmp_path / "joined", parts), open_store(filled_dir)
    assert isinstance(open_store(tmp_path / "joined"), JoinedStore)
    assert joined.content_digest() == whole.content_digest()
    assert joined.identity == whole.identity
    assert joined.layers == whole.layers
    assert joined.head_bytes("tokenizer/tokenizer.json") == b"{}"
    assert joined.head_path("tokenizer/tokenizer.json").read_bytes() == b"{}"
    assert joined.is_complete()
    found, expected = joined.snapshot(), whole.snapshot()
    assert (found.num_sequences, found.num_shards) == (12, 4)
    for index in range(12):
        name = found.sequence_id(index)
        place = expected.index_of(name)
        assert found.index_of(name) == index
        for column in ("num_tokens", "num_supervised", "greedy", "held_out"):
            assert getattr(found, column)[index] == getattr(expected, column)[place]
        np.testing.assert_array_equal(found.read_tokens(index)[0], expected.read_tokens(place)[0])
        unit = found.unit_of_shard(int(found.shard_index[index]))
        assert str(unit) in {"00000-00000", "00000-00001"}
    states = joined.sequence("s7").hidden_states(layers=["9"])
    np.testing.assert_array_equal(states, whole.sequence("s7").hidden_states(layers=["9"]))


def test_an_epoch_of_joined_stores_is_streamed(parts: list[Path], tmp_path: Path) -> None:
    snapshot = join_stores(tmp_path / "joined", parts).snapshot()
    order = epoch_order(snapshot, seed=1, epoch=0, window_shards=2)
    batches = read_ahead(snapshot, ([index] for index in order), layers=["1"])
    read = [sequence.sequence_id for (sequence,) in batches]
    assert read == [snapshot.sequence_id(int(index)) for index in order]


def test_a_snapshot_is_taken_again_though_members_have_grown(
    parts: list[Path], tmp_path: Path, making: SimpleNamespace
) -> None:
    joined = join_stores(tmp_path / "joined", parts)
    before = joined.snapshot()
    store = create_store(parts[0], making.make_identity())
    store.plan_generation(["new"], num_units=1)
    assert not joined.is_complete()
    making.fill(store)
    assert joined.snapshot().num_sequences == 13
    assert joined.snapshot(before.id).id == before.id
    assert joined.snapshot(before.id).num_sequences == 12
    with pytest.raises(StoreError, match="joins 2 stores"):
        joined.snapshot(before.id.partition("|")[0])


def test_joined_stores_are_moved_together(parts: list[Path], tmp_path: Path) -> None:
    digest = join_stores(tmp_path / "joined", parts).content_digest()
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("joined", "one", "two"):
        shutil.move(tmp_path / name, moved / name)
    assert open_store(moved / "joined").content_digest() == digest


def test_what_does_not_fit_is_refused(
    parts: list[Path], tmp_path: Path, making: SimpleNamespace
) -> None:
    with pytest.raises(StoreError, match="sequence 's0' is in two of the joined stores"):
        join_stores(tmp_path / "a", [parts[0], make_part(making, tmp_path / "b", ["s0", "t"])])
    other = create_store(tmp_path / "c", making.make_identity(vocab_size=7))
    other.add_layers(making.LAYERS)
    with pytest.raises(IdentityMismatchError, match="vocab_size"):
        join_stores(tmp_path / "a", [parts[0], tmp_path / "c"])
    with pytest.raises(StoreNotFoundError):
        join_stores(tmp_path / "a", [parts[0], tmp_path / "nowhere"])
    with pytest.raises(StoreError, match="no stores to join"):
        join_stores(tmp_path / "a", [])
    with pytest.raises(StoreError, match="holds other files"):
        join_stores(parts[0], parts)
    join_stores(tmp_path / "a", parts)
    join_stores(tmp_path / "a", parts)  # again: nothing happens
    with pytest.raises(StoreError, match="joins other stores already"):
        join_stores(tmp_path / "a", parts[:1])


def test_other_scales_are_refused_until_derived_alike(parts: list[Path], tmp_path: Path) -> None:
    first, second = tmp_path / "int8 one", tmp_path / "int8 two"
    derive_store(parts[0], first, encoding="int8")
    derive_store(parts[1], second, encoding="int8")
    with pytest.raises(StoreError, match=r"store encode SRC DST --like STORE"):
        join_stores(tmp_path / "joined", [first, second])
    derive_store(parts[1], tmp_path / "alike", like=first)
    joined = join_stores(tmp_path / "joined", [first, tmp_path / "alike"])
    assert joined.layers == open_store(first).layers
    with pytest.raises(ValueError, match="either an encoding or a store"):
        derive_store(parts[1], second)


def test_what_one_member_keeps_more_in_its_head_is_found(parts: list[Path], tmp_path: Path) -> None:
    open_for_writing(parts[-1]).put_head_file(LAST_LAYERS_FILE, b"weights")
    join_stores(tmp_path / "all", parts)
    joined = open_store(tmp_path / "all")
    assert joined.head_names() == [LAST_LAYERS_FILE, "tokenizer/tokenizer.json"]
    assert joined.head_bytes(LAST_LAYERS_FILE) == b"weights"
    assert joined.head_path(LAST_LAYERS_FILE).read_bytes() == b"weights"
    assert (joined.head_path("tokenizer") / "tokenizer.json").read_bytes() == b"{}"


def test_a_store_derived_from_a_joined_one_has_its_head(parts: list[Path], tmp_path: Path) -> None:
    join_stores(tmp_path / "joined", parts)
    derive_store(tmp_path / "joined", tmp_path / "derived", encoding="bf16")
    derived = open_store(tmp_path / "derived")
    assert derived.head_names() == ["tokenizer/tokenizer.json"]
    assert derived.head_bytes("tokenizer/tokenizer.json") == b"{}"
