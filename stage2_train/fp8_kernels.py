"""Triton kernels around fp8 products: codes of rows in one pass, their transpose, and SwiGLU's."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Shaped
from torch import Tensor

from stage2_train.fp8 import FP8, SMALLEST_SCALE, SUM_MULTIPLE, Fp8Rows

# Rows and columns of a tile: whole cache lines of 128 bytes on the side of both.
_TILE = 128


def quantize_rows_fused(matrix: Float[Tensor, "rows columns"]) -> Fp8Rows:
    """Gives what `fp8.quantize_rows` gives, in one pass; for code that is not compiled."""
    num_rows, num_columns = matrix.shape
    codes = torch.empty((num_rows, num_columns), dtype=FP8, device=matrix.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=matrix.device)
    _quantize[(num_rows,)](
        matrix,
        codes,
        scales,
        matrix.stride(0),
        num_columns,
        SMALLEST=SMALLEST_SCALE,
        COLUMNS=triton.next_power_of_2(num_columns),
        num_warps=8,
    )
    return Fp8Rows(codes, scales)


def swiglu_codes_fused(
    gate: Float[Tensor, "tokens width"], up: Float[Tensor, "tokens width"]
) -> Fp8Rows:
    """Gives what `fp8_mlp.plain_swiglu_codes` gives, in one pass."""
    num_tokens, width = gate.shape
    codes = torch.empty((num_tokens, width), dtype=FP8, device=gate.device)
    scales = torch.empty((num_tokens, 1), dtype=torch.float32, device=gate.device)
    _swiglu[(num_tokens,)](
        gate.contiguous(),
        up.contiguous(),
        codes,
        scales,
        WIDTH=width,
        SMALLEST=SMALLEST_SCALE,
        COLUMNS=triton.next_power_of_2(width),
        num_warps=16,
    )
    return Fp8Rows(codes, scales)


def swiglu_slope_codes_fused(
    above: Float[Tensor, "tokens width"],
    gate: Float[Tensor, "tokens width"],
    up: Float[Tensor, "tokens width"],
    weight_scales: Float32[Tensor, "both 1"],
) -> Fp8Rows:
    """Gives what `fp8_mlp.plain_swiglu_slope_codes` gives, in one pass."""
    num_tokens, width = gate.shape
    codes = torch.empty((num_tokens, 2 * width), dtype=FP8, device=gate.device)
    scales = torch.empty((num_tokens, 1), dtype=torch.float32, device=gate.device)
    _swiglu_slopes[(num_tokens,)](
        above.contiguous(),
        gate.contiguous(),
        up.contiguous(),
        weight_scales.contiguous(),
        codes,
        scales,
        WIDTH=width,
        SMALLEST=SMALLEST_SCALE,
        COLUMNS=triton.next_power_of_2(width),
        num_warps=16,
    )
    return Fp8Rows(codes, scales)


def transpose_codes(
    codes: Shaped[Tensor, "rows columns"],
    factors: Float32[Tensor, "rows 1"] | None,
    *,
    out: Shaped[Tensor, "columns filled_rows"] | None = None,
) -> Shaped[Tensor, "columns filled_rows"]:
    """Gives what `fp8.plain_transposed_codes` gives, in one pass; in `out` where it is given."""
    num_rows, num_columns = codes.shape
    num_filled = triton.cdiv(num_rows, SUM_MULTIPLE) * SUM_MULTIPLE
    if out is None:
        out = torch.empty((num_columns, num_filled), dtype=FP8, device=codes.device)
    transposed = out.view(torch.uint8)
    grid = (triton.cdiv(num_columns, _TILE), triton.cdiv(num_filled, _TILE))
    _transpose[grid](
        codes.view(torch.uint8),
        transposed if factors is None else factors,
        transposed,
        codes.stride(0),
        transposed.stride(0),
        num_rows,
        num_columns,
        num_filled,
        HAS_FACTORS=factors is not None,
        TILE=_TILE,
        num_warps=8,
    )
    return out


@triton.jit
def _scale_of(number, SMALLEST: tl.constexpr):  # noqa: N803
    """The power of two that brings a row below the largest code (see `fp8.power_of_two_above`)."""
    limit = tl.maximum(tl.max(tl.abs(number), axis=0) / 448.0, SMALLEST)
    bits = (limit.to(tl.int32, bitcast=True) + 0x7FFFFF) & ~0x7FFFFF
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _quantize(
    matrix,
    codes,
    scales,
    row_stride,
    num_columns,
    SMALLEST: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """One row, whole in registers: its scale, then its codes."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < num_columns
    number = tl.load(matrix + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = _scale_of(number, SMALLEST)
    tl.store(scales + row, scale)
    tl.store(codes + row * num_columns + column, (number / scale).to(tl.float8e4nv), mask=inside)


@triton.jit
def _swiglu(
    gate,
    up,
    codes,
    scales,
    WIDTH: tl.constexpr,  # noqa: N803
    SMALLEST: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """One token, whole in registers."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH
    gated = tl.load(gate + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    number = tl.load(up + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    number *= gated * tl.sigmoid(gated)
    scale = _scale_of(number, SMALLEST)
    tl.store(scales + token, scale)
    tl.store(codes + token * WIDTH + column, (number / scale).to(tl.float8e4nv), mask=inside)


@triton.jit
def _swiglu_slopes(
    above,
    gate,
    up,
    weight_scales,
    codes,
    scales,
    WIDTH: tl.constexpr,  # noqa: N803
    SMALLEST: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """One token, whole in registers: slopes of gate and up under one scale."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH
    slope = tl.load(above + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    gated = tl.load(gate + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    number = tl.load(up + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gated)
    to_gate = slope * number * share * (1.0 + gated * (1.0 - share))
    to_up = slope * gated * share
    to_gate *= tl.load(weight_scales + column, mask=inside, other=0.0)
    to_up *= tl.load(weight_scales + WIDTH + column, mask=inside, other=0.0)
    scale = _scale_of(tl.maximum(tl.abs(to_gate), tl.abs(to_up)), SMALLEST)
    tl.store(scales + token, scale)
    place = codes + token * (2 * WIDTH) + column
    tl.store(place, (to_gate / scale).to(tl.float8e4nv), mask=inside)
    tl.store(place + WIDTH, (to_up / scale).to(tl.float8e4nv), mask=inside)


@triton.jit
def _transpose(
    codes,
    factors,
    transposed,
    row_stride,
    column_stride,
    num_rows,
    num_columns,
    num_filled,
    HAS_FACTORS: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
):
    """One tile. Powers of two as factors move exponents, so nothing is rounded but subnormals."""
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    source = codes + row[:, None].to(tl.int64) * row_stride + column[None, :]
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    tile = tl.load(source, mask=inside, other=0)
    if HAS_FACTORS:
        factor = tl.load(factors + row, mask=row < num_rows, other=0.0)
        number = tile.to(tl.float8e4nv, bitcast=True).to(tl.float32) * factor[:, None]
        tile = number.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    place = transposed + column[:, None].to(tl.int64) * column_stride + row[None, :]
    inside = (column < num_columns)[:, None] & (row < num_filled)[None, :]
    tl.store(place, tl.trans(tile), mask=inside)
