# ruff: noqa: N803, N806
"""One Triton kernel for the rows of a chunk: from both models' logits to divergence and slopes."""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from stage2_train.softmax_kernels import log_sum_of, logits_at

_COLUMNS, _WIDTH = 4096, 8


def rows_to_slopes(
    logits: Float[Tensor, "rows vocab"],
    target_logits: Float[Tensor, "rows vocab"],
    labels: Int[Tensor, "rows"],
    weights: Float32[Tensor, "rows"],
    *,
    is_total_variation: bool,
    logit_scale: float,
    softcap: float | None,
    row_loss: Float32[Tensor, "rows"],
    is_top: Bool[Tensor, "rows"],
) -> None:
    """Fills `row_loss` and `is_top`, and overwrites `logits` with their weighted gradient.

    Three reads of both logits and one write; everything in between is fp32 in registers.

    Args:
        logits: the drafter's raw logits, bias included; become the gradient.
        target_logits: the target's.
        labels: token of each row.
        weights: weight of each row's loss.
        is_total_variation: total variation; else KL(target || drafter).
        logit_scale: factor of the logits.
        softcap: limit that the logits are squashed into.
        row_loss: filled with each row's divergence, without its weight.
        is_top: filled with whether no token is more probable to the drafter than the label.
    """
    num_rows, vocab_size = logits.shape
    columns = min(_COLUMNS, triton.next_power_of_2(vocab_size))
    _row_slopes[(num_rows,)](
        logits,
        target_logits,
        labels,
        weights,
        row_loss,
        is_top.view(torch.int8),
        logits.stride(0),
        target_logits.stride(0),
        logit_scale,
        1.0 if softcap is None else softcap,
        VOCAB=vocab_size,
        HAS_SOFTCAP=softcap is not None,
        IS_TOTAL_VARIATION=is_total_variation,
        LANES=columns // min(_WIDTH, columns),
        WIDTH=min(_WIDTH, columns),
        num_warps=8,
    )


@triton.jit
def _row_slopes(
    logits,
    target_logits,
    labels,
    weights,
    row_loss,
    is_top,
    row_stride,
    target_row_stride,
    logit_scale,
    softcap,
    VOCAB: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_TOTAL_VARIATION: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One row: both log-sums, then the divergence, then the slopes."""
    COLUMNS: tl.constexpr = LANES * WIDTH
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * row_stride
    target_base = target_logits + row * target_row_stride
    lane = tl.arange(0, COLUMNS)
    # The logits come with their bias: any pointer stands in its place.
    log_sum, top = log_sum_of(
        base, base, logit_scale, softcap, VOCAB, False, HAS_SOFTCAP, LANES, WIDTH
    )
    target_log_sum, _ = log_sum_of(
        target_base, base, logit_scale, softcap, VOCAB, False, HAS_SOFTCAP, LANES, WIDTH
    )
    label = tl.load(labels + row)
    at_label = logits_at(base, base, label, label < VOCAB, logit_scale, softcap, False, HAS_SOFTCAP)
    tl.store(is_top + row, (at_label >= top).to(tl.int8))

    divergence = tl.zeros((COLUMNS,), dtype=tl.float32)
    mean_side = tl.zeros((COLUMNS,), dtype=tl.float32)
    for start in range(0, VOCAB, COLUMNS):
        column = start + lane
        inside = column < VOCAB
        drafted = (
            logits_at(base, base, column, inside, logit_scale, softcap, False, HAS_SOFTCAP)
            - log_sum
        )
        wanted = logits_at(
            target_base, base, column, inside, logit_scale, softcap, False, HAS_SOFTCAP
        )
        wanted -= target_log_sum
        p, q = tl.exp(drafted), tl.exp(wanted)
        if IS_TOTAL_VARIATION:
            divergence += 0.5 * tl.abs(p - q)
            mean_side += p * tl.where(p > q, 0.5, tl.where(p < q, -0.5, 0.0))
        else:
            divergence += tl.where(inside & (q > 0.0), q * (wanted - drafted), 0.0)
    tl.store(row_loss + row, tl.sum(divergence, axis=0))
    side_sum = tl.sum(mean_side, axis=0)

    factor = tl.load(weights + row) * logit_scale
    for start in range(0, VOCAB, COLUMNS):
        column = start + lane
        inside = column < VOCAB
        value = logits_at(base, base, column, inside, logit_scale, softcap, False, HAS_SOFTCAP)
        wanted = logits_at(
            target_base, base, column, inside, logit_scale, softcap, False, HAS_SOFTCAP
        )
        p, q = tl.exp(value - log_sum), tl.exp(wanted - target_log_sum)
        if IS_TOTAL_VARIATION:
            side = tl.where(p > q, 0.5, tl.where(p < q, -0.5, 0.0))
            slope = p * (side - side_sum)
        else:
            slope = p - q
        if HAS_SOFTCAP:
            ratio = tl.where(inside, value / softcap, 0.0)
            slope *= 1.0 - ratio * ratio
        slope = (slope * factor).to(logits.dtype.element_ty)
        tl.store(base + column, slope, mask=inside)
