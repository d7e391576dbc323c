"""AdamW on fp32 masters: torch's own steps, resumable, with the paper's schedule."""

import itertools
import math

import pytest
import torch
from torch import nn

from stage2_train.config import OptimizerConfig
from stage2_train.optimizer import MasterAdamW, learning_rate


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
        self.norm = nn.Parameter(torch.ones(3))

    def loss(self, step: int) -> torch.Tensor:
        data = torch.linspace(-1, 1 + step, 4, dtype=self.matrix.dtype)
        return ((self.matrix @ data * self.norm) ** 2).sum()


def test_schedule_warms_up_and_falls_to_zero():
    config = OptimizerConfig(learning_rate=1.0, warmup_fraction=0.04)
    rates = [learning_rate(step, total_steps=100, config=config) for step in range(101)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert max(rates) == 1.0
    assert all(later <= sooner for sooner, later in itertools.pairwise(rates[4:]))
    assert rates[52] == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.5)))
    assert rates[100] == pytest.approx(0.0)


def test_steps_are_those_of_torch():
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.1, clip_norm=0.5)
    ours, reference = Tiny(), Tiny()
    optimizer = MasterAdamW(ours, config)
    plain = torch.optim.AdamW(
        [
            {"params": [reference.matrix], "weight_decay": 0.1},
            {"params": [reference.norm], "weight_decay": 0.0},
        ],
        betas=config.betas,
    )
    for step in range(5):
        ours.loss(step).backward()
        norm = optimizer.step(0.1 / (step + 1))
        reference.loss(step).backward()
        expected_norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        for group in plain.param_groups:
            group["lr"] = 0.1 / (step + 1)
        plain.step()
        plain.zero_grad()
        torch.testing.assert_close(norm, expected_norm)
        torch.testing.assert_close(list(ours.parameters()), list(reference.parameters()))


def test_small_updates_are_not_lost_in_bf16():
    drafter = Tiny()
    optimizer = MasterAdamW(drafter, OptimizerConfig(), dtype=torch.bfloat16)
    before = optimizer.weights()["matrix"].clone()
    for step in range(20):
        drafter.loss(step).backward()
        optimizer.step(1e-5)
    assert drafter.matrix.dtype == torch.bfloat16
    moved = (optimizer.weights()["matrix"] - before).abs()
    # One such step is far below bf16's resolution near 1.
    assert moved.max() == pytest.approx(20e-5, rel=0.1)
    assert torch.equal(drafter.matrix, optimizer.weights()["matrix"].bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_state_goes_on_as_if_never_stopped(dtype):
    def run(drafter, optimizer, steps):
        for step in steps:
            drafter.loss(step).backward()
            optimizer.step(0.01)

    whole = Tiny()
    whole_optimizer = MasterAdamW(whole, OptimizerConfig(), dtype=dtype)
    run(whole, whole_optimizer, range(3))
    weights = {name: w.clone() for name, w in whole_optimizer.weights().items()}
    state = {name: s.clone() for name, s in whole_optimizer.state().items()}
    run(whole, whole_optimizer, range(3, 6))
    resumed = Tiny()
    resumed_optimizer = MasterAdamW(resumed, OptimizerConfig(), dtype=dtype)
    resumed_optimizer.load(weights, state)
    run(resumed, resumed_optimizer, range(3, 6))
    for name, weight in whole_optimizer.weights().items():
        assert torch.equal(resumed_optimizer.weights()[name], weight)


def test_state_before_the_first_step_is_empty_and_loads():
    drafter = Tiny()
    optimizer = MasterAdamW(drafter, OptimizerConfig())
    assert optimizer.state() == {}
    optimizer.load(optimizer.weights(), {})
    drafter.loss(0).backward()
    optimizer.step(0.1)
