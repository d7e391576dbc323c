"""The arithmetic of one step: a packed batch in, the loss and what it says out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from stage2_train.attention import (
    block_mask,
    make_sdpa_attend,
    make_segment_attend,
    segments_of,
)
from stage2_train.collate import EncodedLayer, PackedBatch
from stage2_train.config import LossKind
from stage2_train.decode import LayerDecoder, decode_layer
from stage2_train.divergence import head_divergence
from stage2_train.drafter import Attend, Drafter, DrafterArchitecture
from stage2_train.loss import head_cross_entropy
from stage2_train.metrics import BlockSums, block_sums
from stage2_train.pace import pace_weights, weighted_later
from stage2_train.target_head import TargetHead


@runtime_checkable
class DraftPath(Protocol):
    """Another way to run the drafter's layers than the plain one: compiled, or sharded."""

    def draft(
        self,
        drafter: Drafter,
        batch: PackedBatch,
        features: Float[Tensor, "tokens features"],
        *,
        head: TargetHead,
    ) -> tuple[Float[Tensor, "drafted hidden"], bool]:
        """Gives normed states of all block tokens but anchors, and whether compiled code ran."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one batch gives."""

    loss: Float[Tensor, ""]
    """Weighted mean of the rows' losses; carries the gradient."""
    row_loss: Float[Tensor, "rows"]
    """Loss of each row that counts, in nats."""
    sums: BlockSums
    is_compiled: bool
    """Whether compiled code drafted the blocks: the code's own word."""


def batch_loss(
    drafter: Drafter,
    batch: PackedBatch,
    *,
    head: TargetHead,
    decoders: Sequence[LayerDecoder],
    chunk_rows: int,
    weight_sum: float | None = None,
    fast_path: DraftPath | None = None,
    kind: LossKind = "cross_entropy",
    pace_smoothing: float | None = None,
) -> StepResult:
    """Drafts every block of a batch and compares with its labels.

    Args:
        drafter: the drafter, of the type the step computes in.
        batch: the batch, on the drafter's device.
        head: the target's head, of the drafter's type and device.
        decoders: how each of the batch's layers is stored.
        chunk_rows: rows whose logits exist at once.
        weight_sum: what the row weights are divided by; None takes the batch's own sum.
        fast_path: the compiled layers; None takes the plain ones.
        kind: what a row's loss is; the divergences need `lm_head_input` as the last layer.
        pace_smoothing: D-PACE's smoothing (see `pace`); None leaves the row weights as they are.
    """
    rows, is_compiled = draft_rows(
        drafter, batch, head=head, decoders=decoders, fast_path=fast_path
    )
    pace = torch.empty_like(batch.row_weight)
    if pace_smoothing is not None:
        rows = weighted_later(rows, pace)
    normaliser = max(batch.weight_sum if weight_sum is None else weight_sum, 1e-30)
    arguments: dict[str, Any] = {"head": head, "chunk_rows": chunk_rows}
    weights = batch.row_weight / normaliser
    if kind == "cross_entropy":
        result = head_cross_entropy(rows, batch.row_label, weights, **arguments)
    else:
        target_rows = target_states(drafter, batch, head=head, decoders=decoders)
        result = head_divergence(
            rows, target_rows, batch.row_label, weights, kind=kind, **arguments
        )
    loss, row_weight = result.loss, batch.row_weight
    if pace_smoothing is not None:
        pace.copy_(_pace_of(result.row_loss, batch, drafter.architecture, pace_smoothing))
        row_weight = row_weight * pace
        # The gradient will come with its pace; the value is given it here.
        loss = loss + (result.row_loss * weights * (pace - 1.0)).sum()
    sums = block_sums(
        row_loss=result.row_loss,
        is_correct=result.is_top,
        row_weight=row_weight,
        row_index=batch.row_index,
        num_blocks=len(batch.context_start),
        block_size=drafter.architecture.block_size,
    )
    return StepResult(
        loss=loss,
        row_loss=result.row_loss,
        sums=sums,
        is_compiled=is_compiled,
    )


def _pace_of(
    row_loss: Float[Tensor, "rows"],
    batch: PackedBatch,
    architecture: DrafterArchitecture,
    smoothing: float,
) -> Float[Tensor, "rows"]:
    return pace_weights(
        row_loss.neg().exp(),
        batch.row_index,
        num_blocks=len(batch.context_start),
        block_size=architecture.block_size,
        smoothing=smoothing,
    )


