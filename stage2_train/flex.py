"""FlexAttention over a packed batch, its tables written down from the anchors.

Under every rule a query sees two runs of keys: some context of its sequence, and some of its own
block. From the ends of these runs the tiles that hold a visible key, and those that hold nothing
else, follow by comparison; torch's own `create_block_mask` would evaluate every cell.
"""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Int, Int32
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from stage2_train.architecture import AttentionRule

# Edge of a tile of queries and keys: what FlexAttention's kernels work in.
TILE = 128


@dataclass(frozen=True, kw_only=True)
class VisibleRuns:
    """Ends of the two runs of keys that each query sees; an end is the first key not seen."""

    context_start: Int32[Tensor, "queries"]
    context_stop: Int32[Tensor, "queries"]
    block_start: Int32[Tensor, "queries"]
    block_stop: Int32[Tensor, "queries"]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The four ends, in their order."""
        return (self.context_start, self.context_stop, self.block_start, self.block_stop)


def visible_runs(
    context_start: Int[Tensor, "blocks"],
    context_stop: Int[Tensor, "blocks"],
    *,
    num_context_tokens: int,
    block_size: int,
    rule: AttentionRule,
) -> VisibleRuns:
    """Gives the runs of every query of a batch; the rule is that of `attention.visible`."""
    offset = torch.arange(block_size, device=context_start.device)[None, :]
    start, stop = context_start[:, None], context_stop[:, None]
    own = num_context_tokens + torch.arange(len(start), device=start.device)[:, None] * block_size
    first, last = own + torch.zeros_like(offset), own + block_size + torch.zeros_like(offset)
    start = start + torch.zeros_like(offset)
    if rule.sliding_window is not None:
        start = torch.maximum(start, stop + offset - rule.sliding_window + 1)
        first = torch.maximum(first, own + offset - rule.sliding_window + 1)
        last = torch.minimum(last, own + offset + rule.sliding_window)
    if rule.is_causal:
        last = torch.minimum(last, own + offset + 1)
    stop = stop + torch.zeros_like(offset)
    start = torch.minimum(start, stop)
    runs = (start, stop, first, last)
    return VisibleRuns(
        **{
            field.name: run.reshape(-1).to(torch.int32)
            for field, run in zip(fields(VisibleRuns), runs, strict=True)
        }
    )


def tiles(
    runs: VisibleRuns, *, num_keys: int
) -> tuple[Bool[Tensor, "query_tiles key_tiles"], Bool[Tensor, "query_tiles key_tiles"]]:
    """Says which tiles hold a visible key for any of their queries, and which for all."""
    num_queries = len(runs.block_start)
    left = torch.arange(0, num_keys, TILE, device=runs.block_start.device)[None, :]
    right = left + TILE
    is_touched = torch.zeros((num_queries, left.shape[1]), dtype=torch.bool, device=left.device)
    is_covered = torch.zeros_like(is_touched)
    for start, stop in (
        (runs.context_start, runs.context_stop),
        (runs.block_start, runs.block_stop),
    ):
        start, stop = start[:, None], stop[:, None]
        is_touched |= (torch.maximum(start, left) < torch.minimum(stop, right)) & (start < stop)
        is_covered |= (start <= left) & (right <= stop)
    # Rows past the last query see nothing, so the tile they fill up is never whole.
    missing = -num_queries % TILE
    is_touched = torch.nn.functional.pad(is_touched, (0, 0, 0, missing))
    is_covered = torch.nn.functional.pad(is_covered, (0, 0, 0, missing))
    return (
        is_touched.unflatten(0, (-1, TILE)).any(dim=1),
        is_covered.unflatten(0, (-1, TILE)).all(dim=1),
    )


def make_block_mask(runs: VisibleRuns, *, num_keys: int) -> BlockMask:
    """Gives FlexAttention's mask of a batch, with the tables of `create_block_mask`."""
    context_start, context_stop = runs.context_start, runs.context_stop
    block_start, block_stop = runs.block_start, runs.block_stop

    is_touched, is_covered = tiles(runs, num_keys=num_keys)
    num_partial, partial = _ordered(is_touched & ~is_covered)
    num_full, full = _ordered(is_covered)
    return BlockMask.from_kv_blocks(
        num_partial,
        partial,
        num_full,
        full,
        BLOCK_SIZE=TILE,
        # A lambda, for checkers of shapes wrap named functions in code no compiler can read.
        mask_mod=lambda batch, head, query, key: (
            (key >= context_start[query]) & (key < context_stop[query])
            | (key >= block_start[query]) & (key < block_stop[query])
        ),
        seq_lengths=(len(context_start), num_keys),
    )


def _ordered(
    chosen: Bool[Tensor, "query_tiles key_tiles"],
) -> tuple[Int32[Tensor, "1 1 query_tiles"], Int32[Tensor, "1 1 query_tiles key_tiles"]]:
    """Gives for each row of tiles how many are chosen, and all tiles with the chosen ones first."""
    indices = torch.argsort(chosen.to(torch.int32), dim=-1, descending=True, stable=True)
    counts = chosen.sum(dim=-1)
    return counts.to(torch.int32)[None, None], indices.to(torch.int32)[None, None]
