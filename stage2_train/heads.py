"""Heads on their way from a projection to attention: normed, turned by RoPE, in one pass."""

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from stage2_train.drafter import RmsNorm, Rotation, rotate


def normed_and_turned(
    heads: Float[Tensor, "tokens heads head_dim"], norm: RmsNorm, rotation: Rotation
) -> Float[Tensor, "tokens heads head_dim"]:
    """Norms every head and turns it by its position; one kernel each way on a GPU.

    Args:
        heads: what a projection gave.
        norm: the norm of a head.
        rotation: cosines and sines, each `[tokens, head_dim]`.
    """
    head_dim = heads.shape[-1]
    if not heads.is_cuda or head_dim < 16 or head_dim & (head_dim - 1):
        return rotate(norm(heads), rotation)
    return cast(Tensor, _normed_and_turned(heads, norm.weight, *rotation, norm.eps))


@torch.library.custom_op("dflash_offline::normed_and_turned", mutates_args=())
def _normed_and_turned(
    heads: Tensor, weight: Tensor, cosines: Tensor, sines: Tensor, eps: float
) -> Tensor:
    # Imported here, for a CPU needs no Triton.
    from stage2_train.head_kernels import norm_and_turn

    return norm_and_turn(heads, weight, cosines, sines, eps)


@_normed_and_turned.register_fake
def _(heads: Tensor, weight: Tensor, cosines: Tensor, sines: Tensor, eps: float) -> Tensor:
    return torch.empty_like(heads, memory_format=torch.contiguous_format)


@torch.library.custom_op("dflash_offline::normed_and_turned_backward", mutates_args=())
def _slopes(
    heads: Tensor, weight: Tensor, cosines: Tensor, sines: Tensor, slopes: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Gives the gradient of the heads, and that of the weight in parts, still to be added up."""
    from stage2_train.head_kernels import norm_and_turn_slopes

    return norm_and_turn_slopes(heads, weight, cosines, sines, slopes, eps)


@_slopes.register_fake
def _(
    heads: Tensor, weight: Tensor, cosines: Tensor, sines: Tensor, slopes: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    from stage2_train.head_kernels import num_parts

    num_programs = num_parts(heads.shape[0] * heads.shape[1])
    return (
        torch.empty_like(heads, memory_format=torch.contiguous_format),
        heads.new_empty((num_programs, heads.shape[2]), dtype=torch.float32),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
    heads, weight, cosines, sines = ctx.saved_tensors
    of_heads, parts = _slopes(heads, weight, cosines, sines, slopes, ctx.eps)
    return of_heads, parts.sum(dim=0).to(weight.dtype), None, None, None


_normed_and_turned.register_autograd(_differentiate, setup_context=_keep)
