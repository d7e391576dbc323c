"""D-PACE: weights of a block's offsets from how far the drafter itself would get.

An offset matters as much as blocks are likely to reach it. With p_k the drafter's probability of
the label at offset k, smoothed to q_k = (1 - a) p_k + a, the weight of offset k is the sum over
m >= k of q_1 ... q_m: what the offset's success adds to the expected length (SpecForge's D-PACE).
"""

from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor


def pace_weights(
    probability: Float[Tensor, "rows"],
    row_index: Int[Tensor, "rows"],
    *,
    num_blocks: int,
    block_size: int,
    smoothing: float = 0.5,
) -> Float[Tensor, "rows"]:
    """Gives each row's weight; no gradient flows through it.

    A label that does not count is passed as if it were certain, and adds nothing to the length.

    Args:
        probability: the drafter's probability of each row's label.
        row_index: block * block_size + offset of each row.
        num_blocks: blocks of the batch, padded ones included.
        block_size: tokens of a block.
        smoothing: the `a` above: 0 trusts the probabilities, 1 gives all offsets their length.
    """
    probability = probability.detach()
    smoothed = (1.0 - smoothing) * probability + smoothing
    grid = torch.ones(num_blocks * block_size, dtype=smoothed.dtype, device=smoothed.device)
    reached = grid.index_copy(0, row_index, smoothed).view(num_blocks, block_size).cumprod(dim=1)
    counted = torch.zeros_like(grid).index_fill(0, row_index, 1.0).view_as(reached)
    length = (reached * counted).flip(1).cumsum(dim=1).flip(1)
    return length.reshape(-1).index_select(0, row_index)


def weighted_later(
    hidden: Float[Tensor, "rows hidden"], weights: Float[Tensor, "rows"]
) -> Float[Tensor, "rows hidden"]:
    """Passes rows on; their gradients come back times weights that may be filled in until then.

    D-PACE's weights follow from the losses, whose gradients are made with them.
    """
    return cast(Tensor, _WeightedLater.apply(hidden, weights))  # type: ignore[no-untyped-call]


class _WeightedLater(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor) -> Tensor:
        # Not saved as autograd saves: it would refuse what is written after this.
        ctx.weights = weights
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gradient,) = grads
        return gradient * ctx.weights[:, None].to(gradient.dtype), None
