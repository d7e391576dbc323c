"""One Triton kernel for the rows of a chunk: from logits to loss and gradient."""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Float32, Int, Shaped
from torch import Tensor

_COLUMNS = 8192


def rows_to_gradient(
    logits: Float[Tensor, "rows vocab"],
    labels: Int[Tensor, "rows"],
    weights: Float32[Tensor, "rows"],
    *,
    bias: Float[Tensor, "vocab"] | None,
    logit_scale: float,
    softcap: float | None,
    row_loss: Float32[Tensor, "rows"],
    is_top: Bool[Tensor, "rows"],
    gradient: Shaped[Tensor, "rows vocab"] | None,
    gradient_scales: Float32[Tensor, "rows"] | None = None,
) -> None:
    """Fills `row_loss`, `is_top` and the gradient of the weighted loss, from raw logits.

    Two reads and one write of the logits; everything in between is fp32 and stays in registers.

    Args:
        logits: products of hidden states and the head; may be overwritten.
        labels: token of each row.
        weights: weight of each row's loss.
        bias: added to the logits first.
        logit_scale: factor of the logits.
        softcap: limit that the logits are squashed into.
        row_loss: filled with each row's loss, without its weight.
        is_top: filled with whether no token is more probable than the label.
        gradient: filled with the gradient of the raw logits; may be `logits` itself, or fp8
            codes; None leaves it out.
        gradient_scales: filled with each row's scale where the gradient is fp8.
    """
    num_rows, vocab_size = logits.shape
    _row_gradient[(num_rows,)](
        logits,
        labels,
        weights,
        weights if bias is None else bias,
        row_loss,
        is_top.view(torch.int8),
        logits if gradient is None else gradient,
        row_loss if gradient_scales is None else gradient_scales,
        logits.stride(0),
        logit_scale,
        1.0 if softcap is None else softcap,
        VOCAB=vocab_size,
        HAS_BIAS=bias is not None,
        HAS_SOFTCAP=softcap is not None,
        IS_GRADIENT_WANTED=gradient is not None,
        IS_FP8=gradient_scales is not None,
        COLUMNS=min(_COLUMNS, triton.next_power_of_2(vocab_size)),
        num_warps=16,
    )


@triton.jit
def _logits_at(
    base,
    bias,
    column,
    inside,
    logit_scale,
    softcap,
    HAS_BIAS: tl.constexpr,  # noqa: N803
    HAS_SOFTCAP: tl.constexpr,  # noqa: N803
):
    value = tl.load(base + column, mask=inside, other=float("-inf")).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    value *= logit_scale
    if HAS_SOFTCAP:
        # tanh by its sigmoid; -inf stays out of it.
        capped = softcap * (2.0 * tl.sigmoid(2.0 * value / softcap) - 1.0)
        value = tl.where(inside, capped, float("-inf"))
    return value


@triton.jit
def _row_gradient(
    logits,
    labels,
    weights,
    bias,
    row_loss,
    is_top,
    gradient,
    gradient_scales,
    row_stride,
    logit_scale,
    softcap,
    VOCAB: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    HAS_SOFTCAP: tl.constexpr,  # noqa: N803
    IS_GRADIENT_WANTED: tl.constexpr,  # noqa: N803
    IS_FP8: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """One row: its log-sum-exp in one pass, its gradient in a second."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * row_stride
    label = tl.load(labels + row)
    lane = tl.arange(0, COLUMNS)
    largest = tl.full((COLUMNS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for start in range(0, VOCAB, COLUMNS):
        column = start + lane
        value = _logits_at(
            base, bias, column, column < VOCAB, logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP
        )
        # Every lane keeps its own running maximum: no reduction until the row is read.
        larger = tl.maximum(largest, value)
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - shift) + tl.exp(value - shift)
        largest = larger
    top = tl.max(largest, axis=0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(largest - top), axis=0))
    at_label = _logits_at(
        base, bias, label, label < VOCAB, logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP
    )
    tl.store(row_loss + row, log_sum - at_label)
    tl.store(is_top + row, (at_label >= top).to(tl.int8))
    if IS_GRADIENT_WANTED:
        factor = tl.load(weights + row) * logit_scale
        if IS_FP8:
            # The label's own entry, 1 - p, is the largest: the others sum up to it.
            largest_entry = tl.maximum(1.0 - tl.exp(at_label - log_sum), 1e-12)
            tl.store(gradient_scales + row, factor * largest_entry / 448.0)
            factor = 448.0 / largest_entry
        for start in range(0, VOCAB, COLUMNS):
            column = start + lane
            inside = column < VOCAB
            value = _logits_at(
                base, bias, column, inside, logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP
            )
            slope = tl.exp(value - log_sum) - tl.where(column == label, 1.0, 0.0)
            if HAS_SOFTCAP:
                ratio = tl.where(inside, value / softcap, 0.0)
                slope *= 1.0 - ratio * ratio
            slope *= factor
            if IS_FP8:
                slope = tl.minimum(tl.maximum(slope, -448.0), 448.0)
            place = gradient + row * row_stride + column
            tl.store(place, slope.to(gradient.dtype.element_ty), mask=inside)
