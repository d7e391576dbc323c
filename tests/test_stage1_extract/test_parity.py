"""Parity: right states pass, states of another layer, row or position do not."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from stage1_extract.config import TargetConfig
from stage1_extract.parity import check_parity, relative_difference
from stage1_extract.target import load_target
from stage1_extract.target_transformers import TransformersTarget

LAYERS = ["1", "2"]
SEQUENCES = [
    np.arange(start, start + length, dtype=np.int32) for start, length in ((3, 9), (50, 20))
]
States = list[Mapping[str, Tensor]]


@pytest.fixture
def target(target_folder: Callable[..., Path]) -> TransformersTarget:
    loaded = load_target(TargetConfig(model=str(target_folder("llama")), dtype="float32"))
    assert isinstance(loaded, TransformersTarget)
    return loaded


def test_right_states_pass(target: TransformersTarget) -> None:
    assert check_parity(target, SEQUENCES, layers=LAYERS) < 1e-4


def wrong_layer(states: States) -> States:
    return [{"1": each["2"], "2": each["2"]} for each in states]


def wrong_row(states: States) -> States:
    return [{name: states[-1][name][: len(each[name])] for name in LAYERS} for each in states]


def wrong_position(states: States) -> States:
    return [{name: each[name].roll(1, dims=0) for name in LAYERS} for each in states]


def broken(states: States) -> States:
    return [{name: each[name] * torch.nan for name in LAYERS} for each in states]


@pytest.mark.parametrize("fault", [wrong_layer, wrong_row, wrong_position, broken])
def test_wrong_states_stop_extraction(
    target: TransformersTarget,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[States], States],
) -> None:
    right = target.hidden_states

    def wrong(token_ids: Sequence[np.ndarray], *, layers: Sequence[str]) -> States:
        return fault(right(token_ids, layers=layers))

    monkeypatch.setattr(target, "hidden_states", wrong)
    with pytest.raises(ValueError, match="differ from a plain forward pass"):
        check_parity(target, SEQUENCES, layers=LAYERS)


def test_the_difference_is_that_of_the_worst_token() -> None:
    expected = torch.ones(3, 4)
    states = expected.clone()
    states[1] = 2.0
    assert relative_difference(states, expected) == pytest.approx(1.0)
