"""Triton kernels around fp8 products: codes of rows in one pass, and their transpose in one."""

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


def transpose_codes(
    codes: Shaped[Tensor, "rows columns"], factors: Float32[Tensor, "rows 1"] | None
) -> Shaped[Tensor, "columns filled_rows"]:
    """Gives what `fp8.plain_transposed_codes` gives, in one pass."""
    num_rows, num_columns = codes.shape
    num_filled = triton.cdiv(num_rows, SUM_MULTIPLE) * SUM_MULTIPLE
    transposed = torch.empty((num_columns, num_filled), dtype=torch.uint8, device=codes.device)
    grid = (triton.cdiv(num_columns, _TILE), triton.cdiv(num_filled, _TILE))
    _transpose[grid](
        codes.view(torch.uint8),
        transposed if factors is None else factors,
        transposed,
        codes.stride(0),
        num_rows,
        num_columns,
        num_filled,
        HAS_FACTORS=factors is not None,
        TILE=_TILE,
        num_warps=8,
    )
    return transposed.view(FP8)


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
    limit = tl.maximum(tl.max(tl.abs(number), axis=0) / 448.0, SMALLEST)
    # The smallest power of two that is no smaller (see `fp8.power_of_two_above`).
    bits = (limit.to(tl.int32, bitcast=True) + 0x7FFFFF) & ~0x7FFFFF
    scale = bits.to(tl.float32, bitcast=True)
    tl.store(scales + row, scale)
    tl.store(codes + row * num_columns + column, (number / scale).to(tl.float8e4nv), mask=inside)


@triton.jit
def _transpose(
    codes,
    factors,
    transposed,
    row_stride,
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
    place = transposed + column[:, None].to(tl.int64) * num_filled + row[None, :]
    inside = (column < num_columns)[:, None] & (row < num_filled)[None, :]
    tl.store(place, tl.trans(tile), mask=inside)
