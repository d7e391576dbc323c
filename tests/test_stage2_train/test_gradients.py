"""Gradients of a step are the sum over its batches, in fp32, whatever the parameters' type."""

import torch
from torch import nn

from stage2_train.gradients import WholeGradients
from stage2_train.ranks import ALONE


def test_batches_are_summed_without_losing_small_ones():
    weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    gradients = WholeGradients([weight], ALONE)
    # One large gradient and many that bf16 would round away beside it.
    parts = [256.0, *[0.5] * 64]
    for number, part in enumerate(parts):
        if number > 0:
            gradients.add()
        (weight * part).sum().backward()
    gradients.finish(2.0)
    torch.testing.assert_close(weight.grad, torch.full_like(weight, 2 * (256 + 32)))
    assert weight.grad.dtype == torch.bfloat16


def test_one_batch_is_only_scaled_and_steps_do_not_mix():
    weight, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    gradients = WholeGradients([weight, unused], ALONE)
    for _ in range(2):
        (weight * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
        gradients.finish(0.5)
        assert weight.grad.tolist() == [0.5, 1.0, 1.5]
        assert unused.grad.tolist() == [0.0, 0.0]
        weight.grad = unused.grad = None
