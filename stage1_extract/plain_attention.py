"""Attention of packed sequences without a variable-length kernel: for any type, cap or sink.

Sequences of like length are laid out as the rows of a rectangle and attend in one call, instead of
one call for each. What fills a row up lies behind its sequence, where causal attention never looks.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

from stage1_extract.device_copy import to_device

MAX_FILLED_FRACTION = 0.25
"""Share of a rectangle, at most, that fills rows up."""
MAX_SCORES = 2**24
"""Scores of one head in one call, at most, where they are kept: one sequence may have more."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From queries, keys and values [rows, heads, tokens, width] to what is attended."""


@dataclass(frozen=True)
class Rectangle:
    """Sequences of like length as rows."""

    rows: Int64[Tensor, "rows columns"]
    """Where in the packed row each token comes from; filled up with the last one."""
    real: Int64[Tensor, "tokens"]
    """Where in the rectangle, row after row, a sequence's own tokens lie."""
    places: Int64[Tensor, "tokens"]
    """Where in the packed row these belong."""


def groups_of_like_length(lengths: list[int], *, max_scores: int | None) -> list[list[int]]:
    """Parts sequences into groups, longest first, that leave little of their rectangle empty.

    Args:
        lengths: Tokens of each sequence.
        max_scores: Pairs of tokens in a rectangle at most, one sequence excepted; None is no limit.
    """
    groups: list[list[int]] = []
    longest = num_real = 0
    for index in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        size = longest * (len(groups[-1]) + 1) if groups else 0
        is_fuller = size * (1 - MAX_FILLED_FRACTION) <= num_real + lengths[index]
        if groups and is_fuller and (max_scores is None or size * longest <= max_scores):
            groups[-1].append(index)
            num_real += lengths[index]
        else:
            groups.append([index])
            longest = num_real = lengths[index]
    return groups


@lru_cache(maxsize=8)
def rectangles(
    starts: tuple[int, ...], device: torch.device, max_scores: int | None
) -> list[Rectangle]:
    """The rectangles of a packed row; every layer of a forward pass asks for the same ones.

    Args:
        starts: First token of each sequence, and the end of the last.
        device: Where the indices are wanted.
        max_scores: See `groups_of_like_length`.
    """
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    found = []
    for group in groups_of_like_length(lengths, max_scores=max_scores):
        first = torch.tensor([starts[index] for index in group])[:, None]
        length = torch.tensor([lengths[index] for index in group])[:, None]
        position = torch.arange(int(length.max()))[None]
        rows = first + torch.minimum(position, length - 1)
        real = (position < length).flatten().nonzero()[:, 0]
        places = rows.flatten()[real]
        found.append(Rectangle(*(to_device(each, device) for each in (rows, real, places))))
    return found


def attend_in_rectangles(
    query: Float[Tensor, "1 heads tokens width"],
    key: Float[Tensor, "1 kv_heads tokens width"],
    value: Float[Tensor, "1 kv_heads tokens value_width"],
    starts: tuple[int, ...],
    attend: Attend,
    *,
    max_scores: int | None,
) -> Float[Tensor, "1 tokens heads value_width"]:
    """Attention of each packed sequence within itself, rectangle by rectangle."""
    _, num_heads, num_tokens, _ = query.shape
    output = query.new_empty(num_tokens, num_heads, value.shape[-1])
    for rectangle in rectangles(starts, query.device, max_scores):
        parts = (each[0][:, rectangle.rows].transpose(0, 1) for each in (query, key, value))
        attended = attend(*parts).transpose(1, 2).flatten(0, 1)
        output.index_copy_(0, rectangle.places, attended[rectangle.real])
    return output[None]


def attend_by_sdpa(
    query: Float[Tensor, "rows heads tokens width"],
    key: Float[Tensor, "rows kv_heads tokens width"],
    value: Float[Tensor, "rows kv_heads tokens value_width"],
    *,
    scaling: float | None,
    sliding_window: int | None,
) -> Float[Tensor, "rows heads tokens value_width"]:
    """Causal attention of each row by torch's own function."""
    num_tokens = query.shape[2]
    is_windowed = sliding_window is not None and sliding_window < num_tokens
    if query.is_cuda:
        # The memory-efficient kernel, which float32 needs, knows no shared key heads.
        key, value = as_many_heads(key, query), as_many_heads(value, query)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=visible(num_tokens, sliding_window, device=query.device) if is_windowed else None,
        is_causal=not is_windowed,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )


def attend_by_scores(
    query: Float[Tensor, "rows heads tokens width"],
    key: Float[Tensor, "rows kv_heads tokens width"],
    value: Float[Tensor, "rows kv_heads tokens value_width"],
    *,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Float[Tensor, "rows heads tokens value_width"]:
    """Attention written out, for what no fused kernel knows; softmax in fp32."""
    key, value = as_many_heads(key, query), as_many_heads(value, query)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query @ key.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    seen = visible(query.shape[2], sliding_window, device=query.device)
    scores = scores.masked_fill(~seen, float("-inf"))
    if s_aux is not None:
        sinks = s_aux.reshape(1, -1, 1, 1).to(scores.dtype).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return weights[..., : key.shape[2]] @ value


def as_many_heads(
    states: Float[Tensor, "rows kv_heads tokens width"], query: Tensor
) -> Float[Tensor, "rows heads tokens width"]:
    """Key or value heads repeated for the query heads that they serve."""
    return states.repeat_interleave(query.shape[1] // states.shape[1], dim=1)


def visible(
    num_tokens: int, sliding_window: int | None, *, device: torch.device
) -> Bool[Tensor, "tokens tokens"]:
    """Which keys (columns) each query (row) sees: itself and those before it, within the window."""
    position = torch.arange(num_tokens, device=device)
    distance = position[:, None] - position[None, :]
    seen = distance >= 0
    return seen if sliding_window is None else seen & (distance < sliding_window)
