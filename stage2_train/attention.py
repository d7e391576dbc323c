"""Which keys a block's query sees, and attention under that rule.

The keys of a packed batch are its context tokens followed by the block tokens. A block sees the
context of its own sequence strictly before its anchor, and itself; never another block, never
another sequence. The block mask is therefore two integers for each block, and everything here is
derived from them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from stage2_train.architecture import AttentionRule
from stage2_train.drafter import Attend


def block_mask(
    context_start: Int[Tensor, "blocks"],
    context_stop: Int[Tensor, "blocks"],
    *,
    num_context_tokens: int,
    block_size: int,
    rule: AttentionRule,
) -> Bool[Tensor, "queries keys"]:
    """Gives the mask of a packed batch: True where a query sees a key.

    Args:
        context_start: first context token of each block's sequence, as a place in the batch.
        context_stop: the block's anchor, as a place in the batch: the first token it does not see.
        num_context_tokens: context tokens of the batch; block tokens follow them among the keys.
        block_size: tokens of a block.
        rule: what the layer adds: causality inside the block, a sliding window.
    """
    device = context_start.device
    num_queries = len(context_start) * block_size
    query = torch.arange(num_queries, device=device)[:, None]
    key = torch.arange(num_context_tokens + num_queries, device=device)[None, :]
    return visible(
        query,
        key,
        context_start=context_start,
        context_stop=context_stop,
        num_context_tokens=num_context_tokens,
        block_size=block_size,
        rule=rule,
    )


def visible(
    query: Tensor,
    key: Tensor,
    *,
    context_start: Tensor,
    context_stop: Tensor,
    num_context_tokens: int,
    block_size: int,
    rule: AttentionRule,
) -> Tensor:
    """Says for query and key indices (any shapes that broadcast) whether the query sees the key."""
    block, offset = query // block_size, query % block_size
    start, stop = context_start[block], context_stop[block]
    key_block, key_offset = (
        (key - num_context_tokens) // block_size,
        (key - num_context_tokens) % block_size,
    )
    in_context = (key < num_context_tokens) & (key >= start) & (key < stop)
    in_block = (key >= num_context_tokens) & (key_block == block)
    if rule.sliding_window is not None:
        # Inside one sequence places in the batch differ as positions do.
        in_context = in_context & (stop + offset - key < rule.sliding_window)
        in_block = in_block & ((offset - key_offset).abs() < rule.sliding_window)
    if rule.is_causal:
        in_block = in_block & (key_offset <= offset)
    return in_context | in_block


def decoding_mask(
    num_queries: int, num_keys: int, *, rule: AttentionRule, device: torch.device
) -> Bool[Tensor, "queries keys"] | None:
    """Gives the mask of one block over its whole context, or None where all is seen.

    The keys are positions 0 to `num_keys - 1` of one sequence; the queries are the last ones.
    """
    if not rule.is_causal and rule.sliding_window is None:
        return None
    query = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    distance = query - torch.arange(num_keys, device=device)[None, :]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if rule.is_causal:
        seen &= distance >= 0
    if rule.sliding_window is not None:
        seen &= distance.abs() < rule.sliding_window
    return seen


def make_sdpa_attend(masks: Sequence[Bool[Tensor, "queries keys"] | None]) -> Attend:
    """Makes plain attention with one mask for each layer: the reference of every faster path."""

    def attend(
        queries: Float[Tensor, "batch heads queries head_dim"],
        keys: Float[Tensor, "batch kv_heads keys head_dim"],
        values: Float[Tensor, "batch kv_heads keys head_dim"],
        layer_index: int,
    ) -> Float[Tensor, "batch heads queries head_dim"]:
        return functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=masks[layer_index], enable_gqa=True
        )

    return attend


@dataclass
class Segments:
    """A batch cut into the sequences that never meet: neighbouring blocks and their context."""

    num_queries: list[int]
    """Block tokens of each segment."""
    context_sizes: list[int]
    """Context tokens of each segment, each followed by the number of those that no block sees."""
    biases: list[list[Float[Tensor, "queries keys"]]]
    """For each segment and layer, over its context and own block tokens: 0 if seen, else -inf."""


def segments_of(
    context_start: Int[Tensor, "blocks"],
    context_stop: Int[Tensor, "blocks"],
    *,
    num_context_tokens: int,
    block_size: int,
    rules: Sequence[AttentionRule],
    dtype: torch.dtype,
) -> Segments:
    """Cuts a batch whose blocks are sorted by anchor."""
    found = Segments(num_queries=[], context_sizes=[], biases=[])
    starts, num_blocks = torch.unique_consecutive(context_start, return_counts=True)
    # Sequences without a block in front of the first one, or between two, are seen by none.
    ends = [*starts.tolist()[1:], num_context_tokens]
    found.context_sizes += [0, int(starts[0])]
    first_block = 0
    for start, end, count in zip(starts.tolist(), ends, num_blocks.tolist(), strict=True):
        blocks = slice(first_block, first_block + count)
        first_block += count
        stop = int(context_stop[blocks].max())
        found.num_queries.append(count * block_size)
        found.context_sizes += [stop - start, end - stop]
        biases = {
            rule: _bias(
                block_mask(
                    context_start[blocks] - start,
                    context_stop[blocks] - start,
                    num_context_tokens=stop - start,
                    block_size=block_size,
                    rule=rule,
                ),
                dtype,
            )
            for rule in set(rules)
        }
        found.biases.append([biases[rule] for rule in rules])
    return found


def _bias(mask: Bool[Tensor, "queries keys"], dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))


def make_segment_attend(segments: Segments) -> Attend:
    """Makes attention sequence by sequence: equal to the plain one, without its masked products.

    Its shapes differ from batch to batch, which a CPU does not mind.
    """
    # One split, whose gradient is one concatenation; slices would each fill a whole gradient.
    key_sizes = [*segments.context_sizes, *segments.num_queries]
    num_context_parts = len(segments.context_sizes)

    def attend(
        queries: Float[Tensor, "batch heads queries head_dim"],
        keys: Float[Tensor, "batch kv_heads keys head_dim"],
        values: Float[Tensor, "batch kv_heads keys head_dim"],
        layer_index: int,
    ) -> Float[Tensor, "batch heads queries head_dim"]:
        scaled = (queries[0] * queries.shape[-1] ** -0.5).split(segments.num_queries, dim=1)
        key_parts = keys[0].split(key_sizes, dim=1)
        value_parts = values[0].split(key_sizes, dim=1)
        mixed = []
        for number, biases in enumerate(segments.biases):
            context, own = 2 * number + 2, num_context_parts + number
            mixed.append(
                biased_attention(
                    scaled[number],
                    torch.cat((key_parts[context], key_parts[own]), dim=1),
                    torch.cat((value_parts[context], value_parts[own]), dim=1),
                    biases[layer_index],
                )
            )
        return torch.cat(mixed, dim=1)[None]

    return attend


def biased_attention(
    queries: Float[Tensor, "heads queries head_dim"],
    keys: Float[Tensor, "kv_heads keys head_dim"],
    values: Float[Tensor, "kv_heads keys head_dim"],
    bias: Float[Tensor, "queries keys"],
) -> Float[Tensor, "heads queries head_dim"]:
    """Gives attention of scaled queries by two plain products: on a CPU its gradient is 4x faster.

    Query heads that share a key head are laid end to end, so that each product is one of matrices.
    """
    num_heads, num_queries, head_dim = queries.shape
    grouped = queries.reshape(len(keys), -1, head_dim)
    products = (grouped @ keys.transpose(1, 2)).view(len(keys), -1, num_queries, keys.shape[1])
    weights = torch.softmax(products + bias, dim=-1).flatten(1, 2)
    return (weights @ values).view(num_heads, num_queries, head_dim)


def make_decoding_attend(rules: Sequence[AttentionRule]) -> Attend:
    """Makes attention for decoding one sequence: the keys are its whole context and one block."""

    def attend(
        queries: Float[Tensor, "batch heads queries head_dim"],
        keys: Float[Tensor, "batch kv_heads keys head_dim"],
        values: Float[Tensor, "batch kv_heads keys head_dim"],
        layer_index: int,
    ) -> Float[Tensor, "batch heads queries head_dim"]:
        mask = decoding_mask(
            queries.shape[2], keys.shape[2], rule=rules[layer_index], device=keys.device
        )
        return functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, enable_gqa=True
        )

    return attend
