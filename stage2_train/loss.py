"""Weighted cross-entropy over the target's frozen LM head, in chunks of rows.

The head is not trained, so a row needs two matrix products, logits and the gradient of its hidden
state, and both are made while the chunk's logits exist. No tensor of [rows, vocab] is kept.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from stage2_train.fp8 import FP8, Fp8Rows, product
from stage2_train.target_head import TargetHead, cap_logits

FillChunk = Callable[..., None]
# Rows of the tiles that products on a GPU work in.
_TILE_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class HeadLoss:
    """Loss of a batch and what each row says."""

    loss: Float[Tensor, ""]
    """Sum over rows of weight times loss; carries the gradient."""
    row_loss: Float[Tensor, "rows"]
    """Loss of each row without its weight, of a cross-entropy in nats; no gradient."""
    is_top: Bool[Tensor, "rows"]
    """Whether no token is more probable than the label: greedy drafting gets it right."""


def head_cross_entropy(
    hidden: Float[Tensor, "rows hidden"],
    labels: Int[Tensor, "rows"],
    weights: Float[Tensor, "rows"],
    *,
    head: TargetHead,
    chunk_rows: int,
) -> HeadLoss:
    """Gives the weighted cross-entropy of the labels under the head.

    Args:
        hidden: normed hidden states of the drafter, of the head's type.
        labels: token of each row.
        weights: weight of each row's loss; the caller normalises them.
        head: the target's frozen head.
        chunk_rows: rows whose logits exist at once.
    """
    chunk_loss = _fused_chunk_loss if hidden.is_cuda else _chunk_loss

    def fill(chunk: Tensor, rows: slice, **results: Any) -> None:
        chunk_loss(chunk, labels[rows], weights[rows], head=head, chunk_rows=chunk_rows, **results)

    return chunked_loss(hidden, weights, fill=fill, chunk_rows=chunk_rows)


def plain_cross_entropy(
    hidden: Float[Tensor, "rows hidden"],
    labels: Int[Tensor, "rows"],
    weights: Float[Tensor, "rows"],
    *,
    head: TargetHead,
) -> HeadLoss:
    """Gives the same as `head_cross_entropy` by plain operations: the reference."""
    logits = head.logits(hidden)
    row_loss = cross_entropy(logits, labels, reduction="none")
    return plain_loss(row_loss, logits, labels, weights)


def plain_loss(
    row_loss: Float[Tensor, "rows"],
    logits: Float[Tensor, "rows vocab"],
    labels: Int[Tensor, "rows"],
    weights: Float[Tensor, "rows"],
) -> HeadLoss:
    """Gives the weighted sum of rows' losses and what else the rows say, by plain operations."""
    label_logit = logits.gather(1, labels[:, None])[:, 0]
    return HeadLoss(
        loss=(row_loss * weights).sum(),
        row_loss=row_loss.detach(),
        is_top=label_logit >= logits.amax(dim=1),
    )


def chunked_loss(
    hidden: Float[Tensor, "rows hidden"],
    weights: Float[Tensor, "rows"],
    *,
    fill: FillChunk,
    chunk_rows: int,
) -> HeadLoss:
    """Gives a weighted loss of rows whose logits exist a chunk at a time.

    Args:
        hidden: normed hidden states of the drafter.
        weights: weight of each row's loss.
        fill: called for each chunk with its hidden states and its place, fills the chunk's
            `row_loss`, `is_top` and, unless it is None, `gradient` of the weighted loss.
        chunk_rows: rows of a chunk at most.
    """
    loss, row_loss, is_top = _ChunkedLoss.apply(hidden, weights, fill, chunk_rows)  # type: ignore[no-untyped-call]
    return HeadLoss(loss=loss, row_loss=row_loss, is_top=is_top)


