"""The drafter's layers as compiled functions of fixed shapes, over attention kernels.

The middle layers share a compilation, for their weights and masks are its inputs; the first and the
last have their own. What is computed is what `Drafter` computes, less what nobody needs: all mask
tokens enter the first layer alike, and behind the last one's attention nothing is asked of anchors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from stage2_train.block_attention import BlockTables, attend_to_blocks
from stage2_train.collate import PackedBatch, with_masks
from stage2_train.drafter import Drafter, DrafterAttention, DrafterLayer, Rotation, rotate
from stage2_train.heads import normed_and_turned
from stage2_train.masks import AttentionMask
from stage2_train.target_head import TargetHead

# (queries, context keys and values, own keys and values, mask) -> [queries, heads, head_dim]; all
# lie token by token, [tokens, heads, head_dim].
AttendByMask = Callable[
    [Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor], AttentionMask], Tensor
]


@dataclass(frozen=True, kw_only=True)
class FastPath:
    """The two functions that a step calls: one for the context, one for every layer."""

    context: Callable[..., Any]
    layer: Callable[..., Any]
    is_flex_wanted: bool = False
    """Whether masks that a batch lacks must be FlexAttention's."""

    def draft(
        self,
        drafter: Drafter,
        batch: PackedBatch,
        features: Float[Tensor, "tokens features"],
        *,
        head: TargetHead,
    ) -> tuple[Float[Tensor, "drafted hidden"], bool]:
        """Gives the normed hidden states of all block tokens but anchors, and whether all of it
        was compiled.

        Args:
            drafter: the drafter.
            batch: the batch, on the drafter's device.
            features: decoded states of its context.
            head: the target's head, for the embedding.
        """
        architecture, dtype = drafter.architecture, drafter.fc.weight.dtype
        block_size, last = architecture.block_size, architecture.num_hidden_layers - 1
        if batch.masks is None:
            batch = with_masks(
                batch,
                architecture=architecture,
                is_flex_wanted=self.is_flex_wanted or dtype == torch.float32,
            )
        assert batch.masks is not None
        rotations = [
            tuple(part[0] for part in drafter.rotation(positions[None], dtype))
            for positions in (batch.block_positions, batch.positions)
        ]
        feature, is_compiled = self.context(drafter, features)
        hidden = head.embed(distinct_tokens(batch.block_token_ids, block_size=block_size))
        for number, layer in enumerate(drafter.layers):
            hidden, is_layer_compiled = self.layer(
                layer,
                hidden,
                feature,
                *rotations,
                batch.masks.of_layers[number],
                block_size,
                number == 0,
                drafter.norm if number == last else None,
            )
            is_compiled = is_compiled and is_layer_compiled
        return hidden, is_compiled


def make_fast_path(*, is_compiled: bool, mode: str | None = None) -> FastPath:
    """Makes the functions; compiled ones refuse to fall back to eager code.

    Args:
        is_compiled: whether to compile; without it the same functions run eagerly.
        mode: torch.compile's mode; None is its default.
    """
    if not is_compiled:
        return FastPath(context=context_forward, layer=layer_forward)
    options: dict[str, Any] = {"fullgraph": True, "dynamic": False, "mode": mode}
    return FastPath(
        context=torch.compile(context_forward, **options),
        layer=torch.compile(layer_forward, **options),
    )


def context_forward(drafter: Drafter, features: Tensor) -> tuple[Tensor, bool]:
    """Gives the context feature of every token, and whether this ran compiled."""
    feature = drafter.hidden_norm(drafter.fc(features))
    return feature, torch.compiler.is_dynamo_compiling()


def attend_by_kernels(
    queries: Tensor,
    context: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    mask: AttentionMask,
) -> Tensor:
    """Attends by the kernels that the mask was made for."""
    if isinstance(mask, BlockTables):
        return attend_to_blocks(queries, context, own, mask)
    keys, values = (
        torch.cat(parts).transpose(0, 1)[None] for parts in zip(context, own, strict=True)
    )
    queries = queries.transpose(0, 1)[None]
    mixed = flex_attention(queries, keys, values, block_mask=mask, enable_gqa=True)
    return mixed[0].transpose(0, 1)


