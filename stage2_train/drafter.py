"""The drafter: drafts a whole block of tokens from the target's hidden states in one pass.

Shapes, norms and weight names are those of the official `DFlashDraftModel` (Qwen3's), so a state
dict goes either way. The context's keys and values do not depend on the block: decoding computes
them once for each position and keeps them.
"""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from stage2_train.architecture import DrafterArchitecture
from stage2_train.rms_norm import rms_norm

__all__ = ["Attend", "Drafter", "DrafterArchitecture", "KeyValues", "Rotation"]

# Keys after their norm and RoPE, and values, each [batch, kv_heads, tokens, head_dim].
KeyValues = tuple[Tensor, Tensor]
# Cosines and sines of the positions, each [batch, tokens, head_dim].
Rotation = tuple[Tensor, Tensor]
# (queries, keys, values, layer index) -> [batch, heads, queries, head_dim]; the keys are the
# context's followed by the block's own.
Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]

INIT_STD = 0.02


class RmsNorm(nn.Module):
    """Scales the last axis to unit mean square, times a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalises `[..., size]`; the statistics are fp32."""
        return rms_norm(hidden, self.weight, self.eps)


class DrafterAttention(nn.Module):
    """Attention whose queries come from the block, keys and values from context and block."""

    def __init__(self, architecture: DrafterArchitecture) -> None:
        super().__init__()
        hidden_size, self.head_dim = architecture.hidden_size, architecture.head_dim
        query_size = architecture.num_attention_heads * self.head_dim
        key_size = architecture.num_key_value_heads * self.head_dim
        self.q_proj = _linear(hidden_size, query_size)
        self.k_proj = _linear(hidden_size, key_size)
        self.v_proj = _linear(hidden_size, key_size)
        self.o_proj = _linear(query_size, hidden_size)
        self.q_norm = RmsNorm(self.head_dim, architecture.rms_norm_eps)
        self.k_norm = RmsNorm(self.head_dim, architecture.rms_norm_eps)

    def key_values(
        self, hidden: Float[Tensor, "batch tokens hidden"], rotation: Rotation
    ) -> KeyValues:
        """Gives keys (normed, rotated) and values of every token."""
        keys = self.k_norm(self._heads(self.k_proj(hidden)))
        return rotate(keys.transpose(1, 2), rotation), self._heads(self.v_proj(hidden)).transpose(
            1, 2
        )

    def queries(
        self, hidden: Float[Tensor, "batch tokens hidden"], rotation: Rotation
    ) -> Float[Tensor, "batch heads tokens head_dim"]:
        """Gives queries, normed and rotated."""
        return rotate(self.q_norm(self._heads(self.q_proj(hidden))).transpose(1, 2), rotation)

    def _heads(self, projected: Tensor) -> Tensor:
        return cast(Tensor, projected.unflatten(-1, (-1, self.head_dim)))


class DrafterMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, architecture: DrafterArchitecture) -> None:
        super().__init__()
        hidden_size, width = architecture.hidden_size, architecture.intermediate_size
        self.gate_proj = _linear(hidden_size, width)
        self.up_proj = _linear(hidden_size, width)
        self.down_proj = _linear(width, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps `[..., hidden]` to `[..., hidden]`."""
        return cast(
            Tensor,
            self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden)),
        )


class DrafterLayer(nn.Module):
    """One draft layer: attention over context and block, then the MLP, both residual."""

    def __init__(self, architecture: DrafterArchitecture) -> None:
        super().__init__()
        self.self_attn = DrafterAttention(architecture)
        self.mlp = DrafterMlp(architecture)
        self.input_layernorm = RmsNorm(architecture.hidden_size, architecture.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(architecture.hidden_size, architecture.rms_norm_eps)

    def forward(
        self,
        hidden: Float[Tensor, "batch queries hidden"],
        rotation: Rotation,
        context: KeyValues,
        attend: Attend,
        layer_index: int,
    ) -> Float[Tensor, "batch queries hidden"]:
        """Passes the block through the layer."""
        normed = self.input_layernorm(hidden)
        keys, values = self.self_attn.key_values(normed, rotation)
        mixed = attend(
            self.self_attn.queries(normed, rotation),
            torch.cat((context[0], keys), dim=2),
            torch.cat((context[1], values), dim=2),
            layer_index,
        )
        hidden = hidden + self.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        return hidden + cast(Tensor, self.mlp(self.post_attention_layernorm(hidden)))


class Drafter(nn.Module):
    """The small model we train; owns neither an embedding nor an LM head."""

    def __init__(self, architecture: DrafterArchitecture) -> None:
        super().__init__()
        self.architecture = architecture
        hidden_size, eps = architecture.hidden_size, architecture.rms_norm_eps
        self.fc = _linear(len(architecture.target_layer_ids) * hidden_size, hidden_size)
        self.hidden_norm = RmsNorm(hidden_size, eps)
        self.layers = nn.ModuleList(
            DrafterLayer(architecture) for _ in range(architecture.num_hidden_layers)
        )
        self.norm = RmsNorm(hidden_size, eps)
        # Outside the module tree: casting the drafter to bf16 must not round RoPE's frequencies.
        self._rotary: dict[torch.device, Qwen3RotaryEmbedding] = {}
        initialize(self, seed=0)

    def context_key_values(
        self,
        context_states: Float[Tensor, "batch tokens features"],
        positions: Int[Tensor, "batch tokens"],
    ) -> list[KeyValues]:
        """Gives every layer's keys and values of the context; each token's depend on it alone.

        Args:
            context_states: hidden states of the architecture's target layers, in the order of
                `target_layer_ids`, side by side on the last axis.
            positions: place of each token in its sequence.
        """
        rotation = self.rotation(positions, self.fc.weight.dtype)
        feature = self.hidden_norm(self.fc(context_states))
        return [
            cast(DrafterLayer, layer).self_attn.key_values(feature, rotation)
            for layer in self.layers
        ]

    def forward(
        self,
        block_embeddings: Float[Tensor, "batch queries hidden"],
        positions: Int[Tensor, "batch queries"],
        context: list[KeyValues],
        attend: Attend,
    ) -> Float[Tensor, "batch queries hidden"]:
        """Drafts: gives the normed hidden state of every block token, ready for the LM head.

        Args:
            block_embeddings: embeddings of the anchor and the mask tokens.
            positions: place of each block token in its sequence.
            context: what `context_key_values` gave.
            attend: attention under the rule of the caller (see `attention`).
        """
        rotation = self.rotation(positions, block_embeddings.dtype)
        hidden = block_embeddings
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, rotation, context[index], attend, index)
        return cast(Tensor, self.norm(hidden))

    def rotation(self, positions: Int[Tensor, "batch tokens"], dtype: torch.dtype) -> Rotation:
        """Gives RoPE's cosines and sines, computed in fp32 whatever the weights' type."""
        rotary = self._rotary.get(positions.device)
        if rotary is None:
            rotary = make_rotary(self.architecture).to(positions.device)
            self._rotary[positions.device] = rotary
        witness = torch.empty(0, dtype=dtype, device=positions.device)
        return cast(Rotation, rotary(witness, positions))


def make_rotary(architecture: DrafterArchitecture) -> Qwen3RotaryEmbedding:
    """Builds the rotary module of transformers for the architecture's RoPE settings."""
    config = Qwen3Config(
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        head_dim=architecture.head_dim,
        max_position_embeddings=architecture.max_position_embeddings,
        rope_parameters=dict(architecture.rope_parameters),
    )
    with torch.device("cpu"):
        return Qwen3RotaryEmbedding(config)


def rotate(heads: Float[Tensor, "*heads head_dim"], rotation: Rotation) -> Tensor:
    """Applies RoPE: turns the two halves of every head by the angle of its position.

    Heads are `[batch, heads, tokens, head_dim]`, or `[tokens, heads, head_dim]` under a rotation
    without a batch axis.
    """
    cosines, sines = (part.unsqueeze(1) for part in rotation)
    if not torch.is_grad_enabled():
        return turned(heads, cosines, sines)
    return cast(Tensor, _Turn.apply(heads, cosines, sines))  # type: ignore[no-untyped-call]


class _Turn(torch.autograd.Function):
    """The gradient of a turn is the turn back: both halves of a head have the same angles."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return turned(heads, cosines, sines)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        return turned(grads[0], cosines, -sines), None, None


def turned(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turns the halves of heads by angles whose cosines and sines are given."""
    left, right = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-right, left), dim=-1) * sines


def initialize(drafter: Drafter, *, seed: int) -> None:
    """Draws fresh weights: matrices from a normal of standard deviation 0.02, norms one.

    They are the same wherever and by however many threads they are drawn: each matrix has a
    generator of its own. One thread would take a quarter of a minute for two billion.
    """
    is_inference = torch.is_inference_mode_enabled()  # Which threads do not inherit.

    @torch.inference_mode(is_inference)
    @torch.no_grad()
    def draw(named: tuple[str, nn.Parameter]) -> None:
        name, parameter = named
        if parameter.dim() == 1 or parameter.is_meta:
            parameter.fill_(1.0)
            return
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:4]))
        # Drawn on the CPU, so that a GPU starts from the same weights.
        drawn = torch.empty(parameter.shape, dtype=torch.float32)
        parameter.copy_(drawn.normal_(std=INIT_STD, generator=generator))

    num_threads = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(draw, drafter.named_parameters()))


def _linear(in_features: int, out_features: int) -> nn.Linear:
    # `initialize` fills it; torch's own initialisation would only cost time.
    linear = nn.Linear(in_features, out_features, bias=False, device="meta")
    return linear.to_empty(device=torch.get_default_device())