class _ChunkedLoss(torch.autograd.Function):
    """Makes the gradient in the forward pass: the loss is linear in what comes from above."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weights: Tensor, fill: FillChunk, chunk_rows: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_rows = len(weights)
        row_loss = torch.empty(num_rows, dtype=weights.dtype, device=hidden.device)
        is_top = torch.empty(num_rows, dtype=torch.bool, device=hidden.device)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for rows in row_chunks(num_rows, chunk_rows=chunk_rows):
            fill(
                hidden[rows],
                rows,
                row_loss=row_loss[rows],
                is_top=is_top[rows],
                gradient=None if gradient is None else gradient[rows],
            )
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(row_loss, is_top)
        return (row_loss * weights).sum(), row_loss, is_top

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None


def row_maximum(probabilities: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows"]:
    """Gives the largest of each row; the numbers must not be negative.

    On a CPU bf16 maxima are ten times slower than those of integers, and the bits of numbers that
    are not negative are ordered as the numbers are.
    """
    if probabilities.device.type == "cpu" and probabilities.dtype == torch.bfloat16:
        return probabilities.view(torch.int16).amax(dim=1).view(torch.bfloat16)
    return probabilities.amax(dim=1)


def row_chunks(num_rows: int, *, chunk_rows: int) -> Iterator[slice]:
    """Yields as few chunks of at most `chunk_rows` as there can be, all but the last alike.

    Their size is a multiple of 256 where that needs no more chunks: products of other sizes are
    up to a fifth slower on a GPU, whose tiles they do not fill.
    """
    num_chunks = -(-num_rows // chunk_rows)
    size = -(-num_rows // max(num_chunks, 1))
    size = min(-(-size // _TILE_ROWS) * _TILE_ROWS, chunk_rows)
    for start in range(0, num_rows, max(size, 1)):
        yield slice(start, min(start + size, num_rows))


@functools.lru_cache(maxsize=1)
def chunk_buffers(
    num_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Float[Tensor, "rows vocab"], Float[Tensor, "rows vocab"]]:
    """Gives the two scratch tensors of a chunk, kept from step to step.

    Fresh memory of this size costs a CPU as much as the softmax; one thread computes losses.
    """
    shape = (num_rows, vocab_size)
    return (
        torch.empty(shape, dtype=dtype, device=device),
        torch.empty(shape, dtype=dtype, device=device),
    )


def _chunk_loss(
    hidden: Float[Tensor, "rows hidden"],
    labels: Int[Tensor, "rows"],
    weights: Float[Tensor, "rows"],
    *,
    head: TargetHead,
    chunk_rows: int,
    row_loss: Float[Tensor, "rows"],
    is_top: Bool[Tensor, "rows"],
    gradient: Float[Tensor, "rows hidden"] | None,
) -> None:
    """Fills `row_loss`, `is_top` and `gradient` of one chunk."""
    weight = head.lm_head_weight
    buffers = chunk_buffers(chunk_rows, head.vocab_size, hidden.dtype, hidden.device)
    logits, probabilities = (buffer[: len(labels)] for buffer in buffers)
    torch.mm(hidden, weight.t(), out=logits)
    if head.lm_head_bias is not None:
        logits += head.lm_head_bias
    is_raw = head.logit_scale == 1.0 and head.final_logit_softcapping is None
    if not is_raw:
        logits.copy_(cap_logits(logits * head.logit_scale, head.final_logit_softcapping))
    torch.softmax(logits, dim=1, out=probabilities)
    label_probability = probabilities.gather(1, labels[:, None])[:, 0]
    # The smallest normal number keeps the reported loss finite: it saturates at 87 nats.
    smallest = torch.finfo(label_probability.dtype).tiny
    row_loss.copy_(label_probability.clamp(min=smallest).to(row_loss.dtype).log().neg())
    is_top.copy_(label_probability >= row_maximum(probabilities))
    if gradient is None:
        return
    if is_raw:
        # The label's own term apart: in bf16 its probability minus one would round away.
        torch.mm(probabilities, weight, out=gradient)
        gradient -= weight[labels]
    else:
        probabilities.scatter_add_(
            1, labels[:, None], torch.full_like(labels[:, None], -1, dtype=probabilities.dtype)
        )
        if head.final_logit_softcapping is not None:
            probabilities *= 1 - (logits / head.final_logit_softcapping) ** 2
        torch.mm(probabilities, weight, out=gradient)
        gradient *= head.logit_scale
    gradient *= weights[:, None].to(gradient.dtype)


def _fused_chunk_loss(
    hidden: Float[Tensor, "rows hidden"],
    labels: Int[Tensor, "rows"],
    weights: Float[Tensor, "rows"],
    *,
    head: TargetHead,
    chunk_rows: int,
    row_loss: Float[Tensor, "rows"],
    is_top: Bool[Tensor, "rows"],
    gradient: Float[Tensor, "rows hidden"] | None,
) -> None:
    """Does the same on a GPU: two products, in fp8 where the head has it, and one kernel."""
    # Imported here, for a CPU needs no Triton.
    from stage2_train.fp8_kernels import quantize_rows_fused
    from stage2_train.loss_kernels import rows_to_gradient

    facts: dict[str, Any] = {
        "bias": head.lm_head_bias,
        "logit_scale": head.logit_scale,
        "softcap": head.final_logit_softcapping,
        "row_loss": row_loss,
        "is_top": is_top,
    }
    if head.fp8 is None:
        logits = torch.mm(hidden, head.lm_head_weight.t())
        wanted = None if gradient is None else logits
        rows_to_gradient(logits, labels, weights, gradient=wanted, **facts)
        if gradient is not None:
            torch.mm(logits, head.lm_head_weight, out=gradient)
        return
    logits = product(quantize_rows_fused(hidden), head.fp8.by_output)
    if gradient is None:
        rows_to_gradient(logits, labels, weights, gradient=None, **facts)
        return
    slopes = Fp8Rows(
        torch.empty(logits.shape, dtype=FP8, device=logits.device),
        torch.empty((len(labels), 1), dtype=torch.float32, device=logits.device),
    )
    label_slopes = torch.empty_like(slopes.scales[:, 0])
    rows_to_gradient(
        logits,
        labels,
        weights,
        gradient=slopes.codes,
        gradient_scales=slopes.scales[:, 0],
        label_slopes=label_slopes,
        **facts,
    )
    # Over a whole vocabulary the tensor cores' own running sums would cut small slopes off.
    others = product(slopes, head.fp8.by_input, is_fast=False)
    of_label = head.lm_head_weight.index_select(0, labels)
    torch.addcmul(others, of_label, label_slopes[:, None].to(others.dtype), out=gradient)
