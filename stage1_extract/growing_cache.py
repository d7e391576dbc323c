"""A cache with room to grow: a new token's keys and values are written behind those that are there.

transformers' own cache copies all of it for every token.
"""

from typing import Any

from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

ROOM_TOKENS = 64
"""Tokens that a layer has room for beyond what it holds, when it has to be copied anyway."""

Keys = Float[Tensor, "rows heads _ width"]
Values = Float[Tensor, "rows heads _ value_width"]


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers has no types there
    """Keys and values of one layer; `hold` puts other ones in their place."""

    keys: Tensor
    values: Tensor

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        self._buffers: dict[str, Tensor] = {}

    def update(
        self, key_states: Keys, value_states: Values, *_: Any, **__: Any
    ) -> tuple[Keys, Values]:
        """Adds tokens; gives all keys and values, as views that are valid until the next call."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._with("keys", self.keys, key_states)
        self.values = self._with("values", self.values, value_states)
        return self.keys, self.values

    def hold(self, keys: Keys, values: Values) -> None:
        """Goes on from other keys and values, and lets the memory of the old ones go at once."""
        self.keys, self.values, self._buffers = keys, values, {}

    def _with(self, name: str, held: Tensor, new: Tensor) -> Tensor:
        num_held = held.shape[2] if held.numel() else 0
        end = num_held + new.shape[2]
        buffer = self._buffers.get(name)
        if buffer is None or not _starts_with(buffer, held) or end > buffer.shape[2]:
            rows, heads, _, width = new.shape
            buffer = new.new_empty(rows, heads, end + ROOM_TOKENS, width)
            if num_held:
                buffer[:, :, :num_held] = held
            self._buffers[name] = buffer
        buffer[:, :, num_held:end] = new
        return buffer[:, :, :end]


def _starts_with(buffer: Tensor, held: Tensor) -> bool:
    """Whether what is held are the first tokens of a buffer."""
    return (
        held.numel() > 0
        and held.data_ptr() == buffer.data_ptr()
        and held.shape[:2] == buffer.shape[:2]
        and held.stride() == buffer.stride()
    )


def growing_cache() -> Cache:
    """An empty cache for any model whose caches are keys and values only."""
    return Cache(layer_class_to_replicate=GrowingLayer)
