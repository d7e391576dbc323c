"""Attention of blocks to their context and to themselves, by kernels made for just that.

FlexAttention (see `flex`) computes the same under any mask. These kernels know that a query sees
two runs of keys, that the queries of a block see the same ones, and that blocks are sorted: they
read keys and values where the projections left them, token by token, and mask the ends of runs
alone.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from stage2_train.flex import VisibleRuns

# Shapes: queries [queries, heads, head_dim]; keys and values [tokens, kv_heads, head_dim].

_LOG2_E = 1.4426950408889634
# What tiles of the largest heads need: the data-centre GPUs since Hopper have it.
_SHARED_MEMORY_BYTES = 220 * 1024
# The queries that see a tile of context are cut into chunks until there are so many programs: the
# first tiles are seen by nearly all queries, and would take longer than all others together.
_NUM_CONTEXT_PROGRAMS, _MAX_CHUNKS = 384, 8


class BlockTables(NamedTuple):
    """What the kernels know of a batch: the runs of every query, and who sees a context tile."""

    context_start: Int32[Tensor, "queries"]
    context_stop: Int32[Tensor, "queries"]
    block_start: Int32[Tensor, "queries"]
    block_stop: Int32[Tensor, "queries"]
    query_ranges: Int32[Tensor, "key_tiles 4"]
    """First query that sees a key of the tile; first and end of queries in a row that all see the
    whole of it; end of the queries that see a key."""


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Sizes of a kernel's tiles, and how a GPU runs it."""

    rows: int
    """Queries times heads."""
    keys: int
    num_warps: int
    num_stages: int


_FORWARD = Tiling(rows=128, keys=64, num_warps=8, num_stages=3)
_BACKWARD_ROWS = Tiling(rows=128, keys=64, num_warps=8, num_stages=3)
_BACKWARD_CONTEXT = Tiling(rows=64, keys=128, num_warps=8, num_stages=3)


def suits(
    *, num_heads: int, num_kv_heads: int, head_dim: int, num_queries: int, block_size: int
) -> bool:
    """Says whether the kernels can take a batch: its tiles of rows must hold whole blocks."""
    pack = _heads_beside(num_heads, num_kv_heads)
    is_whole = all(
        tiling.rows // pack % block_size == 0 and num_queries % (tiling.rows // pack) == 0
        for tiling in (_FORWARD, _BACKWARD_ROWS)
    )
    # Places of queries are counted in 32 bits.
    is_counted = num_queries * num_heads * head_dim < 2**31
    return is_whole and is_counted and head_dim in (16, 32, 64, 128) and pack <= 8


def has_room(device: torch.device) -> bool:
    """Says whether a device is a GPU whose multiprocessors hold the kernels' tiles."""
    if device.type != "cuda":
        return False
    # Imported here, for a CPU needs no Triton.
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    room_bytes: int = driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return room_bytes >= _SHARED_MEMORY_BYTES


def block_tables(runs: VisibleRuns, *, num_context_tokens: int) -> BlockTables:
    """Gives what the kernels need to know of a batch, from the runs of its queries."""
    return BlockTables(
        runs.context_start,
        runs.context_stop,
        runs.block_start,
        runs.block_stop,
        query_ranges(runs, num_context_tokens=num_context_tokens),
    )


def query_ranges(
    runs: VisibleRuns, *, num_context_tokens: int, tile_keys: int | None = None
) -> Int32[Tensor, "key_tiles 4"]:
    """Gives `BlockTables.query_ranges`, of the backward pass's tiles unless told otherwise."""
    tile_keys = tile_keys or _BACKWARD_CONTEXT.keys
    num_queries = len(runs.context_start)
    start, stop = runs.context_start[None, :], runs.context_stop[None, :]
    left = torch.arange(0, num_context_tokens, tile_keys, device=start.device)[:, None]
    right = left + tile_keys
    query = torch.arange(num_queries, device=start.device)[None, :]
    is_touched = (start < right) & (stop > left) & (start < stop)
    is_covered = (start <= left) & (stop >= right)
    last = torch.where(is_touched, query + 1, 0).amax(dim=1)
    first = torch.minimum(torch.where(is_touched, query, num_queries).amin(dim=1), last)
    full = torch.where(is_covered, query, num_queries).amin(dim=1)
    is_behind = ~is_covered & (query >= full[:, None])
    rest = torch.where(is_behind, query, num_queries).amin(dim=1)
    return torch.stack((first, full, rest, last), dim=1).to(torch.int32)


def attend_to_blocks(
    queries: Float[Tensor, "queries heads head_dim"],
    context: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    tables: BlockTables,
) -> Float[Tensor, "queries heads head_dim"]:
    """Gives attention of every query to its two runs of keys; differentiable, the same every time.

    Args:
        queries: of the block tokens.
        context: keys and values of the context, each [tokens, kv_heads, head_dim].
        own: keys and values of the block tokens.
        tables: what `block_tables` gave.
    """
    mixed: Tensor = _attention(queries, *context, *own, *tables)[0]
    return mixed