def target_states(
    drafter: Drafter,
    batch: PackedBatch,
    *,
    head: TargetHead,
    decoders: Sequence[LayerDecoder],
) -> Float[Tensor, "rows hidden"]:
    """Gives the state from which the target's head predicts each row's label.

    It stands one position before the label, whose place in the batch is anchor + offset.
    """
    layer, block_size = batch.layers[-1], drafter.architecture.block_size
    states = torch.empty(
        (len(layer.data), head.hidden_size),
        dtype=head.embed_weight.dtype,
        device=layer.data.device,
    )
    decode_layer(decoders[-1], layer.data, layer.scales, out=states)
    block, offset = batch.row_index // block_size, batch.row_index % block_size
    return states.index_select(0, batch.context_stop[block] + offset - 1)


def draft_rows(
    drafter: Drafter,
    batch: PackedBatch,
    *,
    head: TargetHead,
    decoders: Sequence[LayerDecoder],
    fast_path: DraftPath | None = None,
) -> tuple[Float[Tensor, "rows hidden"], bool]:
    """Gives the normed hidden state of each label that counts, and whether compiled code made it.

    Offset 0 and labels that do not count are dropped here: the head never sees them.
    """
    if fast_path is None:
        hidden = draft_blocks(drafter, batch, head=head, decoders=decoders)
        return hidden.index_select(0, batch.row_index), False
    hidden, is_compiled = fast_path.draft(
        drafter, batch, batch_features(drafter, batch, head=head, decoders=decoders), head=head
    )
    # Anchors are left out: each block before a row takes one place less, and so does its own.
    drafted_index = batch.row_index - batch.row_index // drafter.architecture.block_size - 1
    taken: Tensor = _TakenRows.apply(hidden, drafted_index)  # type: ignore[no-untyped-call]
    return taken, is_compiled


class _TakenRows(torch.autograd.Function):
    """Takes different rows: their gradients are written to their places, not added up there."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = len(hidden)
        return hidden.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,), (gradient,) = ctx.saved_tensors, grads
        whole = gradient.new_zeros(ctx.num_rows, *gradient.shape[1:])
        return whole.index_copy_(0, index, gradient), None


def draft_blocks(
    drafter: Drafter,
    batch: PackedBatch,
    *,
    head: TargetHead,
    decoders: Sequence[LayerDecoder],
) -> Float[Tensor, "queries hidden"]:
    """Gives the normed hidden state of every block token, by plain layers."""
    features = batch_features(drafter, batch, head=head, decoders=decoders)
    context = drafter.context_key_values(features[None], batch.positions[None])
    drafted: Tensor = drafter(
        head.embed(batch.block_token_ids)[None],
        batch.block_positions[None],
        context,
        # The head's type is what the step computes in; weights that are sharded are fp32.
        training_attend(batch, drafter.architecture, head.embed_weight.dtype),
    )
    return drafted[0]


def batch_features(
    drafter: Drafter,
    batch: PackedBatch,
    *,
    head: TargetHead,
    decoders: Sequence[LayerDecoder],
) -> Float[Tensor, "tokens features"]:
    """Decodes the states that the drafter's context is made of."""
    num_layers = len(drafter.architecture.target_layer_ids)
    return decode_features(
        batch.layers[:num_layers],
        decoders[:num_layers],
        hidden_size=head.hidden_size,
        dtype=head.embed_weight.dtype,
    )


def decode_features(
    layers: Sequence[EncodedLayer],
    decoders: Sequence[LayerDecoder],
    *,
    hidden_size: int,
    dtype: torch.dtype,
) -> Float[Tensor, "tokens features"]:
    """Decodes the layers side by side, as `fc` reads them."""
    data = layers[0].data
    features = torch.empty(len(data), len(layers) * hidden_size, dtype=dtype, device=data.device)
    for number, (layer, decoder) in enumerate(zip(layers, decoders, strict=True)):
        out = features[:, number * hidden_size : (number + 1) * hidden_size]
        decode_layer(decoder, layer.data, layer.scales, out=out)
    return features


def training_attend(
    batch: PackedBatch, architecture: DrafterArchitecture, dtype: torch.dtype
) -> Attend:
    """Makes the attention that suits the batch's device."""
    if batch.positions.device.type == "cpu":
        segments = segments_of(
            batch.context_start,
            batch.context_stop,
            num_context_tokens=len(batch.positions),
            block_size=architecture.block_size,
            rules=architecture.attention_rules,
            dtype=dtype,
        )
        return make_segment_attend(segments)
    return reference_attend(batch, architecture)


def reference_attend(batch: PackedBatch, architecture: DrafterArchitecture) -> Attend:
    """Makes plain attention under the batch's block mask, built once for equal rules."""
    masks = {
        rule: block_mask(
            batch.context_start,
            batch.context_stop,
            num_context_tokens=len(batch.positions),
            block_size=architecture.block_size,
            rule=rule,
        )
        for rule in set(architecture.attention_rules)
    }
    return make_sdpa_attend([masks[rule] for rule in architecture.attention_rules])
