"""Matrix products in fp8 (e4m3) with one scale for each row of both factors.

A row's largest magnitude becomes 448, the largest e4m3 number; the product is accumulated in fp32
and leaves in bf16. Off by default: see the setting `train.fp8`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float32, Shaped
from torch import Tensor, nn

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SMALLEST_SCALE = 2.0**-60


@dataclass(frozen=True)
class Fp8Rows:
    """A matrix as fp8 rows, each with its scale: number = code * scale."""

    codes: Shaped[Tensor, "rows columns"]
    scales: Float32[Tensor, "rows 1"]


def quantize_rows(matrix: Float[Tensor, "rows columns"]) -> Fp8Rows:
    """Gives the nearest fp8 codes under each row's scale."""
    largest = matrix.abs().amax(dim=1, keepdim=True).to(torch.float32)
    scales = (largest / FP8_MAX).clamp(min=SMALLEST_SCALE)
    codes = (matrix.to(torch.float32) / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return Fp8Rows(codes, scales)


def product(left: Fp8Rows, right: Fp8Rows) -> Float[Tensor, "left_rows right_rows"]:
    """Gives left @ right.T in bf16; rows of both are summed over."""
    if left.codes.is_cuda:
        return torch._scaled_mm(
            left.codes,
            right.codes.t(),
            scale_a=left.scales,
            scale_b=right.scales.t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
    plain = left.codes.to(torch.float32) @ right.codes.to(torch.float32).t()
    return (plain * left.scales * right.scales.t()).to(torch.bfloat16)


class Fp8Linear(nn.Linear):
    """A linear map whose product and input gradient are fp8; its weight gradient stays bf16.

    The weight gradient sums over thousands of tokens of uneven size, where row scales of the
    transposed factors would cost two more passes and the most accuracy.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Maps `[..., in_features]` to `[..., out_features]`."""
        rows = input.reshape(-1, self.in_features)
        mapped: Tensor = _Fp8Product.apply(rows, self.weight)  # type: ignore[no-untyped-call]
        return mapped.view(*input.shape[:-1], self.out_features)


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return product(quantize_rows(rows), quantize_rows(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        (gradient,) = grads
        of_rows = product(quantize_rows(gradient), quantize_rows(weight.t().contiguous()))
        return of_rows, gradient.t() @ rows


def use_fp8(model: nn.Module) -> None:
    """Turns every linear map of a model into its fp8 form; names and weights stay the same."""
    for module in model.modules():
        if type(module) is nn.Linear:
            if module.in_features % 16 or module.out_features % 16:
                raise ValueError(
                    f"fp8 needs widths divisible by 16, found a linear map of "
                    f"{module.in_features} to {module.out_features}; set train.fp8 = false"
                )
            module.__class__ = Fp8Linear


@dataclass(frozen=True)
class FrozenFp8:
    """A frozen weight quantized once, for both of its products."""

    by_output: Fp8Rows
    """Rows of outputs: hidden states to logits."""
    by_input: Fp8Rows
    """Rows of inputs, the transpose: gradients of logits to those of hidden states."""


def freeze_fp8(weight: Float[Tensor, "outputs inputs"]) -> FrozenFp8:
    """Quantizes a frozen weight both ways."""
    return FrozenFp8(quantize_rows(weight), quantize_rows(weight.t().contiguous()))
