"""What an epoch trains is a pure function of its integers, and growing stores are followed."""

import dataclasses
import threading

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from stage2_train import data, masks
from stage2_train.block_attention import BlockTables
from stage2_train.config import TrainConfig
from stage2_train.data import is_complete, make_batch_maker, plan_epoch, trainable, wait_for_store
from storage.errors import DamagedShardError, StoreNotFoundError
from storage.reader import open_store
from storage.writer import open_for_writing


def test_every_training_sequence_once_an_epoch(shared_store_dir):
    snapshot = open_store(shared_store_dir).snapshot()
    for epoch in range(3):
        planned = list(plan_epoch(snapshot, seed=0, epoch=epoch, batch_tokens=128))
        packed = [window.sequence_index for batch in planned for window in batch]
        assert sorted(packed) == np.flatnonzero(trainable(snapshot)).tolist()
        assert planned == list(plan_epoch(snapshot, seed=0, epoch=epoch, batch_tokens=128))
    assert snapshot.held_out.any()
    assert planned != list(plan_epoch(snapshot, seed=0, epoch=0, batch_tokens=128))
    assert planned != list(plan_epoch(snapshot, seed=1, epoch=2, batch_tokens=128))


def test_a_share_of_the_data_is_the_same_for_every_seed_and_part_of_larger_ones(
    tmp_path, tiny_store
):
    snapshot = open_store(tiny_store.fill_store(tmp_path / "s", num_sequences=200)).snapshot()

    def trained(fraction, seed=0):
        planned = plan_epoch(snapshot, seed=seed, epoch=0, batch_tokens=128, data_fraction=fraction)
        return {window.sequence_index for batch in planned for window in batch}

    quarter, half, whole = trained(0.25), trained(0.5), trained(1.0)
    assert quarter < half < whole == set(np.flatnonzero(trainable(snapshot)).tolist())
    assert trained(0.25, seed=5) == quarter
    assert 0.15 < len(quarter) / len(whole) < 0.35
    with pytest.raises(ValueError, match="data_fraction is 1e-09"):
        trained(1e-9)


def test_sequences_above_the_budget_are_trained_in_windows(shared_store_dir):
    snapshot = open_store(shared_store_dir).snapshot()
    first, second = (plan_epoch(snapshot, seed=0, epoch=epoch, batch_tokens=32) for epoch in (0, 1))
    spans = {w.sequence_index: (w.start, w.stop) for batch in first for w in batch}
    assert max(stop - start for start, stop in spans.values()) == 32
    assert any(start > 0 for start, _ in spans.values())
    assert spans != {w.sequence_index: (w.start, w.stop) for batch in second for w in batch}


def test_a_drafter_may_read_shorter_windows_many_of_which_fill_a_batch(shared_store_dir):
    snapshot = open_store(shared_store_dir).snapshot()
    planned = plan_epoch(snapshot, seed=0, epoch=0, batch_tokens=128, window_tokens=16)
    windows = [window for batch in planned for window in batch]
    whole = plan_epoch(snapshot, seed=0, epoch=0, batch_tokens=128)
    lengths = {w.sequence_index: w.num_tokens for batch in whole for w in batch}
    assert {w.sequence_index: w.num_tokens for w in windows} == {
        index: min(length, 16) for index, length in lengths.items()
    }
    assert max(len(batch) for batch in planned) == 128 // 16
    assert all(sum(w.num_tokens for w in batch) <= 128 for batch in planned)


def test_batches_have_one_shape_and_the_windows_own_positions(shared_store_dir, architecture):
    snapshot = open_store(shared_store_dir).snapshot()
    train = TrainConfig(batch_tokens=32, num_anchors=6)
    maker = make_batch_maker(train, architecture, torch.device("cpu"))
    planned = plan_epoch(snapshot, seed=0, epoch=0, batch_tokens=32)
    for windows, batch in zip(planned, maker.batches(snapshot, planned, epoch=0), strict=True):
        assert batch.positions.shape == (32,)
        assert batch.block_token_ids.shape == batch.block_positions.shape == (30,)
        assert [layer.data.shape for layer in batch.layers] == [(32, 32), (32, 32)]
        expected = np.concatenate([np.arange(w.start, w.stop) for w in windows])
        assert batch.positions[: len(expected)].tolist() == expected.tolist()
        assert batch.num_real_tokens == len(expected)
        anchors = batch.block_positions.view(6, 5)[: batch.num_real_blocks, 0]
        stops = batch.context_stop[: batch.num_real_blocks]
        assert torch.equal(anchors, batch.positions[stops])


