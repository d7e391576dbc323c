"""Layers written side by side, and layers added to a store that is filled already."""

import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from storage import packing, shard_writer
from storage.arrays import ArrayWriter
from storage.encodings import calibrate_channels, decode, encode
from storage.errors import StoreError
from storage.reader import open_store
from storage.schema import LayerRecord
from storage.verify import verify_store
from storage.writer import WritableStore, open_for_writing

ADDED = LayerRecord(name="5", encoding="fp8", hidden_size=16)


def test_large_layers_are_written_side_by_side_and_lie_as_small_ones_do(
    tmp_path: Path,
    filled_dir: Path,
    making: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three layers wait for each other: one after another they would wait for ever."""
    right, together = ArrayWriter.append, threading.Barrier(3, timeout=60)

    def append(array: ArrayWriter, rows: np.ndarray) -> None:
        if rows.shape[1] > 2:  # The scales come by themselves.
            together.wait()
        right(array, rows)

    monkeypatch.setattr(shard_writer, "_WORTH_A_THREAD_BYTES", 1)
    monkeypatch.setattr(ArrayWriter, "append", append)
    monkeypatch.setattr("storage.packing.os.cpu_count", lambda: 8)
    packing._threads.cache_clear()
    making.fill(making.make_store(tmp_path / "other"))
    packing._threads.cache_clear()
    assert verify_store(tmp_path / "other", full=True).ok
    assert (
        open_store(tmp_path / "other").content_digest() == open_store(filled_dir).content_digest()
    )


@pytest.fixture
def store(filled_dir: Path) -> WritableStore:
    store = open_for_writing(filled_dir)
    store.add_layers([ADDED])
    return store


def added_states(making: SimpleNamespace, sequence_id: str) -> dict:
    """States of the added layer: those that a layer "5" of the same sequence would have."""
    num_tokens = len(making.make_sequence(sequence_id)["token_ids"])
    values = np.random.default_rng(num_tokens).standard_normal((num_tokens, 16))
    return {"5": encode("fp8", values.astype(np.float32))}


def add_layer(store: WritableStore, making: SimpleNamespace) -> None:
    for unit in store.units_lacking(["5"]):
        with store.start_layers(unit, ["5"]) as writer:
            for sequence_id in writer.sequence_ids:
                states = added_states(making, sequence_id)
                writer.append(sequence_id=sequence_id, states=states)
            assert writer.seal()


def test_added_layers_are_read_beside_the_first_ones(
    store: WritableStore, filled_dir: Path, making: SimpleNamespace
) -> None:
    snapshot = open_store(filled_dir).snapshot()
    with pytest.raises(StoreError, match="extract into another store"):
        snapshot.read(0, layers=["5"])
    assert len(store.units_lacking(["5"])) == 3
    add_layer(store, making)
    assert store.units_lacking(["5"]) == []
    for index in range(snapshot.num_sequences):
        name = snapshot.sequence_id(index)
        read = snapshot.read(index, layers=["9", "5", "1"], tokens=slice(1, 300))
        assert list(read.states) == ["9", "5", "1"]
        expected = added_states(making, name)["5"]
        np.testing.assert_array_equal(read.states["5"].data, expected.data[1:300])
        np.testing.assert_array_equal(read.states["5"].scales, expected.scales[1:300])
        first = making.make_sequence(name)["states"]["1"]
        np.testing.assert_array_equal(read.states["1"].scales, first.scales[1:300])
    assert snapshot.id == open_store(filled_dir).snapshot().id
    assert verify_store(filled_dir, full=True).ok


def test_new_units_hold_all_layers_at_once(
    store: WritableStore, filled_dir: Path, making: SimpleNamespace
) -> None:
    store.plan_generation(["later"], num_units=1)
    (unit,) = set(store.units()) - store.committed()
    with store.start_shard(unit) as shard:
        sequence = making.make_sequence("later")
        sequence["states"] |= added_states(making, "later")
        shard.append(**sequence)
        assert shard.seal()
    assert len(store.units_lacking(["5"])) == 3


def test_damage_in_an_added_layer_is_found(
    store: WritableStore, filled_dir: Path, making: SimpleNamespace
) -> None:
    add_layer(store, making)
    (path, *_) = filled_dir.glob("shards/*/00000-00000.*/layers/5/c/0/0")
    path.write_bytes(path.read_bytes()[:-7] + b"\x00" * 7)
    (problem,) = verify_store(filled_dir, full=True).problems
    assert (problem.shard, problem.layer) == ("00000-00000", "5")


def test_the_shards_order_is_kept(store: WritableStore, making: SimpleNamespace) -> None:
    unit = store.units_lacking(["5"])[0]
    with store.start_layers(unit, ["5"]) as writer:
        first, second = writer.sequence_ids[:2]
        states = added_states(making, second)
        with pytest.raises(ValueError, match=f"expected '{first}'"):
            writer.append(sequence_id=second, states=states)
        with pytest.raises(ValueError, match="lacks"):
            writer.seal()


def test_the_first_of_two_added_layers_wins(
    store: WritableStore, filled_dir: Path, making: SimpleNamespace
) -> None:
    unit = store.units_lacking(["5"])[0]
    with store.start_layers(unit, ["5"]) as one, store.start_layers(unit, ["5"]) as two:
        for writer in (one, two):
            for sequence_id in writer.sequence_ids:
                states = added_states(making, sequence_id)
                writer.append(sequence_id=sequence_id, states=states)
        assert one.seal()
        assert not two.seal()
    assert len(list(filled_dir.glob(f"shards/*/{unit}.*"))) == 2


def test_calibrated_layers_carry_their_scales(store_dir: Path, making: SimpleNamespace) -> None:
    rng = np.random.default_rng(0)
    states = (rng.standard_normal((300, 16)) * np.geomspace(1, 900, 16)).astype(np.float32)
    scales = calibrate_channels(states)
    record = LayerRecord(
        name="3", encoding="int8", hidden_size=16, channel_scales=tuple(scales.tolist())
    )
    store = making.create_store(store_dir, making.make_identity())
    with pytest.raises(ValueError, match="channel scales"):
        store.add_layers([LayerRecord(name="3", encoding="int8", hidden_size=16)])
    store.add_layers([record])
    store.plan_generation(["s"], num_units=1)
    encoded = encode("int8", states, channel_scales=record.channel_scale_array)
    with store.start_shard(store.units()[0]) as shard:
        shard.append(
            sequence_id="s",
            token_ids=np.zeros(300, dtype=np.int32),
            loss_mask=np.ones(300, dtype=np.bool_),
            greedy=False,
            states={"3": encoded},
        )
        assert shard.seal()
    read = open_store(store_dir).sequence("s").hidden_states(layers=["3"])
    np.testing.assert_array_equal(read[:, 0], decode("int8", encoded, channel_scales=scales))
    np.testing.assert_allclose(read[:, 0], states, atol=np.abs(states).max() / 200)
    with pytest.raises(StoreError, match="layer 3 is stored as int8"):
        store.add_layers(
            [LayerRecord(name="3", encoding="int8", hidden_size=16, channel_scales=(1.0,) * 16)]
        )


def test_pending_layers_are_seen_when_every_shard_holds_them(
    filled_dir: Path, making: SimpleNamespace
) -> None:
    store = open_for_writing(filled_dir)
    store.pend_layers([ADDED])
    store.pend_layers([ADDED])  # again: nothing happens
    assert "5" not in open_store(filled_dir).layers
    with pytest.raises(StoreError, match=r"3 shards, e\.g\. 00000-00000, lack layers 5"):
        store.publish_layers(["5"])
    add_layer(store, making)
    assert verify_store(filled_dir, full=True).ok
    assert "5" not in open_store(filled_dir).layers
    store.publish_layers(["5"])
    store.publish_layers(["5"])
    assert open_store(filled_dir).layers["5"] == ADDED
    assert verify_store(filled_dir, full=True).ok
