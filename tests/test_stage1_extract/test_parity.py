"""Parity: right states pass, states of another layer, row or position do not."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from stage1_extract import target_transformers
from stage1_extract.config import Batching, ExtractConfig, TargetConfig
from stage1_extract.parity import (
    ParityError,
    check_parity,
    choose_batching,
    choose_way,
    is_compiling_wanted,
    relative_differences,
)
from stage1_extract.target import load_target
from stage1_extract.target_transformers import TransformersTarget

LAYERS = ["1", "2"]
SEQUENCES = [
    np.arange(start, start + length, dtype=np.int32) for start, length in ((3, 9), (50, 20))
]
States = dict[str, Tensor]


@pytest.fixture
def target(target_folder: Callable[..., Path]) -> TransformersTarget:
    loaded = load_target(TargetConfig(model=str(target_folder("llama")), dtype="float32"))
    assert isinstance(loaded, TransformersTarget)
    return loaded


@pytest.mark.parametrize("batching", ["packed", "padded", "single"])
def test_right_states_pass(target: TransformersTarget, batching: Batching) -> None:
    target.batching = batching
    assert check_parity(target, SEQUENCES, layers=LAYERS) < 1e-4


@pytest.mark.parametrize(
    ("compile_", "gpus", "on_gpu", "on_cpu"),
    [
        (None, 1, True, False),
        (True, 1, True, True),
        (False, 1, False, False),
        (None, 2, *[False] * 2),
    ],
)
def test_layers_run_compiled_where_a_gpu_is_unless_the_settings_say_otherwise(
    compile_: bool | None, gpus: int, on_gpu: bool, on_cpu: bool
) -> None:
    settings = ExtractConfig(compile=compile_, gpus_per_worker=gpus)
    assert is_compiling_wanted(settings, device="cuda:3") is on_gpu
    assert is_compiling_wanted(settings, device="cpu") is on_cpu


def test_a_target_on_several_gpus_is_never_compiled() -> None:
    settings = ExtractConfig(compile=True, gpus_per_worker=2)
    with pytest.raises(ValueError, match=r"extract\.compile = true: .* remove one"):
        is_compiling_wanted(settings, device="cuda")


def test_the_settings_choose_the_way(target: TransformersTarget) -> None:
    """As a worker, `plan --measure` and `add-layers` do it."""
    settings = ExtractConfig(batching="single")
    choose_way(target, SEQUENCES, layers=LAYERS, settings=settings, batch_tokens=64)
    assert (target.batching, target.compiled) == ("single", None)


def wrong_layer(states: States) -> States:
    return {"1": states["2"], "2": states["2"]}


def wrong_sequence(states: States) -> States:
    return {name: each.flip(0) for name, each in states.items()}


def wrong_position(states: States) -> States:
    return {name: each.roll(1, dims=0) for name, each in states.items()}


def broken(states: States) -> States:
    return {name: each * torch.nan for name, each in states.items()}


FAULTS = [wrong_layer, wrong_sequence, wrong_position, broken]


def make_faulty(
    target: TransformersTarget,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[States], States],
    *,
    ways: Sequence[Batching] = ("packed", "padded", "single"),
) -> None:
    right = target.hidden_states

    def wrong(token_ids: Sequence[np.ndarray], *, layers: Sequence[str]) -> States:
        states = right(token_ids, layers=layers)
        return fault(states) if target.batching in ways else states

    monkeypatch.setattr(target, "hidden_states", wrong)


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_states_are_noticed(
    target: TransformersTarget,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[States], States],
) -> None:
    make_faulty(target, monkeypatch, fault)
    with pytest.raises(ParityError, match="differ from a plain forward pass"):
        check_parity(target, SEQUENCES, layers=LAYERS)


def test_packing_is_taken_where_it_is_exact(target: TransformersTarget) -> None:
    assert choose_batching(target, SEQUENCES, layers=LAYERS) == "packed"
    assert target.batching == "packed"


@pytest.mark.parametrize(
    ("faulty_ways", "chosen"), [(["packed"], "padded"), (["packed", "padded"], "single")]
)
def test_what_is_not_exact_is_not_taken(
    target: TransformersTarget,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    faulty_ways: list[Batching],
    chosen: Batching,
) -> None:
    make_faulty(target, monkeypatch, wrong_position, ways=faulty_ways)
    assert choose_batching(target, SEQUENCES, layers=LAYERS) == chosen
    assert "packed batches do not suit this target" in capsys.readouterr().err


def test_a_way_that_was_asked_for_is_not_replaced(
    target: TransformersTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_faulty(target, monkeypatch, wrong_position, ways=["packed"])
    with pytest.raises(ParityError, match="in packed batches"):
        choose_batching(target, SEQUENCES, layers=LAYERS, wanted="packed")


def test_when_nothing_is_exact_nothing_is_stored(
    target: TransformersTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_faulty(target, monkeypatch, wrong_layer)
    with pytest.raises(ParityError, match="in single batches"):
        choose_batching(target, SEQUENCES, layers=LAYERS)


def test_packed_sequences_that_see_each_other_are_noticed(
    target: TransformersTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One boundary forgotten: the second sequence looks into the first."""
    right = target_transformers.packed_input

    def without_boundary(token_ids: Sequence[np.ndarray], *, device: str) -> dict[str, object]:
        arguments = right(token_ids, device=device)
        ends = arguments["cu_seq_lens_q"][[0, -1]]
        return arguments | {"cu_seq_lens_q": ends, "max_length_q": int(ends[-1])}

    monkeypatch.setattr(target_transformers, "packed_input", without_boundary)
    assert choose_batching(target, SEQUENCES, layers=LAYERS) == "padded"


def test_differences_are_relative_to_each_token() -> None:
    expected = torch.tensor([[1.0, 0.0], [0.0, 10.0]])
    states = torch.tensor([[1.5, 0.0], [0.0, 10.0]])
    assert relative_differences(states, expected).tolist() == [0.5, 0.0]


@pytest.mark.parametrize(("size", "is_rounding"), [(0.02, True), (0.14, False)])
def test_rounding_in_bf16_is_no_fault(
    target: TransformersTarget, monkeypatch: pytest.MonkeyPatch, size: float, is_rounding: bool
) -> None:
    """The sizes seen with a real model: rounding, and one forgotten boundary."""
    target.model.to(torch.bfloat16)

    def noisy(states: States) -> States:
        return {name: each * (1 + size) for name, each in states.items()}

    make_faulty(target, monkeypatch, noisy)
    if is_rounding:
        check_parity(target, SEQUENCES, layers=LAYERS)
    else:
        with pytest.raises(ParityError):
            check_parity(target, SEQUENCES, layers=LAYERS)