def test_damaged_sequences_stop_the_drafter_or_are_left_out_and_counted(
    tmp_path, tiny_store, architecture
):
    store_dir = tiny_store.fill_store(tmp_path / "store")
    snapshot = open_store(store_dir).snapshot()
    planned = plan_epoch(snapshot, seed=0, epoch=0, batch_tokens=128)
    next((store_dir / "shards").rglob("layers/*/c/0/0")).unlink()

    def batches(on_damage):
        train = TrainConfig(batch_tokens=128, num_anchors=6, on_damage=on_damage)
        maker = make_batch_maker(train, architecture, torch.device("cpu"), on_damage=damaged.append)
        return list(maker.batches(snapshot, planned, epoch=0))

    damaged = []
    with pytest.raises(DamagedShardError, match="00000-"):
        batches("stop")
    assert damaged == []
    whole = sum(window.num_tokens for windows in planned for window in windows)
    found = batches("skip")
    assert len(found) == len(planned)
    assert damaged
    lost = {error.sequence_id for error in damaged}
    assert sum(batch.num_real_tokens for batch in found) == whole - sum(
        window.num_tokens
        for windows in planned
        for window in windows
        if snapshot.sequence_id(window.sequence_index) in lost
    )


@pytest.mark.parametrize("lost", [{0}, {0, 1}, {0, 3}, {2}])
def test_batches_of_which_all_is_damaged_are_steps_without_weight(
    shared_store_dir, architecture, monkeypatch, lost
):
    snapshot = open_store(shared_store_dir).snapshot()
    planned = plan_epoch(snapshot, seed=0, epoch=0, batch_tokens=128)
    maker = make_batch_maker(
        TrainConfig(batch_tokens=128, num_anchors=6), architecture, torch.device("cpu")
    )
    whole = list(maker.batches(snapshot, planned, epoch=0))
    read = data.read_ahead

    def read_without(some):
        return lambda *arguments, **settings: (
            [] if some is None or number in some else sequences
            for number, sequences in enumerate(read(*arguments, **settings))
        )

    monkeypatch.setattr(data, "read_ahead", read_without(lost))
    found = list(maker.batches(snapshot, planned, epoch=0))
    assert len(found) == len(whole) > max(lost)
    for number, (batch, expected) in enumerate(zip(found, whole, strict=True)):
        assert batch.num_real_tokens == (0 if number in lost else expected.num_real_tokens)
        if number in lost:
            assert not batch.row_weight.any()
        else:
            assert torch.equal(batch.row_label, expected.row_label)
    monkeypatch.setattr(data, "read_ahead", read_without(None))
    with pytest.raises(ValueError, match="store verify"):
        list(maker.batches(snapshot, planned, epoch=0))


def test_many_short_sequences_are_read_by_processes_of_their_own_on_a_gpu(architecture):
    def chosen(device, lengths):
        train = TrainConfig(batch_tokens=4096, attention="sdpa")
        maker = make_batch_maker(train, architecture, torch.device(device))
        return data.choose_processes(maker, np.array(lengths, np.int32))

    assert chosen("cuda", [200, 300]) == data.NUM_PROCESSES > 0
    assert chosen("cuda", [3000, 3072]) == chosen("cuda", []) == chosen("cpu", [200, 300]) == 0


@pytest.mark.parametrize(
    ("settings", "kind"),
    [({}, BlockTables), ({"dtype": "float32"}, BlockMask), ({"attention": "flex"}, BlockMask)],
)
def test_own_kernels_are_for_bf16(shared_store_dir, architecture, monkeypatch, settings, kind):
    monkeypatch.setattr(masks, "has_room", lambda device: True)
    fitting = dataclasses.replace(architecture, block_size=8, head_dim=16)
    train = TrainConfig(batch_tokens=128, num_anchors=32, **settings)
    # Batches are made here; what a GPU's loader would add to them is asked of it.
    batches = make_batch_maker(train, fitting, torch.device("cpu"))
    add_masks = make_batch_maker(train, fitting, torch.device("cuda")).add_masks
    snapshot = open_store(shared_store_dir).snapshot()
    planned = plan_epoch(snapshot, seed=0, epoch=0, batch_tokens=128)
    batch = add_masks(next(batches.batches(snapshot, planned, epoch=0)))
    assert all(isinstance(mask, kind) for mask in batch.masks.of_layers)


