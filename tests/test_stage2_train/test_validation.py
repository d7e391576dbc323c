"""Validation is the same at every step and for every size of the store, and changes nothing."""

import torch

from stage2_train.config import LossConfig, TrainConfig
from stage2_train.data import make_batch_maker
from stage2_train.decode import LayerDecoder
from stage2_train.drafter import Drafter
from stage2_train.target_head import load_target_head
from stage2_train.validation import held_out_sequences, validate
from storage.reader import open_store


def test_the_same_sequences_are_chosen_however_the_store_grew(tmp_path, tiny_store):
    small = tiny_store.fill_store(tmp_path / "small", num_sequences=60, num_committed=3)
    whole = tiny_store.fill_store(tmp_path / "whole", num_sequences=60)
    few, all_of_them = (
        [snapshot.sequence_id(i) for i in held_out_sequences(snapshot, limit=100).tolist()]
        for snapshot in (open_store(small).snapshot(), open_store(whole).snapshot())
    )
    assert set(few) < set(all_of_them)
    assert [name for name in all_of_them if name in few] == few


def test_validation_repeats_itself_and_leaves_the_drafter_alone(shared_store_dir, architecture):
    store = open_store(shared_store_dir)
    drafter = Drafter(architecture)
    before = {name: weight.clone() for name, weight in drafter.state_dict().items()}
    random_state = torch.random.get_rng_state()
    arguments = {
        "head": load_target_head(store),
        "decoders": (LayerDecoder(encoding="bf16"),) * 2,
        "batches": make_batch_maker(
            TrainConfig(batch_tokens=128, num_anchors=8), architecture, torch.device("cpu")
        ),
        "num_sequences": 3,
        "loss": LossConfig(chunk_rows=64),
    }
    first = validate(drafter, store.snapshot(), **arguments)
    assert first == validate(drafter, store.snapshot(), **arguments)
    assert first["num_walked"] == 3
    assert 1.0 <= first["acceptance_length"] <= 5.0
    assert torch.equal(torch.random.get_rng_state(), random_state)
    for name, weight in drafter.state_dict().items():
        assert torch.equal(weight, before[name])


def test_nothing_held_out_is_no_error(tmp_path, tiny_store, architecture):
    store = open_store(tiny_store.fill_store(tmp_path / "s", num_sequences=2))
    snapshot = store.snapshot()
    snapshot.held_out[:] = False
    found = validate(
        Drafter(architecture),
        snapshot,
        head=load_target_head(store),
        decoders=(LayerDecoder(encoding="bf16"),) * 2,
        batches=make_batch_maker(TrainConfig(), architecture, torch.device("cpu")),
        num_sequences=3,
        loss=LossConfig(chunk_rows=64),
    )
    assert found == {}
