import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from storage.commits import CommitRecord, read_commit
from storage.encodings import bf16_to_float32, encode, float32_to_bf16
from storage.files import LocalFiles
from storage.losses import EncodingLoss, measure_loss, total_losses
from storage.reader import open_store
from storage.schema import LayerRecord

HIDDEN_SIZE = 16
FP8 = LayerRecord(name="1", encoding="fp8", hidden_size=HIDDEN_SIZE)


def some_states() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((64, HIDDEN_SIZE)).astype(np.float32)


def test_an_exact_encoding_loses_nothing() -> None:
    states = bf16_to_float32(float32_to_bf16(some_states()))
    record = dataclasses.replace(FP8, encoding="bf16")
    assert measure_loss(record, states, encode("bf16", states)).relative_error == 0


def test_each_token_counts_alike_whatever_its_size() -> None:
    states = some_states()
    loss = measure_loss(FP8, states, encode("fp8", states))
    large = np.concatenate([states[:1] * 2.0**14, states[1:]])
    assert 0.005 < loss.relative_error < 0.05
    assert measure_loss(FP8, large, encode("fp8", large)).relative_error == pytest.approx(
        loss.relative_error
    )


def test_losses_of_parts_add_up() -> None:
    states = some_states()
    parts = [
        {"1": measure_loss(FP8, rows, encode("fp8", rows))} for rows in (states[:10], states[10:])
    ]
    whole = measure_loss(FP8, states, encode("fp8", states))
    total = total_losses([*parts, {"1": EncodingLoss(num_saturated=3)}])["1"]
    assert total.num_measured_tokens == whole.num_measured_tokens
    assert total.sum_squared_errors == pytest.approx(whole.sum_squared_errors)
    assert total.num_saturated == 3


def test_nothing_measured_is_no_figure() -> None:
    assert np.isnan(EncodingLoss().relative_error)


def test_losses_are_kept_in_the_commit_record(tmp_path: Path, making: SimpleNamespace) -> None:
    store = making.make_store(tmp_path)
    unit = store.units()[0]
    loss = EncodingLoss(num_measured_tokens=2, sum_squared_errors=0.02, num_saturated=1)
    with store.start_shard(unit) as shard:
        for sequence_id in store.sequences_of(unit):
            shard.append(**making.make_sequence(sequence_id))
            shard.count_losses({"1": loss})
        assert shard.seal()
    count = len(store.sequences_of(unit))
    found = read_commit(LocalFiles(tmp_path), unit).losses
    assert found["1"].num_saturated == count
    assert found["1"].relative_error == pytest.approx(0.1)


def test_records_without_losses_and_with_unknown_members_are_read(
    tmp_path: Path, making: SimpleNamespace
) -> None:
    store = making.make_store(tmp_path)
    unit = store.units()[0]
    making.fill_unit(store, unit)
    value = read_commit(LocalFiles(tmp_path), unit).to_json()
    del value["losses"]
    assert CommitRecord.from_json({**value, "of_a_later_version": 1}).losses == {}


def test_losses_of_added_layers_are_counted_too(tmp_path: Path, making: SimpleNamespace) -> None:
    store = making.make_store(tmp_path, num_sequences=2, num_units=1)
    making.fill(store)
    (unit,) = store.units()
    store.add_layers([LayerRecord(name="5", encoding="bf16", hidden_size=HIDDEN_SIZE)])
    with store.start_layers(unit, ["5"]) as writer:
        for sequence_id in writer.sequence_ids:
            states = making.make_sequence(sequence_id)["states"]["9"]
            writer.append(sequence_id=sequence_id, states={"5": states})
        writer.count_losses({"5": EncodingLoss(num_saturated=4)})
        assert writer.seal()
    assert open_store(tmp_path).snapshot().losses_of_shard(0)["5"].num_saturated == 4