def test_stopping_early_leaves_no_reading_thread(shared_store_dir, architecture):
    snapshot = open_store(shared_store_dir).snapshot()
    maker = make_batch_maker(TrainConfig(batch_tokens=128), architecture, torch.device("cpu"))
    planned = plan_epoch(snapshot, seed=0, epoch=0, batch_tokens=128)
    batches = maker.batches(snapshot, planned, epoch=0)
    next(batches)
    batches.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("read-ahead")]


def test_a_store_without_supervision_is_refused(tmp_path, tiny_store):
    store_dir = tiny_store.fill_store(tmp_path / "store", num_sequences=4, is_supervised=False)
    with pytest.raises(ValueError, match="none of the 4 sequences in the store can be trained on"):
        plan_epoch(open_store(store_dir).snapshot(), seed=0, epoch=0, batch_tokens=128)


def test_training_waits_for_a_growing_store(tmp_path, make_run, tiny_store):
    store_dir = tiny_store.fill_store(tmp_path / "store", num_committed=1)
    run = make_run(store_dir=store_dir, train={"start_after_shards": 3})
    assert not is_complete(store_dir)
    sequences = {s["sequence_id"]: s for s in map(tiny_store.make_sequence, range(24))}
    said, naps = [], []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        tiny_store.commit_units(open_for_writing(store_dir), sequences, num_committed=1 + len(naps))

    store = wait_for_store(run, is_stopped=lambda: False, say=said.append, sleep=sleep)
    assert store.snapshot().num_shards == 3
    assert len(naps) == 2
    assert said == [f"waiting for 3 shards in {store_dir}"]


def test_a_finished_store_with_few_shards_is_enough(shared_store_dir, make_run):
    run = make_run(train={"start_after_shards": 1000})
    assert is_complete(shared_store_dir)
    assert wait_for_store(run, is_stopped=lambda: False, say=print, sleep=pytest.fail) is not None


def test_waiting_can_be_stopped(tmp_path, make_run, tiny_store):
    run = make_run(store_dir=tiny_store.fill_store(tmp_path / "s", num_committed=0))
    stops = iter([False, True])
    assert (
        wait_for_store(run, is_stopped=lambda: next(stops), say=print, sleep=lambda _: None) is None
    )


def test_no_store_is_an_error(tmp_path, make_run):
    run = make_run(store_dir=tmp_path / "nothing")
    with pytest.raises(StoreNotFoundError, match="no store"):
        wait_for_store(run, is_stopped=lambda: False, say=print)


def test_training_can_wait_for_a_store_that_is_yet_to_be_made(tmp_path, make_run, tiny_store):
    run = make_run(store_dir=tmp_path / "later", train={"wait_for_store_s": 60})

    def sleep(seconds: float) -> None:
        tiny_store.fill_store(tmp_path / "later", num_committed=1)

    store = wait_for_store(run, is_stopped=lambda: False, say=print, sleep=sleep)
    assert store.snapshot().num_shards == 1


def test_the_wait_has_an_end(tmp_path, make_run):
    run = make_run(store_dir=tmp_path / "never", train={"wait_for_store_s": 60})
    naps = []
    with pytest.raises(ValueError, match="fewer than 1 shards after waiting 60 s"):
        wait_for_store(run, is_stopped=lambda: False, say=print, sleep=naps.append)
    assert sum(naps) == 60


def test_made_ahead_keeps_order_and_raises_in_its_place():
    def numbers():
        yield from range(3)
        raise OSError("disk gone")

    made = data._made_ahead(numbers())
    assert [next(made), next(made), next(made)] == [0, 1, 2]
    with pytest.raises(OSError, match="disk gone"):
        next(made)
