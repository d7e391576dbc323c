"""Draft blocks for many sequences at once, each from its own anchor, over cached context.

Decoding with the target and the walk over the store draft in the same way, so they share this:
the context's keys and values are kept per layer in slots numbered by position, and a block sees
the slots before its anchor.
"""

import dataclasses

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from stage2_train.architecture import AttentionRule
from stage2_train.drafter import Attend, Drafter, KeyValues
from stage2_train.target_head import TargetHead


class ContextCache:
    """Keys and values of the context: those of position p lie in slot p of every draft layer.

    Slots at or after an anchor are never seen by its block, so what they hold does not matter and
    nothing is ever removed: the states of rejected tokens are overwritten by the next block's.
    """

    def __init__(self, drafter: Drafter, *, batch_size: int, num_slots: int) -> None:
        shape = drafter.architecture
        size = (batch_size, shape.num_key_value_heads, num_slots, shape.head_dim)
        self.drafter = drafter
        # Keys and values of all layers in one piece, so that new tokens take one kernel to write.
        self.slots = drafter.fc.weight.new_zeros(2 * shape.num_hidden_layers, *size)

    def write(
        self,
        context_states: Float[Tensor, "batch tokens features"],
        positions: Int[Tensor, "batch tokens"],
        slots: Int[Tensor, "batch tokens"],
    ) -> None:
        """Take in the target's hidden states of some tokens of every row.

        Args:
            context_states: states of the drafter's target layers, side by side.
            positions: place of each token in its sequence.
            slots: where they go: the position, or a slot that no block ever sees for padding.
        """
        new = self.drafter.context_key_values(context_states, positions)
        write_slots(self.slots, torch.stack([part for layer in new for part in layer]), slots)

    def visible(self, num_visible: int) -> list[KeyValues]:
        """Give the first slots of every layer."""
        parts = self.slots[:, :, :, :num_visible].unbind()
        return list(zip(parts[::2], parts[1::2], strict=True))

    def keep_rows(self, rows: Int[Tensor, "kept"]) -> None:
        """Drop all other rows of the batch."""
        self.slots = self.slots[:, rows]


def write_slots(
    cache: Float[Tensor, "*layers batch heads slots width"],
    new: Float[Tensor, "*layers batch heads tokens width"],
    slots: Int[Tensor, "batch tokens"],
) -> None:
    """Write each row's new tokens into that row's slots, in place."""
    cache.scatter_(-2, slots[:, None, :, None].expand_as(new), new)


def draft_mask(
    anchors: Int[Tensor, "batch"],
    block_lengths: Int[Tensor, "batch"],
    *,
    num_visible: int,
    block_size: int,
    rule: AttentionRule,
) -> Bool[Tensor, "batch 1 queries keys"]:
    """Say which keys each block's queries see: the slots before the anchor, then the block itself.

    `block_lengths` shortens a block near the length limit: the official decoder drafts no further
    than it may still gain, and the mask tokens it leaves out are not seen by the others.
    """
    if rule.sliding_window is None and not rule.is_causal:
        return _plain_draft_mask(
            anchors, block_lengths, num_visible=num_visible, block_size=block_size
        )
    offset = torch.arange(block_size, device=anchors.device)
    slot = torch.arange(num_visible, device=anchors.device)
    query = (anchors[:, None] + offset)[:, :, None]
    in_context = (slot < anchors[:, None, None]).expand(-1, block_size, -1)
    in_block = (offset < block_lengths[:, None, None]).expand(-1, block_size, -1)
    distance = offset[:, None] - offset
    if rule.sliding_window is not None:
        in_context = in_context & (query - slot < rule.sliding_window)
        in_block = in_block & (distance.abs() < rule.sliding_window)
    if rule.is_causal:
        in_block = in_block & (distance >= 0)
    return torch.cat((in_context, in_block), dim=-1)[:, None]


def _plain_draft_mask(
    anchors: Int[Tensor, "batch"],
    block_lengths: Int[Tensor, "batch"],
    *,
    num_visible: int,
    block_size: int,
) -> Bool[Tensor, "batch 1 queries keys"]:
    """Do the same for the rule under which all queries of a block see alike, in few kernels."""
    key = torch.arange(num_visible + block_size, device=anchors.device)
    past = torch.where(key < num_visible, anchors[:, None], block_lengths[:, None] + num_visible)
    return (key < past)[:, None, None].expand(-1, -1, block_size, -1)


def make_draft_attend(
    drafter: Drafter,
    anchors: Int[Tensor, "batch"],
    block_lengths: Int[Tensor, "batch"],
    *,
    num_visible: int,
) -> Attend:
    """Make the drafter's attention for one block of every row; layers of one rule share a mask."""
    rules = drafter.architecture.attention_rules
    masks = {
        rule: draft_mask(
            anchors,
            block_lengths,
            num_visible=num_visible,
            block_size=drafter.architecture.block_size,
            rule=rule,
        )
        for rule in set(rules)
    }

    def attend(
        queries: Float[Tensor, "batch heads queries head_dim"],
        keys: Float[Tensor, "batch kv_heads keys head_dim"],
        values: Float[Tensor, "batch kv_heads keys head_dim"],
        layer_index: int,
    ) -> Float[Tensor, "batch heads queries head_dim"]:
        return functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=masks[rules[layer_index]], enable_gqa=True
        )

    return attend


def draft_logits(
    drafter: Drafter,
    head: TargetHead,
    context: ContextCache,
    *,
    anchor_ids: Int[Tensor, "batch"],
    anchors: Int[Tensor, "batch"],
    block_lengths: Int[Tensor, "batch"],
    num_visible: int,
) -> Float[Tensor, "batch drafted vocab"]:
    """Draft one block for every row: the logits of offsets 1 to `block_size - 1`.

    Args:
        drafter: the drafter.
        head: the target's embedding and LM head, as `head_of` gives it for this drafter.
        context: the context taken in so far, at least up to each anchor.
        anchor_ids: the last known token of each row.
        anchors: its position.
        block_lengths: tokens of the block, anchor included, at most `block_size`; what lies beyond
            is computed but means nothing.
        num_visible: slots to look at; no anchor lies beyond.
    """
    shape = drafter.architecture
    block_ids = anchor_ids.new_full((len(anchor_ids), shape.block_size), shape.mask_token_id)
    block_ids[:, 0] = anchor_ids
    offsets = torch.arange(shape.block_size, device=anchors.device)
    hidden = drafter(
        head.embed(block_ids),
        anchors[:, None] + offsets,
        context.visible(num_visible),
        make_draft_attend(drafter, anchors, block_lengths, num_visible=num_visible),
    )
    # As plain rows: on a slice, the product with the head would run batch by batch, far slower.
    rows = hidden[:, 1:].flatten(0, 1)
    logits: Tensor = head.logits(rows).unflatten(0, (len(hidden), -1))
    return logits


def head_of(drafter: Drafter, head: TargetHead) -> TargetHead:
    """Give the head with the scales that the drafter's own configuration names.

    They are the target's for a drafter trained here; a drafter from elsewhere may differ, and
    engines obey its configuration.
    """
    weight = drafter.fc.weight
    shape = drafter.architecture
    return dataclasses.replace(
        head.to(weight.device, weight.dtype),
        embedding_scale=shape.input_embedding_scale,
        logit_scale=shape.output_multiplier,
        final_logit_softcapping=shape.final_logit_softcapping,
    )