@torch.library.custom_op("dflash_offline::block_attention", mutates_args=())
def _attention(
    queries: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    context_start: Tensor,
    context_stop: Tensor,
    block_start: Tensor,
    block_stop: Tensor,
    query_ranges: Tensor,
) -> tuple[Tensor, Tensor]:
    # Imported here, for a CPU needs no Triton.
    from stage2_train.attention_kernels import forward_kernel

    mixed = torch.empty_like(queries, memory_format=torch.contiguous_format)
    log_sums = queries.new_empty(queries.shape[:2], dtype=torch.float32)
    sizes = _sizes(queries, own_keys, _FORWARD)
    forward_kernel[_row_tiles(queries, sizes)](
        *(part.contiguous() for part in (queries, context_keys, context_values)),
        *(part.contiguous() for part in (own_keys, own_values)),
        mixed,
        log_sums,
        context_start,
        context_stop,
        block_start,
        block_stop,
        queries.shape[-1] ** -0.5 * _LOG2_E,
        len(context_keys),
        **sizes,
    )
    return mixed, log_sums


@_attention.register_fake
def _(queries: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(queries, memory_format=torch.contiguous_format),
        queries.new_empty(queries.shape[:2], dtype=torch.float32),
    )


@torch.library.custom_op("dflash_offline::block_attention_backward", mutates_args=())
def _attention_backward(
    queries: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    context_start: Tensor,
    context_stop: Tensor,
    block_start: Tensor,
    block_stop: Tensor,
    query_ranges: Tensor,
    mixed: Tensor,
    log_sums: Tensor,
    slopes: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gives slopes of queries, context keys and values, own keys and values.

    Those of keys and values come in parts, which are still to be added up.
    """
    from stage2_train.attention_kernels import backward_context_kernel, backward_rows_kernel

    scale, num_queries, num_context = queries.shape[-1] ** -0.5, len(queries), len(context_keys)
    queries, context_keys, context_values, own_keys, own_values, mixed, slopes = (
        part.contiguous()
        for part in (queries, context_keys, context_values, own_keys, own_values, mixed, slopes)
    )
    results = _backward_results(queries, context_keys, own_keys)
    of_queries, of_keys, of_values, of_own_keys, of_own_values = results
    deltas = torch.empty_like(log_sums)
    sizes = _sizes(queries, own_keys, _BACKWARD_ROWS)
    backward_rows_kernel[_row_tiles(queries, sizes)](
        queries,
        context_keys,
        context_values,
        own_keys,
        own_values,
        mixed,
        slopes,
        log_sums,
        deltas,
        of_queries,
        of_own_keys,
        of_own_values,
        context_start,
        context_stop,
        block_start,
        block_stop,
        scale * _LOG2_E,
        scale,
        num_context,
        num_queries,
        **sizes,
    )
    sizes = _sizes(queries, own_keys, _BACKWARD_CONTEXT)
    backward_context_kernel[(len(query_ranges) * sizes["KV_HEADS"] * len(of_keys),)](
        queries,
        context_keys,
        context_values,
        slopes,
        log_sums,
        deltas,
        of_keys,
        of_values,
        context_start,
        context_stop,
        query_ranges,
        scale * _LOG2_E,
        scale,
        num_context,
        len(of_keys) * sizes["PACK"] * sizes["KV_HEADS"] // sizes["HEADS"],
        **sizes,
    )
    return results


@_attention_backward.register_fake
def _(
    queries: Tensor, context_keys: Tensor, context_values: Tensor, own_keys: Tensor, *others: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _backward_results(queries, context_keys, own_keys)


def _backward_results(
    queries: Tensor, context_keys: Tensor, own_keys: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_heads, num_kv_heads = queries.shape[1], own_keys.shape[1]
    parts = num_heads // num_kv_heads // _heads_beside(num_heads, num_kv_heads)
    dtype = torch.float32 if parts > 1 else queries.dtype
    num_programs = -(-len(context_keys) // _BACKWARD_CONTEXT.keys) * num_kv_heads * parts
    num_chunks = min(max(_NUM_CONTEXT_PROGRAMS // num_programs, 1), _MAX_CHUNKS)
    of_context, of_own = (num_chunks * parts, *context_keys.shape), (parts, *own_keys.shape)
    return (
        torch.empty_like(queries, memory_format=torch.contiguous_format),
        queries.new_empty(of_context, dtype=torch.float32),
        queries.new_empty(of_context, dtype=torch.float32),
        queries.new_empty(of_own, dtype=dtype),
        queries.new_empty(of_own, dtype=dtype),
    )


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output)


def _differentiate(ctx: Any, slopes: Tensor, _: None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    of_queries, *parts = _attention_backward(*saved, slopes)
    of_keys = [part.sum(dim=0).to(of_queries.dtype) for part in parts]
    return (of_queries, *of_keys, None, None, None, None, None)


_attention.register_autograd(_differentiate, setup_context=_keep)


def _heads_beside(num_heads: int, num_kv_heads: int) -> int:
    """Gives how many heads of a group a tile holds: a power of two that divides them all."""
    group = num_heads // num_kv_heads
    return group & -group


def _sizes(queries: Tensor, own_keys: Tensor, tiling: Tiling) -> dict[str, int]:
    num_heads, num_kv_heads = queries.shape[1], own_keys.shape[1]
    return {
        "HEADS": num_heads,
        "KV_HEADS": num_kv_heads,
        "HEAD_DIM": queries.shape[2],
        "PACK": _heads_beside(num_heads, num_kv_heads),
        "ROWS": tiling.rows,
        "KEYS": tiling.keys,
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
    }


def _row_tiles(queries: Tensor, sizes: dict[str, int]) -> tuple[int, int]:
    return len(queries) * sizes["PACK"] // sizes["ROWS"], sizes["HEADS"] // sizes["PACK"]
