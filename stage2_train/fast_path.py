"""The drafter's layers as compiled functions of fixed shapes, over FlexAttention.

Each function compiles once: layers share it, for their weights and masks are its inputs. What it
computes is what `Drafter` computes; the modules are the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from stage2_train.collate import PackedBatch
from stage2_train.drafter import Drafter, DrafterLayer, Rotation
from stage2_train.flex import block_masks
from stage2_train.target_head import TargetHead


@dataclass(frozen=True, kw_only=True)
class FastPath:
    """The two functions that a step calls: one for the context, one for every layer."""

    context: Callable[..., Any]
    layer: Callable[..., Any]

    def draft(
        self,
        drafter: Drafter,
        batch: PackedBatch,
        features: Float[Tensor, "tokens features"],
        *,
        head: TargetHead,
    ) -> tuple[Float[Tensor, "queries hidden"], bool]:
        """Gives the normed hidden states of the block tokens, and whether all of it was compiled.

        Args:
            drafter: the drafter.
            batch: the batch, on the drafter's device.
            features: decoded states of its context.
            head: the target's head, for the embedding.
        """
        architecture, dtype = drafter.architecture, drafter.fc.weight.dtype
        masks = block_masks(
            batch.context_start,
            batch.context_stop,
            num_context_tokens=len(batch.positions),
            block_size=architecture.block_size,
            rules=architecture.attention_rules,
        )
        context_rotation = drafter.rotation(batch.positions[None], dtype)
        block_rotation = drafter.rotation(batch.block_positions[None], dtype)
        feature, is_compiled = self.context(drafter, features[None])
        hidden = head.embed(batch.block_token_ids)[None]
        for layer, mask in zip(drafter.layers, masks, strict=True):
            hidden, is_layer_compiled = self.layer(
                layer, hidden, feature, block_rotation, context_rotation, mask
            )
            is_compiled = is_compiled and is_layer_compiled
        return cast(Tensor, drafter.norm(hidden))[0], is_compiled


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


def layer_forward(
    layer: DrafterLayer,
    hidden: Tensor,
    feature: Tensor,
    block_rotation: Rotation,
    context_rotation: Rotation,
    mask: BlockMask,
) -> tuple[Tensor, bool]:
    """Passes the block through one layer, its context included; says whether this ran compiled."""

    def attend(queries: Tensor, keys: Tensor, values: Tensor, layer_index: int) -> Tensor:
        attended: Tensor = flex_attention(queries, keys, values, block_mask=mask, enable_gqa=True)
        return attended

    context = layer.self_attn.key_values(feature, context_rotation)
    hidden = layer(hidden, block_rotation, context, attend, 0)
    return hidden, torch.compiler.is_dynamo_compiling()
