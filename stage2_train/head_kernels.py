# ruff: noqa: N803
"""Triton kernels of what stands between a projection and attention: a norm of each head, RoPE."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32
from torch import Tensor

# Heads that a program works on at once.
_ROWS = 32
_NUM_PROGRAMS = 1056


def norm_and_turn(
    heads: Float[Tensor, "tokens heads head_dim"],
    weight: Float[Tensor, "head_dim"],
    cosines: Float[Tensor, "tokens head_dim"],
    sines: Float[Tensor, "tokens head_dim"],
    eps: float,
) -> Float[Tensor, "tokens heads head_dim"]:
    """Gives heads, each scaled to unit mean square, times the weight, turned by its position."""
    turned = torch.empty_like(heads, memory_format=torch.contiguous_format)
    num_rows = heads.shape[0] * heads.shape[1]
    _norm_and_turn[(triton.cdiv(num_rows, _ROWS),)](
        heads.contiguous(),
        weight,
        cosines.contiguous(),
        sines.contiguous(),
        turned,
        num_rows,
        eps,
        HEADS=heads.shape[1],
        HEAD_DIM=heads.shape[2],
        ROWS=_ROWS,
        num_warps=4,
    )
    return turned


def norm_and_turn_slopes(
    heads: Float[Tensor, "tokens heads head_dim"],
    weight: Float[Tensor, "head_dim"],
    cosines: Float[Tensor, "tokens head_dim"],
    sines: Float[Tensor, "tokens head_dim"],
    slopes: Float[Tensor, "tokens heads head_dim"],
    eps: float,
) -> tuple[Float[Tensor, "tokens heads head_dim"], Float32[Tensor, "parts head_dim"]]:
    """Gives the gradient of the heads, and that of the weight in parts to be added up."""
    of_heads = torch.empty_like(heads, memory_format=torch.contiguous_format)
    num_rows = heads.shape[0] * heads.shape[1]
    num_programs = num_parts(num_rows)
    of_weight = heads.new_empty((num_programs, heads.shape[2]), dtype=torch.float32)
    _norm_and_turn_slopes[(num_programs,)](
        heads.contiguous(),
        weight,
        cosines.contiguous(),
        sines.contiguous(),
        slopes.contiguous(),
        of_heads,
        of_weight,
        num_rows,
        eps,
        HEADS=heads.shape[1],
        HEAD_DIM=heads.shape[2],
        ROWS=_ROWS,
        num_warps=4,
    )
    return of_heads, of_weight


def num_parts(num_rows: int) -> int:
    """Gives how many parts the weight's gradient comes in."""
    return min(-(-num_rows // _ROWS), _NUM_PROGRAMS)


@triton.jit
def _halves(base, row, half, inside, HALF: tl.constexpr):
    """Reads the two halves of rows of `2 * HALF` numbers in fp32."""
    place = base + row[:, None].to(tl.int64) * (2 * HALF) + half[None, :]
    left = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    return left, tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _scale_of(left, right, eps, HEAD_DIM: tl.constexpr):
    squares = tl.sum(left * left + right * right, axis=1)
    return tl.rsqrt(squares / HEAD_DIM + eps)[:, None]


@triton.jit
def _norm_and_turn(
    heads,
    weight,
    cosines,
    sines,
    turned,
    num_rows,
    eps,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    half = tl.arange(0, HEAD_DIM // 2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < num_rows)[:, None]
    left, right = _halves(heads, row, half, inside, HEAD_DIM // 2)
    scale = _scale_of(left, right, eps, HEAD_DIM)
    left *= scale * tl.load(weight + half).to(tl.float32)[None, :]
    right *= scale * tl.load(weight + HEAD_DIM // 2 + half).to(tl.float32)[None, :]
    # Both halves of a head have the same angles.
    cosine, _ = _halves(cosines, row // HEADS, half, inside, HEAD_DIM // 2)
    sine, _ = _halves(sines, row // HEADS, half, inside, HEAD_DIM // 2)
    place = turned + row[:, None].to(tl.int64) * HEAD_DIM + half[None, :]
    dtype = turned.dtype.element_ty
    tl.store(place, (left * cosine - right * sine).to(dtype), mask=inside)
    tl.store(place + HEAD_DIM // 2, (right * cosine + left * sine).to(dtype), mask=inside)


@triton.jit
def _norm_and_turn_slopes(
    heads,
    weight,
    cosines,
    sines,
    slopes,
    of_heads,
    of_weight,
    num_rows,
    eps,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Some tiles of rows: turns the slopes back, then goes through the norm."""
    half = tl.arange(0, HEAD_DIM // 2)
    left_weight = tl.load(weight + half).to(tl.float32)[None, :]
    right_weight = tl.load(weight + HEAD_DIM // 2 + half).to(tl.float32)[None, :]
    of_left_weight = tl.zeros((ROWS, HEAD_DIM // 2), dtype=tl.float32)
    of_right_weight = tl.zeros((ROWS, HEAD_DIM // 2), dtype=tl.float32)
    program, step = tl.program_id(0), tl.num_programs(0)
    for turn in range(tl.cdiv(num_rows - program * ROWS, step * ROWS)):
        row = (program + turn * step) * ROWS + tl.arange(0, ROWS)
        inside = (row < num_rows)[:, None]
        left, right = _halves(heads, row, half, inside, HEAD_DIM // 2)
        scale = _scale_of(left, right, eps, HEAD_DIM)
        left *= scale
        right *= scale
        cosine, _ = _halves(cosines, row // HEADS, half, inside, HEAD_DIM // 2)
        sine, _ = _halves(sines, row // HEADS, half, inside, HEAD_DIM // 2)
        left_slope, right_slope = _halves(slopes, row, half, inside, HEAD_DIM // 2)
        to_left = left_slope * cosine + right_slope * sine
        to_right = right_slope * cosine - left_slope * sine
        of_left_weight += to_left * left
        of_right_weight += to_right * right
        to_left *= left_weight
        to_right *= right_weight
        along = tl.sum(to_left * left + to_right * right, axis=1)[:, None] / HEAD_DIM
        place = of_heads + row[:, None].to(tl.int64) * HEAD_DIM + half[None, :]
        dtype = of_heads.dtype.element_ty
        tl.store(place, ((to_left - left * along) * scale).to(dtype), mask=inside)
        right_place = place + HEAD_DIM // 2
        tl.store(right_place, ((to_right - right * along) * scale).to(dtype), mask=inside)
    place = of_weight + program * HEAD_DIM + half
    tl.store(place, tl.sum(of_left_weight, axis=0))
    tl.store(place + HEAD_DIM // 2, tl.sum(of_right_weight, axis=0))
