"""Gradients of one optimizer step, summed over its batches and over the ranks."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from stage2_train.ranks import Ranks


@runtime_checkable
class GradientSum(Protocol):
    """How a step's gradients come together in the `grad` of each parameter."""

    def add(self) -> None:
        """Puts away the gradients of a batch that is not the step's last one."""

    def finish(self, factor: float) -> None:
        """Leaves the sum over batches and ranks, times a factor, in each parameter's `grad`."""


class WholeGradients:
    """Every rank holds every gradient. Batches are summed in fp32, ranks once a step."""

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: Ranks) -> None:
        self.parameters, self.ranks = list(parameters), ranks
        self._sums: list[Tensor] | None = None

    @torch.no_grad()
    def add(self) -> None:
        """Puts away the gradients of a batch that is not the step's last one."""
        gradients = self._take()
        if self._sums is None:
            self._sums = [gradient.to(torch.float32) for gradient in gradients]
        else:
            torch._foreach_add_(self._sums, gradients)

    @torch.no_grad()
    def finish(self, factor: float) -> None:
        """Leaves the sum over batches and ranks, times a factor, in each parameter's `grad`."""
        gradients = self._take()
        if self._sums is not None:
            torch._foreach_add_(self._sums, gradients)
            gradients, self._sums = self._sums, None
        torch._foreach_mul_(gradients, factor)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            # Rounded once, to what a single batch's gradient would be.
            parameter.grad = gradient.to(parameter.dtype)
        self.ranks.sum_tensors(p.grad for p in self.parameters if p.grad is not None)

    def _take(self) -> list[Tensor]:
        gradients = [
            # A batch without a label gives some weights no gradient; all ranks must sum alike.
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self.parameters
        ]
        for parameter in self.parameters:
            parameter.grad = None
        return gradients
