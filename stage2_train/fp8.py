"""Matrix products in fp8 (e4m3) with one scale for each row of both factors.

Scales are powers of two, so moving one from a factor to the other, or to the product, is exact: a
matrix is rounded once and its transpose, which the products of the backward pass read, holds the
same codes. The product is accumulated in fp32 and leaves in bf16. Off by default: see the setting
`train.fp8`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float32, Shaped
from torch import Tensor, nn
from torch.nn import functional

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SMALLEST_SCALE = 2.0**-60
# What a sum must be a multiple of: tensor cores read 16 codes at once.
SUM_MULTIPLE = 16


@dataclass(frozen=True)
class Fp8Rows:
    """A matrix as fp8 rows, each with its scale: number = code * scale."""

    codes: Shaped[Tensor, "rows columns"]
    scales: Float32[Tensor, "rows 1"]


def quantize_rows(matrix: Float[Tensor, "rows columns"]) -> Fp8Rows:
    """Gives the nearest fp8 codes under each row's scale, a power of two.

    The scale is the smallest that keeps the row below the largest code. e4m3 being a floating-point
    type, a scale that used the last bit of its range would round no finer.
    """
    largest = matrix.abs().amax(dim=1, keepdim=True).to(torch.float32)
    scales = power_of_two_above((largest / FP8_MAX).clamp(min=SMALLEST_SCALE))
    codes = (matrix.to(torch.float32) * (1 / scales)).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return Fp8Rows(codes, scales)


def power_of_two_above(numbers: Float32[Tensor, "*shape"]) -> Float32[Tensor, "*shape"]:
    """Gives the smallest power of two that is no smaller; exact, for positive normal numbers."""
    # Adding the largest mantissa carries into the exponent, unless the mantissa is zero.
    mantissa = 0x7FFFFF
    return ((numbers.view(torch.int32) + mantissa) & ~mantissa).view(torch.float32)


def product(
    left: Fp8Rows, right: Fp8Rows, *, is_fast: bool = True
) -> Float[Tensor, "left_rows right_rows"]:
    """Gives left @ right.T in bf16; rows of both are summed over.

    Args:
        left: its rows become those of the product.
        right: its rows become the columns of the product.
        is_fast: on a GPU, keep running sums in the tensor cores, which have 14 bits for them.
    """
    if left.codes.is_cuda:
        return torch._scaled_mm(
            left.codes,
            right.codes.t(),
            scale_a=left.scales,
            scale_b=right.scales.t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=is_fast,
        )
    plain = left.codes.to(torch.float32) @ right.codes.to(torch.float32).t()
    return (plain * left.scales * right.scales.t()).to(torch.bfloat16)


@torch.library.custom_op(
    "dflash_offline::transposed_codes",
    mutates_args=(),
    schema="(Tensor codes, Tensor? factors) -> Tensor",
)
def transposed_codes(codes: Tensor, factors: Tensor | None) -> Tensor:
    """Gives the codes `[rows, columns]` times a factor for each row, transposed.

    The rows, which the product of transposed codes sums over, are filled up with zeros to a
    multiple of 16. An operation of its own, so that torch.compile makes it once for all who ask.

    Args:
        codes: fp8 codes.
        factors: powers of two `[rows, 1]`, 1 at most; None leaves the codes as they are.
    """
    if codes.is_cuda:
        # Imported here, for a CPU needs no Triton.
        from stage2_train.fp8_kernels import transpose_codes

        return transpose_codes(codes, factors)
    return plain_transposed_codes(codes, factors)


@transposed_codes.register_fake
def _(codes: Tensor, factors: Tensor | None) -> Tensor:
    return codes.new_empty(codes.shape[1], _filled_up(codes.shape[0]))


def plain_transposed_codes(codes: Tensor, factors: Tensor | None) -> Tensor:
    """Gives what `transposed_codes` gives, by plain operations: the reference."""
    numbers = codes.to(torch.float32) if factors is None else codes.to(torch.float32) * factors
    num_rows = codes.shape[0]
    return functional.pad(numbers.t(), (0, _filled_up(num_rows) - num_rows)).to(FP8)


def _filled_up(num_rows: int) -> int:
    return -(-num_rows // SUM_MULTIPLE) * SUM_MULTIPLE


class Fp8Linear(nn.Linear):
    """A linear map whose product and input gradient are fp8; its weight gradient if it is wanted.

    What q, k and v share, and gate and up, is quantized by each of them: compiled code finds that
    they ask for the same and makes it once. Without gradients, that is judged and not trained, it
    multiplies in its own type, as a drafter does that is served.
    """

    has_fp8_weight_gradient = False

    def forward(self, input: Tensor) -> Tensor:
        """Maps `[..., in_features]` to `[..., out_features]`."""
        if not torch.is_grad_enabled():
            return super().forward(input)
        rows = input.reshape(-1, self.in_features)
        form = _AllFp8 if self.has_fp8_weight_gradient else _Fp8Product
        mapped: Tensor = form.apply(rows, self.weight)  # type: ignore[no-untyped-call]
        return mapped.view(*input.shape[:-1], self.out_features)


class _Fp8Product(torch.autograd.Function):
    """The weight gradient, a sum over thousands of tokens of uneven size, stays bf16."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        of_weight = quantize_rows(weight)
        ctx.save_for_backward(rows, of_weight.codes, of_weight.scales)
        return product(quantize_rows(rows), of_weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight_codes, weight_scales = ctx.saved_tensors
        (above,) = grads
        # The slopes carry the scales of the outputs, over which this product sums.
        slopes = quantize_rows(above * weight_scales.t())
        return input_gradient(slopes, weight_codes), above.t() @ rows


class _AllFp8(torch.autograd.Function):
    """All three products are fp8; each factor is rounded once and read by two of them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        of_rows, of_weight = quantize_rows(rows), quantize_rows(weight)
        ctx.save_for_backward(of_rows.codes, of_rows.scales, of_weight.codes, of_weight.scales)
        return product(of_rows, of_weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        row_codes, row_scales, weight_codes, weight_scales = ctx.saved_tensors
        (above,) = grads
        slopes = quantize_rows(above * weight_scales.t())
        return input_gradient(slopes, weight_codes), weight_gradient(
            slopes, Fp8Rows(row_codes, row_scales), weight_scales
        )


def input_gradient(
    slopes: Fp8Rows, weight_codes: Shaped[Tensor, "outputs inputs"]
) -> Float[Tensor, "tokens inputs"]:
    """Gives the gradient of a linear map's input.

    Args:
        slopes: gradient of the output times the weight's scales, tokens by outputs.
        weight_codes: the weight's codes; their scales are in the slopes.
    """
    codes = transposed_codes(weight_codes, None)
    # Outputs are a multiple of 16 (see `use_fp8`), so nothing was filled up.
    return product(slopes, Fp8Rows(codes, slopes.scales.new_ones(len(codes), 1)))


def weight_gradient(
    slopes: Fp8Rows, rows: Fp8Rows, weight_scales: Float32[Tensor, "outputs 1"]
) -> Float[Tensor, "outputs inputs"]:
    """Gives the gradient of a linear map's weight, a sum over tokens.

    Both factors' token scales go into the slopes' codes, where moving the exponent is exact but for
    tokens whose part in the sum is beyond the type's range, 2^-17, below the largest's.

    Args:
        slopes: gradient of the output times the weight's scales, tokens by outputs.
        rows: the input, tokens by inputs.
        weight_scales: the scales that are in the slopes and have to leave again.
    """
    token_scales = slopes.scales * rows.scales
    largest = token_scales.amax()
    slope_codes = transposed_codes(slopes.codes, token_scales / largest)
    row_codes = transposed_codes(rows.codes, None)
    return product(
        Fp8Rows(slope_codes, largest / weight_scales),
        Fp8Rows(row_codes, token_scales.new_ones(len(row_codes), 1)),
    )


def use_fp8(model: nn.Module, *, weight_gradients: bool = False) -> None:
    """Turns every linear map of a model into its fp8 form; names and weights stay the same.

    Args:
        model: the model.
        weight_gradients: whether the products that give weight gradients are fp8, too.

    Raises:
        ValueError: tensor cores cannot take a width.
    """
    # Imported here, for they build on this module.
    from stage2_train.drafter import DrafterMlp
    from stage2_train.fp8_mlp import Fp8Mlp

    for module in model.modules():
        if type(module) is nn.Linear:
            _check_widths(module.weight, "a linear map")
            module.__class__ = Fp8Linear
            module.has_fp8_weight_gradient = weight_gradients  # type: ignore[assignment]
        elif type(module) is DrafterMlp and weight_gradients:
            module.__class__ = Fp8Mlp


def _check_widths(weight: Float[Tensor, "outputs inputs"], name: str) -> None:
    num_outputs, num_inputs = weight.shape
    if num_outputs % SUM_MULTIPLE or num_inputs % SUM_MULTIPLE:
        raise ValueError(
            f"fp8 needs widths divisible by {SUM_MULTIPLE}, found {name} of {num_inputs} to "
            f"{num_outputs}; set train.fp8 = false"
        )


@dataclass(frozen=True)
class FrozenFp8:
    """A frozen weight quantized once, for both of its products."""

    by_output: Fp8Rows
    """Rows of outputs: hidden states to logits."""
    by_input: Fp8Rows
    """Rows of inputs, the transpose: gradients of logits to those of hidden states."""


def freeze_fp8(weight: Float[Tensor, "outputs inputs"]) -> FrozenFp8:
    """Quantizes a frozen weight both ways.

    Raises:
        ValueError: tensor cores cannot take a width.
    """
    _check_widths(weight, "an LM head")
    return FrozenFp8(quantize_rows(weight), quantize_rows(weight.t().contiguous()))
