"""Triton kernels of AdamW with fp32 masters and bf16 weights: each number is touched once."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32
from torch import Tensor

_ELEMENTS = 4096
# Programs that sum up one tensor's squares.
_NUM_SUMS = 1024


def norm_of(gradients: Sequence[Tensor]) -> Float32[Tensor, ""]:
    """Gives the norm of all gradients together, summed in fp32 in an order that never changes."""
    shape, device = (len(gradients), _NUM_SUMS), gradients[0].device
    sums = torch.zeros(shape, dtype=torch.float32, device=device)
    for of_tensor, gradient in zip(sums, gradients, strict=True):
        num_elements = gradient.numel()
        num_programs = min(_NUM_SUMS, triton.cdiv(num_elements, _ELEMENTS))
        _sum_squares[(num_programs,)](
            gradient, of_tensor, num_elements, ELEMENTS=_ELEMENTS, num_warps=8
        )
    return sums.sum().sqrt()


@triton.jit
def _sum_squares(
    gradient,
    sums,
    num_elements,
    ELEMENTS: tl.constexpr,  # noqa: N803
):
    program, step = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, ELEMENTS)
    total = tl.zeros((ELEMENTS,), dtype=tl.float32)
    for turn in range(tl.cdiv(num_elements - program * ELEMENTS, step * ELEMENTS)):
        place = (program + turn * step).to(tl.int64) * ELEMENTS + lane
        number = tl.load(gradient + place, mask=place < num_elements, other=0.0).to(tl.float32)
        total += number * number
    tl.store(sums + program, tl.sum(total, axis=0))


def adamw_update(
    master: Float32[Tensor, "*shape"],
    exp_avg: Float32[Tensor, "*shape"],
    exp_avg_sq: Float32[Tensor, "*shape"],
    weight: Float[Tensor, "*shape"],
    gradient: Float[Tensor, "*shape"],
    *,
    gradient_scale: Float32[Tensor, ""],
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """Updates one tensor's master, moments and weight; `step` counts from 1.

    The formula is torch's AdamW; the gradient is first multiplied with `gradient_scale`, which
    lies on the device, so that clipping does not wait for it.
    """
    num_elements = master.numel()
    _adamw[(triton.cdiv(num_elements, _ELEMENTS),)](
        master,
        exp_avg,
        exp_avg_sq,
        weight,
        gradient,
        gradient_scale,
        learning_rate / (1 - betas[0] ** step),
        1 - learning_rate * weight_decay,
        betas[0],
        betas[1],
        (1 - betas[1] ** step) ** -0.5,
        eps,
        num_elements,
        ELEMENTS=_ELEMENTS,
        num_warps=8,
    )


@triton.jit
def _adamw(
    master,
    exp_avg,
    exp_avg_sq,
    weight,
    gradient,
    gradient_scale,
    rate,
    keep,
    beta_first,
    beta_second,
    correction,
    eps,
    num_elements,
    ELEMENTS: tl.constexpr,  # noqa: N803
):
    place = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = place < num_elements
    scale = tl.load(gradient_scale)
    slope = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32) * scale
    first = tl.load(exp_avg + place, mask=inside, other=0.0)
    second = tl.load(exp_avg_sq + place, mask=inside, other=0.0)
    first += (slope - first) * (1 - beta_first)
    second = second * beta_second + slope * slope * (1 - beta_second)
    value = tl.load(master + place, mask=inside, other=0.0) * keep
    value -= rate * first / (tl.sqrt(second) * correction + eps)
    tl.store(exp_avg + place, first, mask=inside)
    tl.store(exp_avg_sq + place, second, mask=inside)
    tl.store(master + place, value, mask=inside)
    tl.store(weight + place, value.to(weight.dtype.element_ty), mask=inside)
