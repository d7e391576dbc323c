import errno
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.encodings import decode, encode
from storage.errors import DamagedShardError, StoreError, StoreNotFoundError
from storage.files import LocalRangeReader
from storage.reader import Snapshot, open_store
from storage.repair import bury_damaged
from storage.schema import LayerRecord, is_held_out
from storage.verify import verify_store
from storage.writer import create_store

RELAXED = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def data_files(store_dir: Path, name: str = "0") -> list[Path]:
    return sorted(p for p in store_dir.glob("shards/**/*") if p.is_file() and p.name == name)


@RELAXED
@given(data=st.data())
def test_what_is_appended_is_read_back_bit_for_bit(
    snapshot: Snapshot, making: SimpleNamespace, data: Any
) -> None:
    index = data.draw(st.integers(0, snapshot.num_sequences - 1))
    layers = data.draw(st.lists(st.sampled_from(["1", "9", "lm_head_input"]), unique=True))
    bounds = st.none() | st.integers(-800, 800)
    tokens = slice(data.draw(bounds), data.draw(bounds))
    written = making.make_sequence(snapshot.sequence_id(index))
    read = snapshot.read(index, layers=layers, tokens=tokens)
    np.testing.assert_array_equal(read.token_ids, written["token_ids"][tokens])
    np.testing.assert_array_equal(read.loss_mask, written["loss_mask"][tokens])
    assert read.greedy == written["greedy"]
    assert list(read.states) == layers
    for name in layers:
        expected = written["states"][name]
        np.testing.assert_array_equal(read.states[name].data, expected.data[tokens])
        assert read.states[name].data.dtype == expected.data.dtype
        if expected.scales is None:
            assert read.states[name].scales is None
        else:
            np.testing.assert_array_equal(read.states[name].scales, expected.scales[tokens])


def test_columns_agree_with_the_sequences(snapshot: Snapshot, making: SimpleNamespace) -> None:
    assert snapshot.num_sequences == 12
    assert snapshot.num_shards == 3
    for index in range(12):
        written = making.make_sequence(snapshot.sequence_id(index))
        mask = written["loss_mask"]
        assert snapshot.index_of(written["sequence_id"]) == index
        assert snapshot.num_tokens[index] == len(written["token_ids"])
        assert snapshot.num_supervised[index] == np.count_nonzero(mask[:-1] & mask[1:])
        assert snapshot.greedy[index] == written["greedy"]
        assert snapshot.held_out[index] == is_held_out(written["sequence_id"], 0.25)
        token_ids, loss_mask = snapshot.read_tokens(index)
        np.testing.assert_array_equal(token_ids, written["token_ids"])
        np.testing.assert_array_equal(loss_mask, mask)
    assert np.all(np.diff(snapshot.shard_index) >= 0)


def test_callers_memory_is_filled(snapshot: Snapshot) -> None:
    whole = snapshot.read(3, layers=["9"]).states["9"].data
    start, stop = len(whole) // 4, len(whole) // 2
    packed = np.zeros((1000, whole.shape[1]), dtype=whole.dtype)
    out = {"9": packed[10 : 10 + stop - start]}
    read = snapshot.read(3, layers=["9"], tokens=slice(start, stop), out=out)
    assert read.states["9"].data is out["9"]
    np.testing.assert_array_equal(packed[10 : 10 + stop - start], whole[start:stop])
    assert not packed[:10].any()
    assert not packed[10 + stop - start :].any()
    with pytest.raises(ValueError, match="destination"):
        snapshot.read(3, layers=["9"], out={"9": packed})


def test_memory_is_not_reused_while_it_is_looked_at(
    snapshot: Snapshot, making: SimpleNamespace
) -> None:
    kept = [snapshot.read(i % 12, layers=["9"]) for i in range(36)]
    views = [(read.sequence_id, read.states["9"].data[1:3]) for read in kept]
    del kept
    for _ in range(40):
        snapshot.read(0, layers=["1", "9"])
    for sequence_id, view in views:
        expected = making.make_sequence(sequence_id)["states"]["9"].data[1:3]
        np.testing.assert_array_equal(view, expected)


def test_notebook_access_decodes(filled_dir: Path, making: SimpleNamespace) -> None:
    written = making.make_sequence("s4")["states"]
    states = (
        open_store(filled_dir).sequence("s4").hidden_states(layers=["9", "1"], tokens=slice(0, 2))
    )
    assert states.dtype == np.float32
    np.testing.assert_array_equal(states[:, 0], decode("bf16", written["9"])[:2])
    np.testing.assert_array_equal(states[:, 1], decode("fp8", written["1"])[:2])


