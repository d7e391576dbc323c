"""The target's caches in decoding: keys and values at their own positions, states that roll back.

Rows of a batch accept different numbers of tokens, so a row's cache ends where its own tokens end.
Attention layers keep the key of position p in slot p and a mask hides every later slot: what a
rejected token left behind is never seen and is overwritten by the next block. Linear-attention
layers fold all tokens into one state, so their state before a block is kept and restored.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from stage2_train.draft import write_slots

MASK_RULES = ("full_attention", "sliding_attention", "chunked_attention")
_PLAIN_ATTENTION = ("DynamicLayer", "DynamicSlidingWindowLayer")


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """Keys and values of one attention layer, each token in the slot of its position."""

    is_croppable = True
    is_sliding = False
    keys: Float[Tensor, "batch heads slots width"]
    values: Float[Tensor, "batch heads slots width"]

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        self.num_slots = num_slots
        self.num_visible = num_slots
        self.slots: Int[Tensor, "batch queries"] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the slots, zeroed so that a masked slot can never hold a NaN."""
        self.device = key_states.device
        for name, states in (("keys", key_states), ("values", value_states)):
            batch, heads, _, width = states.shape
            setattr(self, name, states.new_zeros(batch, heads, self.num_slots, width))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new tokens into their slots and give all slots that any row can see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.slots is not None
        write_slots(self.keys, key_states, self.slots)
        write_slots(self.values, value_states, self.slots)
        return self.keys[:, :, : self.num_visible], self.values[:, :, : self.num_visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Give the number of keys and their first position."""
        return self.num_visible, 0

    def get_seq_length(self) -> int:
        """Give 0: rows end at different lengths, so positions are always passed explicitly."""
        return 0

    def get_max_length(self) -> int:
        """Give the number of slots."""
        return self.num_slots

    def keep_rows(self, rows: Int[Tensor, "kept"]) -> None:
        """Drop all other rows."""
        if self.is_initialized:
            self.keys, self.values = self.keys[rows], self.values[rows]


class DecodingCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """One layer cache per decoder layer; `must_replay` says that a rejection restores states."""

    def __init__(self, config: PretrainedConfig, *, num_slots: int) -> None:
        layers = decoding_layers(config, num_slots=num_slots)
        super().__init__(layers=layers)
        self.must_replay = any(isinstance(layer, LinearAttentionLayer) for layer in layers)
        self._kept: list[dict[str, Any]] | None = None

    def place(self, slots: Int[Tensor, "batch queries"], *, num_visible: int) -> None:
        """Say where the next pass's tokens go and how many slots it may look at."""
        for layer in self.layers:
            if isinstance(layer, SlotLayer):
                layer.slots, layer.num_visible = slots, num_visible

    def keep_states(self) -> None:
        """Remember the linear-attention states as they are now."""
        self._kept = [_copy_states(layer) for layer in self._linear_layers()]

    def restore_states(self) -> None:
        """Put the remembered linear-attention states back."""
        assert self._kept is not None
        for layer, kept in zip(self._linear_layers(), self._kept, strict=True):
            for name, value in kept.items():
                setattr(layer, name, dict(value))
        self._kept = None

    def keep_rows(self, rows: Int[Tensor, "kept"]) -> None:
        """Drop all other rows of the batch."""
        for layer in self.layers:
            if isinstance(layer, SlotLayer):
                layer.keep_rows(rows)

    def _linear_layers(self) -> list[LinearAttentionLayer]:
        return [layer for layer in self.layers if isinstance(layer, LinearAttentionLayer)]


def _copy_states(layer: LinearAttentionLayer) -> dict[str, Any]:
    """Copy one layer's states; transformers writes the next ones into the same memory."""
    names = ("conv_states", "recurrent_states")
    copies: dict[str, Any] = {
        name: {
            index: None if state is None else state.clone()
            for index, state in getattr(layer, name).items()
        }
        for name in names
    }
    copies["has_previous_state"] = dict(layer.has_previous_state)
    return copies


def decoding_layers(config: PretrainedConfig, *, num_slots: int) -> list[Any]:
    """Give a cache layer for each decoder layer of the target.

    Raises:
        ValueError: The target has a layer whose cache cannot be rolled back after a rejection.
    """
    layers: list[Any] = []
    for index, layer in enumerate(DynamicCache(config=config).layers):
        kind = type(layer).__name__
        if kind in _PLAIN_ATTENTION:
            layers.append(SlotLayer(num_slots))
        elif type(layer) is LinearAttentionLayer or kind == "DummyLayer":
            layers.append(layer)
        else:
            raise ValueError(
                f"target {config.model_type}: layer {index} keeps a {kind}, which cannot be rolled "
                "back after a rejected token; evaluate with the walk, or decode in a serving engine"
            )
    return layers


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """Give the mask rule or kind of each decoder layer, by transformers' names."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return list(kinds)
    if getattr(config, "sliding_window", None) is not None:
        return ["sliding_attention"] * config.num_hidden_layers
    if getattr(config, "attention_chunk_size", None) is not None:
        return ["chunked_attention"] * config.num_hidden_layers
    return ["full_attention"] * config.num_hidden_layers


def visible_slots(
    kind: str,
    positions: Int[Tensor, "batch queries"],
    *,
    num_visible: int,
    config: PretrainedConfig,
) -> Bool[Tensor, "batch 1 queries slots"]:
    """Say which slots a query at each position sees; slot p holds the token of position p."""
    slots = torch.arange(num_visible, device=positions.device)
    query = positions[:, None, :, None]
    visible = slots <= query
    if kind == "sliding_attention":
        visible &= query - slots < config.sliding_window
    elif kind == "chunked_attention":
        size = config.attention_chunk_size
        visible &= query // size == slots // size
    return visible


def attention_masks(
    config: PretrainedConfig,
    positions: Int[Tensor, "batch queries"],
    *,
    num_visible: int,
    dtype: torch.dtype,
) -> Tensor | Mapping[str, Tensor | None]:
    """Give the masks in the form that this target's forward takes.

    transformers takes a mapping by layer kind when the configuration lists `layer_types`, else one
    mask. Eager attention adds its mask to the scores, the others take booleans.
    """
    kinds = sorted(set(layer_kinds(config)))
    masks: dict[str, Tensor | None] = {}
    for kind in kinds:
        if kind in MASK_RULES:
            visible = visible_slots(kind, positions, num_visible=num_visible, config=config)
            masks[kind] = _in_form(visible, config=config, dtype=dtype)
        else:
            masks[kind] = None
    if getattr(config, "layer_types", None) is not None:
        return masks
    only = masks[kinds[0]]
    assert only is not None
    return only


def _in_form(
    visible: Bool[Tensor, "batch 1 queries slots"], *, config: PretrainedConfig, dtype: torch.dtype
) -> Tensor:
    if config._attn_implementation != "eager":
        return visible
    hidden = torch.finfo(dtype).min
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, hidden
    )


def unsupported_kinds(config: PretrainedConfig) -> Sequence[str]:
    """Name the layer kinds for which decoding has no rule."""
    known = {*MASK_RULES, "linear_attention", "moe", "mlp"}
    return sorted(set(layer_kinds(config)) - known)
