"""One Triton kernel for the rows of a chunk: from both models' logits to divergence and slopes."""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

_COLUMNS = 4096


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
        COLUMNS=min(_COLUMNS, triton.next_power_of_2(vocab_size)),
        num_warps=8,
    )


@triton.jit
def _capped(
    base,
    column,
    inside,
    logit_scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,  # noqa: N803
):
    value = tl.load(base + column, mask=inside, other=float("-inf")).to(tl.float32) * logit_scale
    if HAS_SOFTCAP:
        # tanh by its sigmoid; -inf stays out of it.
        capped = softcap * (2.0 * tl.sigmoid(2.0 * value / softcap) - 1.0)
        value = tl.where(inside, capped, float("-inf"))
    return value


@triton.jit
def _log_sum(
    base,
    logit_scale,
    softcap,
    VOCAB: tl.constexpr,  # noqa: N803
    HAS_SOFTCAP: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Log-sum-exp and maximum of a row."""
    lane = tl.arange(0, COLUMNS)
    largest = tl.full((COLUMNS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for start in range(0, VOCAB, COLUMNS):
        column = start + lane
        value = _capped(base, column, column < VOCAB, logit_scale, softcap, HAS_SOFTCAP)
        larger = tl.maximum(largest, value)
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - shift) + tl.exp(value - shift)
        largest = larger
    top = tl.max(largest, axis=0)
    return top + tl.log(tl.sum(total * tl.exp(largest - top), axis=0)), top


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
    VOCAB: tl.constexpr,  # noqa: N803
    HAS_SOFTCAP: tl.constexpr,  # noqa: N803
    IS_TOTAL_VARIATION: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """One row: both log-sums, then the divergence, then the slopes."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * row_stride
    target_base = target_logits + row * target_row_stride
    lane = tl.arange(0, COLUMNS)
    log_sum, top = _log_sum(base, logit_scale, softcap, VOCAB, HAS_SOFTCAP, COLUMNS)
    target_log_sum, _ = _log_sum(target_base, logit_scale, softcap, VOCAB, HAS_SOFTCAP, COLUMNS)
    label = tl.load(labels + row)
    at_label = _capped(base, label, label < VOCAB, logit_scale, softcap, HAS_SOFTCAP)
    tl.store(is_top + row, (at_label >= top).to(tl.int8))

    divergence = tl.zeros((COLUMNS,), dtype=tl.float32)
    mean_side = tl.zeros((COLUMNS,), dtype=tl.float32)
    for start in range(0, VOCAB, COLUMNS):
        column = start + lane
        inside = column < VOCAB
        drafted = _capped(base, column, inside, logit_scale, softcap, HAS_SOFTCAP) - log_sum
        wanted = _capped(target_base, column, inside, logit_scale, softcap, HAS_SOFTCAP)
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
        value = _capped(base, column, inside, logit_scale, softcap, HAS_SOFTCAP)
        wanted = _capped(target_base, column, inside, logit_scale, softcap, HAS_SOFTCAP)
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
