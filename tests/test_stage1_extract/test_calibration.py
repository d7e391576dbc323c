"""Channel scales come from the target's own states, once, and never change."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from stage1_extract import calibration, planning
from stage1_extract.calibration import calibrate
from stage1_extract.config import ExtractRun
from stage1_extract.extract import prepare_store, run_worker
from stage1_extract.preparation import record_layers, record_once, store_shape
from stage1_extract.target import load_target
from stage1_extract.target_files import load_config
from storage.commits import read_commit
from storage.encodings import calibrate_channels
from storage.errors import StoreError
from storage.reader import open_store
from storage.schema import LM_HEAD_INPUT, LayerRecord
from storage.writer import create_store

MakeRun = Callable[..., ExtractRun]


def int8_run(make_run: MakeRun) -> ExtractRun:
    return make_run(store={"encoding": "int8", "calibration_tokens": 256})


@torch.inference_mode()
def test_scales_are_those_of_the_states_of_the_sample(make_run: MakeRun) -> None:
    run = int8_run(make_run)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 200, 100).astype(np.int32) for _ in range(5)]
    asked = 0

    def reading() -> Iterator[Any]:
        nonlocal asked
        for sequence in sequences:
            asked += 1
            yield sequence

    scales = calibrate(run, reading(), layers=["0", "lm_head_input"])
    assert asked == 3  # 256 tokens need no more
    target: Any = load_target(run.target)
    taken = [*sequences[:2], sequences[2][:56]]
    states = [target.hidden_states([each], layers=["0"])["0"].numpy() for each in taken]
    expected = calibrate_channels(np.concatenate(states))
    np.testing.assert_array_equal(np.float32(scales["0"]), expected)
    assert len(scales["lm_head_input"]) == len(expected)


def test_nothing_to_calibrate_on_is_one_clear_line(make_run: MakeRun) -> None:
    with pytest.raises(ValueError, match="encoding = int8 is calibrated on the conversations"):
        calibrate(int8_run(make_run), [], layers=["0"])


def test_a_store_is_calibrated_once(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = int8_run(make_run)
    layers = prepare_store(run).layers
    assert all(len(layer.channel_scales or ()) == layer.hidden_size for layer in layers.values())
    monkeypatch.setattr(planning, "calibrate", lambda *_, **__: pytest.fail("calibrated again"))
    assert prepare_store(run).layers == layers


def test_of_two_calibrations_the_first_recorded_holds(make_run: MakeRun) -> None:
    run = int8_run(make_run)
    shape = store_shape(run, load_config(run.target))
    identity = prepare_store(make_run(place="elsewhere")).identity
    store = create_store(run.store_dir, identity)
    first = dict.fromkeys(shape.layers, (1.0,) * shape.hidden_size)

    def slow_calibration() -> Any:
        record_layers(store, shape, lambda: first)
        return dict.fromkeys(shape.layers, (2.0,) * shape.hidden_size)

    record_layers(store, shape, slow_calibration)
    assert {layer.channel_scales for layer in store.layers.values()} == set(first.values())


@pytest.mark.parametrize("encoding", ["fp8", "int8"])
def test_layers_that_another_command_is_recording_are_completed(
    make_run: MakeRun, encoding: str
) -> None:
    run = make_run(store={"encoding": encoding})
    whole = prepare_store(make_run(store={"encoding": encoding}, place="elsewhere"))
    store = create_store(run.store_dir, whole.identity)
    first, *others = whole.layers.values()
    store.add_layers([first])
    assert others
    assert prepare_store(run).layers == whole.layers
    with pytest.raises(StoreError, match="holds layers 0, 2, this run wants 0;"):
        prepare_store(make_run(store={"encoding": encoding, "target_layer_ids": [0]}))


def test_a_calibrated_store_refuses_another_encoding(make_run: MakeRun) -> None:
    """Who said nothing, and meets another default, reads what to say."""
    prepare_store(int8_run(make_run))
    says = 'layer 0 is stored as int8, this run wants int4; set store.encoding = "int8"'
    with pytest.raises(StoreError, match=says):
        prepare_store(make_run(store={"encoding": "int4"}))


@pytest.mark.parametrize("kept", ["int3", "int8"])
def test_a_final_state_kept_in_few_bits_is_gone_on_with(make_run: MakeRun, kept: str) -> None:
    """As stores keep it that are older than the rule."""
    run = make_run(store={"encoding": "int3", "lm_head_input": True})
    whole = prepare_store(make_run(place="elsewhere", store={"encoding": "int3"}))
    scales = (1.0,) * whole.identity.hidden_size
    record = LayerRecord(
        name=LM_HEAD_INPUT, encoding=kept, hidden_size=len(scales), channel_scales=scales
    )
    store = create_store(run.store_dir, whole.identity)
    store.add_layers([record, *whole.layers.values()])
    assert prepare_store(run).layers[LM_HEAD_INPUT] == record
    assert run_worker(run, worker_index=0, num_workers=1) == 0


def test_of_processes_that_record_at_once_the_first_ones_scales_hold() -> None:
    """Devices of different kinds differ in the last bits of what they calibrate."""
    recorded: dict[str, LayerRecord] = {}

    def record_as(records: list[LayerRecord]) -> None:
        if recorded.setdefault("0", records[0]) != records[0]:
            raise StoreError("is stored otherwise")

    for scale, encoding in ((1.0, "int8"), (1.0001, "int8"), (1.0, "int4")):
        record = LayerRecord(
            name="0", encoding=encoding, hidden_size=8, channel_scales=(scale,) * 8
        )
        if encoding == "int8":
            record_once(record, record_as=record_as, recorded=lambda: recorded)
        else:
            with pytest.raises(StoreError, match="otherwise"):
                record_once(record, record_as=record_as, recorded=lambda: recorded)
    assert recorded["0"].channel_scales == (1.0,) * 8


@pytest.mark.parametrize(
    ("gpus", "gpus_per_worker", "num_visible", "device"),
    [
        (None, 1, 8, "cuda:0"),
        ((3, 4), 1, 8, "cuda:3"),
        ((3, 4), 1, 1, "cuda:0"),  # A worker's own.
        ((3, 4), 2, 8, "auto"),
        (None, 2, 1, "auto"),
        (None, 2, 0, "cpu"),
    ],
)
def test_it_runs_where_the_runs_targets_will(
    make_run: MakeRun,
    monkeypatch: pytest.MonkeyPatch,
    gpus: Any,
    gpus_per_worker: int,
    num_visible: int,
    device: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    run = make_run(extract={"gpus": gpus, "gpus_per_worker": gpus_per_worker})
    assert calibration.device_of(run) == device


@pytest.mark.parametrize(("encoding", "largest"), [("int8", 0.02), ("int4", 0.12), ("int2", 0.6)])
def test_what_encoding_lost_stands_in_the_commit_record(
    make_run: MakeRun, encoding: str, largest: float
) -> None:
    run = make_run(store={"encoding": encoding, "calibration_tokens": 1000})
    store = prepare_store(run)
    assert run_worker(run, worker_index=0, num_workers=1) == 0
    target: Any = load_target(run.target)
    stored = open_store(run.store_dir)
    for unit in store.units():
        losses = read_commit(store.files, unit).losses
        assert losses.keys() == {"0", "2"}
        for loss in losses.values():
            assert 32 <= loss.num_measured_tokens <= 64
            assert 0 < loss.relative_error < largest
            assert loss.num_saturated == 0
    token_ids, _ = stored.snapshot().read_tokens(0)
    exact = target.hidden_states([token_ids], layers=["2"])["2"].numpy()
    decoded = stored.sequence(stored.snapshot().sequence_id(0)).hidden_states(layers=["2"])[:, 0]
    assert np.linalg.norm(decoded - exact) < largest * np.linalg.norm(exact)
