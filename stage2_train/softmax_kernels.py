# ruff: noqa: N803
"""Passes over a row of logits that kernels of several losses share."""

import triton
import triton.language as tl


@triton.jit
def logits_at(
    base,
    bias,
    column,
    inside,
    logit_scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Reads logits in fp32: bias added, scaled, capped; -inf outside of the row."""
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
def log_sum_of(
    base,
    bias,
    logit_scale,
    softcap,
    VOCAB: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Gives the log-sum-exp and the maximum of a row in one pass.

    Every lane keeps a running maximum of its own: nothing is reduced until the row is read. It
    reads `WIDTH` neighbours at once and moves its maximum once for all of them, for exponentials
    are what the pass is bound by.
    """
    place = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    largest = tl.full((LANES,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((LANES,), dtype=tl.float32)
    for start in range(0, VOCAB, LANES * WIDTH):
        column = start + place
        value = logits_at(
            base, bias, column, column < VOCAB, logit_scale, softcap, HAS_BIAS, HAS_SOFTCAP
        )
        larger = tl.maximum(largest, tl.max(value, axis=1))
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(value - shift[:, None]), axis=1)
        largest = larger
    top = tl.max(largest, axis=0)
    return top + tl.log(tl.sum(total * tl.exp(largest - top), axis=0)), top