def layer_forward(
    layer: DrafterLayer,
    hidden: Tensor,
    feature: Tensor,
    block_rotation: Rotation,
    context_rotation: Rotation,
    mask: AttentionMask,
    block_size: int,
    is_first: bool,
    last_norm: nn.Module | None,
    attend: AttendByMask = attend_by_kernels,
) -> tuple[Tensor, bool]:
    """Passes the block tokens through one layer, and says whether this ran compiled.

    Args:
        layer: the layer.
        hidden: states of the block tokens `[queries, hidden]`; those of the distinct tokens (see
            `distinct_tokens`) in the first layer.
        feature: context features `[tokens, hidden]`.
        block_rotation: RoPE's cosines and sines of the block tokens, each `[queries, head_dim]`.
        context_rotation: those of the context.
        mask: which keys a query sees.
        block_size: tokens of a block.
        is_first: whether this is the first layer.
        last_norm: in the last layer, the norm behind it, which leaves the anchors out.
        attend: the attention.
    """
    attention = layer.self_attn
    normed = layer.input_layernorm(hidden)
    queries, keys, values = (
        heads_of(attention, project(normed))
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if is_first:
        # Normed while they are few, and only then laid out.
        queries, keys = attention.q_norm(queries), attention.k_norm(keys)
        hidden, queries, keys, values = (
            spread(part, block_size=block_size) for part in (hidden, queries, keys, values)
        )
        queries, keys = rotate(queries, block_rotation), rotate(keys, block_rotation)
    else:
        queries = normed_and_turned(queries, attention.q_norm, block_rotation)
        keys = normed_and_turned(keys, attention.k_norm, block_rotation)
    context_keys, context_values = (
        heads_of(attention, project(feature)) for project in (attention.k_proj, attention.v_proj)
    )
    context_keys = normed_and_turned(context_keys, attention.k_norm, context_rotation)
    mixed = attend(queries, (context_keys, context_values), (keys, values), mask).flatten(1)
    if last_norm is not None:
        hidden, mixed = (without_anchors(part, block_size=block_size) for part in (hidden, mixed))
    hidden = hidden + attention.o_proj(mixed)
    hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    if last_norm is not None:
        hidden = last_norm(hidden)
    return hidden, torch.compiler.is_dynamo_compiling()


def heads_of(attention: DrafterAttention, projected: Tensor) -> Tensor:
    """Splits `[tokens, heads * head_dim]` into heads."""
    return cast(Tensor, projected.unflatten(-1, (-1, attention.head_dim)))


def distinct_tokens(
    block_token_ids: Int[Tensor, "queries"], *, block_size: int
) -> Int[Tensor, "distinct"]:
    """Gives every anchor's token, then the mask token: all that blocks are made of."""
    return torch.cat((block_token_ids[::block_size], block_token_ids[1:2]))


def spread(
    distinct: Float[Tensor, "distinct *shape"], *, block_size: int
) -> Float[Tensor, "queries *shape"]:
    """Lays what belongs to distinct tokens out over the block tokens.

    Its gradient is a sum over all mask tokens, made in a fixed order.
    """
    anchors, mask = distinct[:-1, None], distinct[None, -1:]
    masks = mask.expand(len(anchors), block_size - 1, *distinct.shape[1:])
    return torch.cat((anchors, masks), dim=1).flatten(0, 1)


def without_anchors(
    of_tokens: Float[Tensor, "queries *shape"], *, block_size: int
) -> Float[Tensor, "drafted *shape"]:
    """Leaves the first token of every block out."""
    return cast(Tensor, of_tokens.unflatten(0, (-1, block_size)))[:, 1:].flatten(0, 1)