def test_a_read_only_store_opens_and_reads(filled_dir: Path) -> None:
    folders = [filled_dir, *(p for p in filled_dir.rglob("*") if p.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        assert open_store(filled_dir).snapshot().read(0, layers=["1"]).token_ids.size
    finally:
        for folder in folders:
            folder.chmod(0o755)


def test_a_moved_store_is_the_same_store(filled_dir: Path, tmp_path: Path) -> None:
    before = open_store(filled_dir)
    digest, name = before.content_digest(), before.snapshot().id
    moved = tmp_path / "moved"
    filled_dir.rename(moved)
    assert open_store(moved).content_digest() == digest
    assert open_store(moved).snapshot(name).id == name
    with pytest.raises(StoreNotFoundError):
        open_store(filled_dir)


def test_wrong_requests_are_refused(snapshot: Snapshot) -> None:
    with pytest.raises(StoreError, match="lacks layers 2"):
        snapshot.read(0, layers=["2"])
    with pytest.raises(ValueError, match="step"):
        snapshot.read(0, layers=["1"], tokens=slice(0, 9, 2))
    with pytest.raises(IndexError):
        snapshot.read(99, layers=["1"])
    with pytest.raises(StoreError, match="no committed sequence"):
        snapshot.index_of("nobody")


def test_the_content_digest_ignores_units_and_attempts(
    filled_dir: Path, tmp_path: Path, making: SimpleNamespace
) -> None:
    other_dir = tmp_path / "other"
    other = making.make_store(other_dir, num_sequences=7, num_units=5)
    other.plan_generation([f"s{i}" for i in range(12)], num_units=2)
    making.fill(other)
    digest = open_store(filled_dir).content_digest()
    assert open_store(other_dir).content_digest() == digest
    other.plan_generation(["one more"], num_units=1)
    making.fill(other)
    assert open_store(other_dir).content_digest() != digest


def test_snapshots_stay_as_they_are(store_dir: Path, making: SimpleNamespace) -> None:
    store = making.make_store(store_dir)
    reader = open_store(store_dir)
    units = store.units()
    making.fill_unit(store, units[1])
    early = reader.snapshot()
    making.fill_unit(store, units[0])
    late = reader.snapshot()
    assert (early.num_shards, late.num_shards) == (1, 2)
    assert early.id != late.id
    again = open_store(store_dir).snapshot(early.id)
    assert again.id == early.id
    np.testing.assert_array_equal(again.num_tokens, early.num_tokens)
    with pytest.raises(StoreError, match="does not hold snapshot"):
        reader.snapshot("0" * 16 + ":0.0-1")


@pytest.mark.parametrize("damage", ["remove", "truncate", "empty", "lengthen_elsewhere"])
@pytest.mark.parametrize("place", ["tokens.bin", "layers/9/c/0/0", "scales/c/0/0"])
def test_missing_and_short_files_are_errors_with_names(
    filled_dir: Path, damage: str, place: str
) -> None:
    (path, *_) = sorted(filled_dir.glob(f"shards/*/00000-00001.*/{place}"))
    snapshot = open_store(filled_dir).snapshot()
    if damage == "remove":
        path.unlink()
    elif damage == "lengthen_elsewhere":
        path.write_bytes(b"\x01" + path.read_bytes()[:-1])
    else:
        path.write_bytes(path.read_bytes()[:1] if damage == "truncate" else b"")
    members = np.flatnonzero(snapshot.shard_index == 1)
    with pytest.raises(DamagedShardError) as caught:
        snapshot.read(int(members[0]), layers=["1", "9"])
    message = str(caught.value)
    assert "00000-00001" in message
    assert repr(snapshot.sequence_id(int(members[0]))) in message
    assert caught.value.layer in ("tokens", "9", "scales")
    untouched = np.flatnonzero(snapshot.shard_index != 1)
    assert snapshot.read(int(untouched[0]), layers=["1", "9"]).states


def test_a_lost_commit_record_is_an_error(filled_dir: Path) -> None:
    snapshot = open_store(filled_dir).snapshot()
    for path in filled_dir.glob("commits/*/*"):
        path.unlink()
    with pytest.raises(DamagedShardError, match="commit record"):
        snapshot.read(0, layers=["1"])


def test_refilled_units_replace_damaged_ones_and_old_snapshots_stay(
    filled_dir: Path, making: SimpleNamespace
) -> None:
    reader = open_store(filled_dir)
    before, digest = reader.snapshot(), reader.content_digest()
    (path,) = filled_dir.glob("shards/*/00000-00001.*/layers/9/c/0/0")
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    report = verify_store(filled_dir, full=True)
    lost = {before.sequence_id(int(i)) for i in np.flatnonzero(before.shard_index == 1)}
    assert [str(unit) for unit in bury_damaged(filled_dir, report.problems)] == ["00000-00001"]
    assert reader.snapshot().num_sequences == 12 - len(lost)
    store = making.make_store(filled_dir)
    assert store.unit_of(min(lost)).generation == 1
    assert store.plan_generation([f"s{i}" for i in range(12)], num_units=2) == 0
    making.fill(store)
    assert reader.content_digest() == digest
    assert verify_store(filled_dir, full=True).ok
    same = open_store(filled_dir).snapshot(before.id)
    assert same.id == before.id
    whole = int(np.flatnonzero(same.shard_index == 0)[0])
    assert same.read(whole, layers=["9"]).token_ids.size


def test_a_store_knows_when_it_is_complete(store_dir: Path, making: SimpleNamespace) -> None:
    store = making.create_store(store_dir, making.make_identity())
    reader = open_store(store_dir)
    assert not reader.is_complete()
    store = making.make_store(store_dir)
    assert not reader.is_complete()
    making.fill(store)
    assert reader.is_complete()
    store.plan_generation(["one more"], num_units=1)
    assert not reader.is_complete()
    making.fill(store)
    assert reader.is_complete()
    (path,) = store_dir.glob("shards/*/00000-00001.*/tokens.bin")
    path.unlink()
    bury_damaged(store_dir, verify_store(store_dir, full=False).problems)
    store.plan_generation([f"s{i}" for i in range(12)], num_units=3)
    assert not reader.is_complete()
    making.fill(store)
    assert reader.is_complete()


def test_a_disk_that_fails_to_read_is_damage(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("os.preadv", fail)
    with pytest.raises(DamagedShardError, match="Input/output error"):
        snapshot.read(0, layers=["1"])


def test_a_store_that_was_moved_or_copied_is_read_and_filled_on(
    store_dir: Path, tmp_path: Path, making: SimpleNamespace
) -> None:
    store = making.make_store(store_dir)
    making.fill_unit(store, store.units()[0])
    snapshot = open_store(store_dir).snapshot()
    copied = tmp_path / "zweite Kopie 二"
    shutil.copytree(store_dir, copied)
    moved = tmp_path / "moved"
    store_dir.rename(moved)
    for place in (copied, moved):
        assert open_store(place).snapshot(snapshot.id).num_sequences == snapshot.num_sequences
        making.fill(making.make_store(place))
        assert open_store(place).is_complete()
    assert open_store(copied).content_digest() == open_store(moved).content_digest()


@pytest.mark.parametrize(("packing", "most"), [(None, 1.0), ("zstd", 1.15)])
def test_a_sequence_is_read_without_its_neighbours(
    tmp_path: Path,
    making: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    packing: str | None,
    most: float,
) -> None:
    """What is read for 1,500 tokens of states, by the bytes of these states unpacked."""
    (record,) = (LayerRecord(name="9", encoding="bf16", hidden_size=16, packing=packing),)
    store = create_store(tmp_path / "store", making.make_identity())
    store.add_layers([record])
    store.plan_generation([f"s{number}" for number in range(6)], num_units=1)
    with store.start_shard(store.units()[0]) as shard:
        for number in range(6):
            values = np.random.default_rng(number).standard_normal((1500, 16)).astype(np.float32)
            shard.append(
                sequence_id=f"s{number}",
                token_ids=np.zeros(1500, dtype=np.int32),
                loss_mask=np.ones(1500, dtype=np.bool_),
                greedy=False,
                states={"9": encode("bf16", values)},
            )
        shard.seal()
    read_bytes = []
    plain = LocalRangeReader.read_into

    def counted(reader: LocalRangeReader, offset: int, buffers: Sequence[memoryview]) -> None:
        read_bytes.append(sum(len(buffer) for buffer in buffers))
        plain(reader, offset, buffers)

    monkeypatch.setattr(LocalRangeReader, "read_into", counted)
    snapshot = open_store(tmp_path / "store").snapshot()
    for index in range(6):
        snapshot.read(index, layers=["9"])
    states = [size for size in read_bytes if size != 1500 * 5]
    assert len(states) == 6
    assert sum(states) <= most * 6 * 1500 * 16 * 2
