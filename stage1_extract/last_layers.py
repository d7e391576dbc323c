"""Weights of the target's last decoder layers, kept in the store for drafters to start from.

A drafter's layer has the parts of a decoder layer. What a target has of them goes into the store
under a drafter's names, norms as factors of a plain RMSNorm; stage 2 takes what fits.
"""

from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from stage1_extract.target_transformers import TransformersTarget
from stage1_extract.target_weights import as_published, whole

PLAIN_TYPES = (torch.float32, torch.bfloat16, torch.float16)
PROJECTIONS = (
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
# Our name of a norm, then the names that targets give it, the telling ones first: Gemma calls the
# norm behind attention what others call the one before the MLP.
NORMS = {
    "input_layernorm": ("input_layernorm",),
    "post_attention_layernorm": ("pre_feedforward_layernorm", "post_attention_layernorm"),
    "self_attn.q_norm": ("self_attn.q_norm",),
    "self_attn.k_norm": ("self_attn.k_norm",),
}


def last_layers_file(target: TransformersTarget, *, num_layers: int, norm_offset: float) -> bytes:
    """Gives the content of `head/last_layers.safetensors`.

    It holds `layers.{id}.{part}.weight`, id counted from 0 as the target counts its layers, and the
    final `norm.weight`.

    Args:
        target: the loaded target.
        num_layers: how many of its last layers; a smaller target gives all it has.
        norm_offset: what the target's norms add to their weights before they multiply.
    """
    layers: Any = target.decoder.layers
    first = max(0, len(layers) - num_layers)
    weights = {
        f"layers.{number}.{name}.weight": weight
        for number in range(first, len(layers))
        for name, weight in layer_weights(layers[number], norm_offset=norm_offset).items()
    }
    final = _weight_of(target.decoder, "norm")
    if final is not None:
        weights["norm.weight"] = final.float() + norm_offset
    kept = {name: as_published(weight, target) for name, weight in weights.items()}
    # Layers of some targets share their weights, which a file holds once for each.
    return save({name: weight.clone() for name, weight in kept.items()})


def layer_weights(layer: nn.Module, *, norm_offset: float) -> dict[str, Tensor]:
    """Gives the parts of one decoder layer that a drafter's layer has, too, by our names."""
    weights = fused_parts(layer)
    for name in PROJECTIONS:
        weight = _weight_of(layer, name)
        if weight is not None:
            weights[name] = weight
    for name, theirs in NORMS.items():
        found = [weight for each in theirs if (weight := _weight_of(layer, each)) is not None]
        if found:
            # As the target adds: in its own type the sum would be rounded.
            weights[name] = found[0].float() + norm_offset
    return weights


def fused_parts(layer: nn.Module) -> dict[str, Tensor]:
    """Gives the projections that some targets (Phi-3, GLM-4) hold as one matrix, by our names."""
    parts = {}
    gate_up = _weight_of(layer, "mlp.gate_up_proj")
    if gate_up is not None:
        parts["mlp.gate_proj"], parts["mlp.up_proj"] = gate_up.chunk(2)
    fused, out = _weight_of(layer, "self_attn.qkv_proj"), _weight_of(layer, "self_attn.o_proj")
    if fused is not None and out is not None:
        num_queries = out.shape[1]
        num_keys = (len(fused) - num_queries) // 2
        queries, keys, values = fused.split([num_queries, num_keys, num_keys])
        parts |= {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": values}
    return parts


def _weight_of(owner: Any, name: str) -> Tensor | None:
    """A part's weight; None where there is none, or no plain one (quantized, left on disk)."""
    module = owner
    for part in name.split("."):
        module = getattr(module, part, None)
    weight = getattr(module, "weight", None)
    if weight is None or weight.is_meta or weight.dtype not in PLAIN_TYPES:
        return None
    return whole(weight.detach())
