"""What training chooses by itself where the settings leave it open."""

import pytest
import torch

from stage2_train import preparation
from stage2_train.config import TrainConfig
from stage2_train.drafter import Drafter
from stage2_train.preparation import ADA, HOPPER, choose_fp8
from stage2_train.target_head import TargetHead
from tests.test_stage2_train.conftest import tied_head


@pytest.fixture
def drafter(architecture, monkeypatch) -> Drafter:
    """One that is as wide as fp8 products ask for."""
    monkeypatch.setattr(preparation, "MIN_FP8_HIDDEN_SIZE", architecture.hidden_size)
    return Drafter(architecture).bfloat16()


def head_of(*, vocab_size: int = 64) -> TargetHead:
    weight = torch.zeros(vocab_size, 32)
    return tied_head(weight)


def on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(preparation, "capability_of", lambda _: capability)


def test_fp8_is_chosen_where_it_was_measured(drafter, monkeypatch):
    assert choose_fp8(TrainConfig(), drafter, head_of()) is False
    for unmeasured in (ADA, (10, 0)):
        on(monkeypatch, unmeasured)
        assert choose_fp8(TrainConfig(), drafter, head_of()) is False
    on(monkeypatch, HOPPER)
    assert choose_fp8(TrainConfig(), drafter, head_of()) == "all"


def test_fp8_is_not_chosen_where_it_cannot_be_or_does_not_pay(drafter, monkeypatch):
    on(monkeypatch, HOPPER)
    assert choose_fp8(TrainConfig(parallel="fsdp"), drafter, head_of()) is False
    assert choose_fp8(TrainConfig(compile=False), drafter, head_of()) is False
    assert choose_fp8(TrainConfig(attention="sdpa"), drafter, head_of()) is False
    assert choose_fp8(TrainConfig(), drafter, head_of(vocab_size=65)) is False
    assert choose_fp8(TrainConfig(), drafter.float(), head_of()) is False
    monkeypatch.setattr(preparation, "MIN_FP8_HIDDEN_SIZE", 33)
    assert choose_fp8(TrainConfig(), drafter.bfloat16(), head_of()) is False


@pytest.mark.parametrize("wanted", [False, True, "all"])
def test_what_is_set_holds(drafter, wanted):
    assert choose_fp8(TrainConfig(fp8=wanted), drafter, head_of()) == wanted
