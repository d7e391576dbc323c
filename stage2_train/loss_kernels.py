# ruff: noqa: N803, N806
"""One Triton kernel for the rows of a chunk: from logits to loss and gradient."""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Float32, Int, Shaped
from torch import Tensor

from stage2_train.softmax_kernels import log_sum_of, logits_at

# Logits that a program reads at once, and neighbours among them that one lane reads.
_COLUMNS, _WIDTH = 4096, 8


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
    label_slopes: Float32[Tensor, "rows"] | None = None,
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
        label_slopes: filled with the gradient at each row's label where the gradient is fp8, whose
            code there is 0. It is as large as all others together: under a scale of its size a
            fresh drafter's codes could not tell the others from nothing.
    """
    num_rows, vocab_size = logits.shape
    columns = min(_COLUMNS, triton.next_power_of_2(vocab_size))
    _row_gradient[(num_rows,)](
        logits,
        labels,
        weights,
        weights if bias is None else bias,
        row_loss,
        is_top.view(torch.int8),
        logits if gradient is None else gradient,
        row_loss if gradient_scales is None else gradient_scales,
        row_loss if label_slopes is None else label_slopes,
        logits.stride(0),
        logit_scale,
        1.0 if softcap is None else softcap,
        VOCAB=vocab_size,
        HAS_BIAS=bias is not None,
        HAS_SOFTCAP=softcap is not None,
        IS_GRADIENT_WANTED=gradient is not None,
        IS_FP8=gradient_scales is not None,
        LANES=columns // min(_WIDTH, columns),
        WIDTH=min(_WIDTH, columns),
        num_warps=8,
    )


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
    label_slopes,
    row_stride,
    logit_scale,
    softcap,
    VOCAB: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_GRADIENT_WANTED: tl.constexpr,
    IS_FP8: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One row: its log-sum-exp in one pass, its gradient in a second."""
    COLUMNS: tl.constexpr = LANES * WIDTH
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * row_stride
    lane = tl.arange(0, COLUMNS)
    log_sum, top = log_sum_of(
        base, bias, logit_scale, softcap, VOCAB, HAS_BIAS, HAS_SOFTCAP, LANES, WIDTH
    )
    label = tl.load(labels + row)
    at_label = logits_at(
        base, bias, label, label < VOCAB, logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP
    )
    tl.store(row_loss + row, log_sum - at_label)
    tl.store(is_top + row, (at_label >= top).to(tl.int8))
    if IS_GRADIENT_WANTED:
        factor = tl.load(weights + row) * logit_scale
        if IS_FP8:
            label_probability = tl.exp(at_label - log_sum)
            label_slope = factor * (label_probability - 1.0)
            if HAS_SOFTCAP:
                label_slope *= 1.0 - (at_label / softcap) * (at_label / softcap)
            tl.store(label_slopes + row, label_slope)
            # Others are no larger than the largest of all, nor than all of them together.
            largest_entry = tl.minimum(tl.exp(top - log_sum), 1.0 - label_probability)
            largest_entry = tl.maximum(largest_entry, 1e-20)
            tl.store(gradient_scales + row, factor * largest_entry / 448.0)
            factor = 448.0 / largest_entry
        # From the end of the row, which the cache saw last.
        for number in range(tl.cdiv(VOCAB, COLUMNS)):
            column = (tl.cdiv(VOCAB, COLUMNS) - 1 - number) * COLUMNS + lane
            inside = column < VOCAB
            value = logits_at(
                base, bias, column, inside, logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP
            )
            slope = tl.exp(value - log_sum) - tl.where(column == label, 1.0, 0.0)
            if HAS_SOFTCAP:
                ratio = tl.where(inside, value / softcap, 0.0)
                slope *= 1.0 - ratio * ratio
            slope *= factor
            if IS_FP8:
                slope = tl.where(column == label, 0.0, tl.minimum(slope, 448.0))
            place = gradient + row * row_stride + column
            tl.store(place, slope.to(gradient.dtype.element_ty), mask=inside)
