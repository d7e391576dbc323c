"""The arithmetic of one step: a packed batch in, the loss and what it says out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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
from stage2_train.decode import LayerDecoder, decode_layer
from stage2_train.drafter import Attend, Drafter, DrafterArchitecture
from stage2_train.loss import head_cross_entropy
from stage2_train.metrics import BlockSums, block_sums
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
    ) -> tuple[Float[Tensor, "queries hidden"], bool]:
        """Gives the normed hidden states of the block tokens, and whether compiled code ran."""
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
    """
    architecture = drafter.architecture
    hidden, is_compiled = draft_blocks(
        drafter, batch, head=head, decoders=decoders, fast_path=fast_path
    )
    normaliser = batch.weight_sum if weight_sum is None else weight_sum
    result = head_cross_entropy(
        # Offset 0 and labels that do not count are dropped here: the head never sees them.
        hidden.index_select(0, batch.row_index),
        batch.row_label,
        batch.row_weight / max(normaliser, 1e-30),
        head=head,
        chunk_rows=chunk_rows,
    )
    sums = block_sums(
        row_loss=result.row_loss,
        is_correct=result.is_top,
        row_weight=batch.row_weight,
        row_index=batch.row_index,
        num_blocks=len(batch.context_start),
        block_size=architecture.block_size,
    )
    return StepResult(
        loss=result.loss, row_loss=result.row_loss, sums=sums, is_compiled=is_compiled
    )


def draft_blocks(
    drafter: Drafter,
    batch: PackedBatch,
    *,
    head: TargetHead,
    decoders: Sequence[LayerDecoder],
    fast_path: DraftPath | None = None,
) -> tuple[Float[Tensor, "queries hidden"], bool]:
    """Gives the normed hidden state of every block token, and whether compiled code made it."""
    # The head's type is what the step computes in; weights that are sharded are fp32.
    dtype = head.embed_weight.dtype
    features = decode_features(batch.layers, decoders, hidden_size=head.hidden_size, dtype=dtype)
    if fast_path is not None:
        return fast_path.draft(drafter, batch, features, head=head)
    context = drafter.context_key_values(features[None], batch.positions[None])
    drafted: Tensor = drafter(
        head.embed(batch.block_token_ids)[None],
        batch.block_positions[None],
        context,
        training_attend(batch, drafter.architecture, dtype),
    )
    return drafted[0], False


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
