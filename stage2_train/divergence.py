"""How far the drafter's distribution lies from the target's own, in chunks of rows.

The target's distribution at a label is what its LM head makes of the stored `lm_head_input` one
position before. Peers train with the Kullback-Leibler divergence KL(target || drafter) or with the
total variation distance, which is the chance that rejection sampling refuses a drafted token.
No tensor of [rows, vocab] outlives its chunk.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from stage2_train.loss import HeadLoss, chunked_loss, plain_loss
from stage2_train.target_head import TargetHead, cap_logits

Divergence = Literal["kl", "total_variation"]


def head_divergence(
    hidden: Float[Tensor, "rows hidden"],
    target_hidden: Float[Tensor, "rows hidden"],
    labels: Int[Tensor, "rows"],
    weights: Float[Tensor, "rows"],
    *,
    kind: Divergence,
    head: TargetHead,
    chunk_rows: int,
) -> HeadLoss:
    """Gives the weighted divergence of the drafter's rows from the target's.

    Three products a chunk, always in the head's own type: both logits, and the gradient.

    Args:
        hidden: normed hidden states of the drafter, of the head's type.
        target_hidden: the target's states that its head turns into the same positions' logits.
        labels: token of each row; only `is_top` depends on them.
        weights: weight of each row's loss; the caller normalises them.
        kind: which divergence.
        head: the target's frozen head.
        chunk_rows: rows whose logits exist at once.
    """
    slopes_of = _fused_slopes if hidden.is_cuda else _slopes

    def fill(chunk: Tensor, rows: slice, *, gradient: Tensor | None, **results: Tensor) -> None:
        slopes = slopes_of(
            _raw_logits(chunk, head),
            _raw_logits(target_hidden[rows], head),
            labels[rows],
            weights[rows],
            kind=kind,
            head=head,
            **results,
        )
        if gradient is not None:
            torch.mm(slopes, head.lm_head_weight, out=gradient)

    return chunked_loss(hidden, weights, fill=fill, chunk_rows=chunk_rows)


def plain_divergence(
    hidden: Float[Tensor, "rows hidden"],
    target_hidden: Float[Tensor, "rows hidden"],
    labels: Int[Tensor, "rows"],
    weights: Float[Tensor, "rows"],
    *,
    kind: Divergence,
    head: TargetHead,
) -> HeadLoss:
    """Gives the same as `head_divergence` by plain operations: the reference."""
    logits = head.logits(hidden)
    drafted = torch.log_softmax(logits, dim=1)
    wanted = torch.log_softmax(head.logits(target_hidden), dim=1)
    if kind == "kl":
        row_loss = (wanted.exp() * (wanted - drafted)).sum(dim=1)
    else:
        row_loss = 0.5 * (drafted.exp() - wanted.exp()).abs().sum(dim=1)
    return plain_loss(row_loss, logits, labels, weights)


def _raw_logits(hidden: Float[Tensor, "rows hidden"], head: TargetHead) -> Tensor:
    logits = torch.mm(hidden, head.lm_head_weight.t())
    return logits if head.lm_head_bias is None else logits.add_(head.lm_head_bias)


def _slopes(
    raw: Float[Tensor, "rows vocab"],
    target_raw: Float[Tensor, "rows vocab"],
    labels: Int[Tensor, "rows"],
    weights: Float[Tensor, "rows"],
    *,
    kind: Divergence,
    head: TargetHead,
    row_loss: Float[Tensor, "rows"],
    is_top: Bool[Tensor, "rows"],
) -> Float[Tensor, "rows vocab"]:
    """Fills `row_loss` and `is_top`; gives the weighted gradient of the raw logits."""
    wide = torch.promote_types(raw.dtype, torch.float32)
    logits, target_logits = (
        cap_logits(part.to(wide) * head.logit_scale, head.final_logit_softcapping)
        for part in (raw, target_raw)
    )
    drafted, wanted = torch.log_softmax(logits, 1), torch.log_softmax(target_logits, 1)
    p, q = drafted.exp(), wanted.exp()
    if kind == "kl":
        row_loss.copy_((q * (wanted - drafted)).sum(dim=1))
        slopes = p - q
    else:
        row_loss.copy_(0.5 * (p - q).abs().sum(dim=1))
        sides = 0.5 * (p - q).sign()
        slopes = p * (sides - (p * sides).sum(dim=1, keepdim=True))
    is_top.copy_(logits.gather(1, labels[:, None])[:, 0] >= logits.amax(dim=1))
    if head.final_logit_softcapping is not None:
        slopes = slopes * (1 - (logits / head.final_logit_softcapping) ** 2)
    return (slopes * (weights[:, None] * head.logit_scale)).to(raw.dtype)


def _fused_slopes(
    raw: Float[Tensor, "rows vocab"],
    target_raw: Float[Tensor, "rows vocab"],
    labels: Int[Tensor, "rows"],
    weights: Float[Tensor, "rows"],
    *,
    kind: Divergence,
    head: TargetHead,
    row_loss: Float[Tensor, "rows"],
    is_top: Bool[Tensor, "rows"],
) -> Float[Tensor, "rows vocab"]:
    """Does the same on a GPU by one kernel, which writes over the raw logits."""
    # Imported here, for a CPU needs no Triton.
    from stage2_train.divergence_kernels import rows_to_slopes

    rows_to_slopes(
        raw,
        target_raw,
        labels,
        weights,
        is_total_variation=kind == "total_variation",
        logit_scale=head.logit_scale,
        softcap=head.final_logit_softcapping,
        row_loss=row_loss,
        is_top=is_top,
    )
    return raw
