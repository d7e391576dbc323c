"""The drafter's MLP with fp8 products: SwiGLU and its gradient are quantized as they are made.

Half of a step's arithmetic is here. What lies between its products is as wide as a row of the MLP,
and is written once, as codes: forward those of SwiGLU, backward those of the slopes of gate and up
side by side, so that both maps share one product for the input's gradient and one for the weights'.
"""

from typing import Any

import torch
from jaxtyping import Float, Float32
from torch import Tensor
from torch.nn import functional

from stage2_train.drafter import DrafterMlp
from stage2_train.fp8 import (
    FP8,
    Fp8Rows,
    input_gradient,
    plain_transposed_codes,
    product,
    quantize_rows,
    weight_gradient,
)

NAMESPACE = "dflash_offline"


class Fp8Mlp(DrafterMlp):
    """SwiGLU whose products all are fp8 where it is trained; judged, it multiplies as served."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps `[..., hidden]` to `[..., hidden]`."""
        if not torch.is_grad_enabled():
            return super().forward(hidden)
        rows = hidden.reshape(-1, hidden.shape[-1])
        weights = (each.weight for each in (self.gate_proj, self.up_proj, self.down_proj))
        mapped: Tensor = _Fp8SwiGlu.apply(rows, *weights)  # type: ignore[no-untyped-call]
        return mapped.view(hidden.shape)


class _Fp8SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor
    ) -> Tensor:
        of_rows, of_gate, of_up, of_down = map(
            quantize_rows, (rows, gate_weight, up_weight, down_weight)
        )
        gate, up = product(of_rows, of_gate), product(of_rows, of_up)
        mid = Fp8Rows(*swiglu_codes(gate, up))
        quantized = (of_rows, of_gate, of_up, of_down, mid)
        parts = [part for each in quantized for part in (each.codes, each.scales)]
        ctx.save_for_backward(gate, up, *parts)
        return product(mid, of_down)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gate, up, *parts = ctx.saved_tensors
        of_rows, of_gate, of_up, of_down, mid = (
            Fp8Rows(codes, scales) for codes, scales in zip(parts[::2], parts[1::2], strict=True)
        )
        slopes = quantize_rows(grads[0] * of_down.scales.t())
        above = input_gradient(slopes, of_down.codes)
        both_scales = torch.cat((of_gate.scales, of_up.scales))
        both = Fp8Rows(*swiglu_slope_codes(above, gate, up, both_scales))
        weights = transposed_pair(of_gate.codes, of_up.codes)
        to_rows = product(both, Fp8Rows(weights, both.scales.new_ones(len(weights), 1)))
        to_gate, to_up = weight_gradient(both, of_rows, both_scales).chunk(2)
        return to_rows, to_gate, to_up, weight_gradient(slopes, mid, of_down.scales)


@torch.library.custom_op(
    f"{NAMESPACE}::swiglu_codes",
    mutates_args=(),
    schema="(Tensor gate, Tensor up) -> (Tensor, Tensor)",
)
def swiglu_codes(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gives codes `[tokens, width]` and scales `[tokens, 1]` of silu(gate) * up."""
    if gate.is_cuda:
        # Imported here, for a CPU needs no Triton.
        from stage2_train.fp8_kernels import swiglu_codes_fused

        found = swiglu_codes_fused(gate, up)
    else:
        found = plain_swiglu_codes(gate, up)
    return found.codes, found.scales


@swiglu_codes.register_fake
def _(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return _like_rows(gate, width=gate.shape[1])


@torch.library.custom_op(
    f"{NAMESPACE}::swiglu_slope_codes",
    mutates_args=(),
    schema="(Tensor above, Tensor gate, Tensor up, Tensor scales) -> (Tensor, Tensor)",
)
def swiglu_slope_codes(
    above: Tensor, gate: Tensor, up: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    """Gives codes and scales of the slopes of gate and up, side by side `[tokens, 2 * width]`.

    Args:
        above: gradient of silu(gate) * up.
        gate: output of the gate's map.
        up: output of the other.
        scales: of the weights of both maps `[2 * width, 1]`, which the slopes carry.
    """
    if gate.is_cuda:
        from stage2_train.fp8_kernels import swiglu_slope_codes_fused

        found = swiglu_slope_codes_fused(above, gate, up, scales)
    else:
        found = plain_swiglu_slope_codes(above, gate, up, scales)
    return found.codes, found.scales


@swiglu_slope_codes.register_fake
def _(above: Tensor, gate: Tensor, up: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    return _like_rows(gate, width=2 * gate.shape[1])


def _like_rows(rows: Tensor, *, width: int) -> tuple[Tensor, Tensor]:
    codes = rows.new_empty((len(rows), width), dtype=FP8)
    return codes, rows.new_empty((len(rows), 1), dtype=torch.float32)


def plain_swiglu_codes(
    gate: Float[Tensor, "tokens width"], up: Float[Tensor, "tokens width"]
) -> Fp8Rows:
    """Gives what `swiglu_codes` gives, by plain operations: the reference."""
    return quantize_rows(functional.silu(gate.float()) * up.float())


def plain_swiglu_slope_codes(
    above: Float[Tensor, "tokens width"],
    gate: Float[Tensor, "tokens width"],
    up: Float[Tensor, "tokens width"],
    scales: Float32[Tensor, "both 1"],
) -> Fp8Rows:
    """Gives what `swiglu_slope_codes` gives, by plain operations: the reference."""
    gate, up, above = gate.float(), up.float(), above.float()
    share = gate.sigmoid()
    to_gate = above * up * share * (1 + gate * (1 - share))
    to_up = above * gate * share
    return quantize_rows(torch.cat((to_gate, to_up), dim=1) * scales.t())


@torch.library.custom_op(
    f"{NAMESPACE}::transposed_pair",
    mutates_args=(),
    schema="(Tensor first, Tensor second) -> Tensor",
)
def transposed_pair(first: Tensor, second: Tensor) -> Tensor:
    """Gives the codes of two maps of one input, transposed, side by side `[inputs, both]`."""
    if first.is_cuda:
        from stage2_train.fp8_kernels import transpose_codes

        both = first.new_empty(first.shape[1], 2 * first.shape[0])
        for codes, out in zip((first, second), both.chunk(2, dim=1), strict=True):
            transpose_codes(codes, None, out=out)
        return both
    return torch.cat([plain_transposed_codes(codes, None) for codes in (first, second)], dim=1)


@transposed_pair.register_fake
def _(first: Tensor, second: Tensor) -> Tensor:
    return first.new_empty(first.shape[1], 2 * first.shape[0])
