"""A Triton kernel for packed attention: causal, within each sequence, with windows, caps and sinks.

One program attends for one tile of a sequence's queries in one head. It walks over the keys of its
own sequence, from the first one it may see to the diagonal; softmax is taken on the way (Milakov
and Gimelshein, 2018; as in FlashAttention, Dao et al., 2022). Tiles come through the GPU's tensor
copy engine, which is what makes it faster than torch's `varlen_attn` on Hopper: of Qwen3-8B's shape
0.63 ms against 1.00 for 4 x 3,072 tokens on an H200.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int32
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from stage1_extract.query_tiles import QUERY_TILE

KEY_TILE = 64
WIDTHS = (32, 64, 128, 256)
"""Widths of a head that the kernel takes."""

_NUM_WARPS = 4
_MAX_STAGES, _MIN_STAGES = 3, 2
"""Tiles of keys and values on their way at once, as shared memory allows."""
_SPARE_BYTES = 4096
"""Shared memory for what is no tile."""
_OLDEST_CAPABILITY = (9, 0)
_LOG2_E = math.log2(math.e)
_ALIGNMENT_BYTES = 16


def can_attend(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernel takes states of this type and shape on their device."""
    widths = {each.shape[-1] for each in (query, key, value)}
    return (
        query.is_cuda
        and torch.cuda.get_device_capability(query.device) >= _OLDEST_CAPABILITY
        and query.dtype in (torch.bfloat16, torch.float16)
        and len(widths) == 1
        and widths <= set(WIDTHS)
        and num_stages(max(widths), query.device) >= _MIN_STAGES
    )


def num_stages(width: int, device: torch.device) -> int:
    """Tiles of keys and values that a GPU's shared memory holds beside one of queries."""
    if device.type != "cuda":
        return _MIN_STAGES  # Interpreted.
    index = torch.cuda.current_device() if device.index is None else device.index
    return stages_in(_shared_memory_bytes(index), width)


def stages_in(room_bytes: int, width: int) -> int:
    """The same for so many bytes, of elements of two bytes; 0 where there is no room for any."""
    row_bytes = 2 * width
    room_bytes -= _SPARE_BYTES + QUERY_TILE * row_bytes
    return max(0, min(_MAX_STAGES, room_bytes // (2 * KEY_TILE * row_bytes)))


@cache
def _shared_memory_bytes(device_index: int) -> int:
    room_bytes: int = driver.active.utils.get_device_properties(device_index)["max_shared_mem"]
    return room_bytes


def attend_by_tiles(
    query: Float[Tensor, "1 heads tokens width"],
    key: Float[Tensor, "1 kv_heads tokens width"],
    value: Float[Tensor, "1 kv_heads tokens width"],
    tiles: Int32[Tensor, "tiles 3"],
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Float[Tensor, "1 tokens heads width"]:
    """Attention of each packed sequence within itself; see `packed_attention.attend_packed`.

    Args:
        query: After rotation; so are the keys.
        key: One head serves several query heads where there are fewer.
        value: As many heads as the keys.
        tiles: Of the sequences, see `query_tiles.tiles_of`, on the same device.
        scaling: Factor of the scores; None takes the usual one.
        sliding_window: Tokens that a query sees, itself included; None sees all before it.
        softcap: Bound of the scores by tanh.
        s_aux: A score of each head that takes part in the softmax and has no value (sink).
    """
    _, num_heads, num_tokens, width = query.shape
    output = query.new_empty(num_tokens, num_heads, width)
    scale = width**-0.5 if scaling is None else scaling
    _attend[(num_heads, len(tiles))](
        _by_tiles(query, QUERY_TILE),
        _by_tiles(key, KEY_TILE),
        _by_tiles(value, KEY_TILE),
        output,
        tiles,
        output if s_aux is None else s_aux,
        scale * _LOG2_E if softcap is None else 1.0,
        0.0 if softcap is None else 2 * _LOG2_E * scale / softcap,
        0.0 if softcap is None else _LOG2_E * softcap,
        sliding_window or 0,
        num_heads,
        GROUP=num_heads // key.shape[1],
        WIDTH=width,
        QUERIES=QUERY_TILE,
        KEYS=KEY_TILE,
        HAS_WINDOW=sliding_window is not None,
        HAS_CAP=softcap is not None,
        HAS_SINK=s_aux is not None,
        num_warps=_NUM_WARPS,
        num_stages=num_stages(width, query.device),
    )
    return output[None]


def _by_tiles(states: Float[Tensor, "1 heads tokens width"], num_tokens: int) -> TensorDescriptor:
    """The states as the copy engine reads them: some tokens of one head at a time."""
    by_token = states[0].transpose(0, 1)
    strides = by_token.stride()
    alignment = _ALIGNMENT_BYTES // by_token.element_size()
    is_aligned = strides[2] == 1 and all(each % alignment == 0 for each in strides[:2])
    if not is_aligned or by_token.data_ptr() % _ALIGNMENT_BYTES:
        by_token = by_token.contiguous()
    block = [num_tokens, 1, by_token.shape[2]]
    return TensorDescriptor(by_token, list(by_token.shape), list(by_token.stride()), block)


@triton.jit
def _attend(
    queries,
    keys,
    values,
    output,
    tiles,
    sinks,
    factor,
    cap_inner,
    cap_outer,
    window,
    num_heads,
    GROUP: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    QUERIES: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr,  # noqa: N803
    HAS_WINDOW: tl.constexpr,  # noqa: N803
    HAS_CAP: tl.constexpr,  # noqa: N803
    HAS_SINK: tl.constexpr,  # noqa: N803
):
    """One tile of queries in one head; scores are in powers of two throughout."""
    head = tl.program_id(0)
    kv_head = head // GROUP
    tile = tiles + 3 * tl.program_id(1)
    first, start, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    token = start + tl.arange(0, QUERIES)
    query = queries.load([start, head, 0]).reshape(QUERIES, WIDTH)
    if HAS_SINK:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        largest = tl.zeros([QUERIES], tl.float32) + sink
        total = tl.full([QUERIES], 1.0, tl.float32)
    else:
        largest = tl.full([QUERIES], -1.0e30, tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
    attended = tl.zeros([QUERIES, WIDTH], tl.float32)
    if HAS_WINDOW:
        first = tl.maximum(first, start - window + 1)
    # Keys before the tile are seen by all its queries, unless there is a window.
    diagonal = first + (start - first) // KEYS * KEYS
    for at in range(first, diagonal, KEYS):
        key = keys.load([at, kv_head, 0]).reshape(KEYS, WIDTH)
        value = values.load([at, kv_head, 0]).reshape(KEYS, WIDTH)
        distance = token[:, None] - (at + tl.arange(0, KEYS))[None, :]
        scores = _scores(
            query, key, distance, cap_inner, cap_outer, window, HAS_WINDOW, HAS_WINDOW, HAS_CAP
        )
        attended, largest, total = _add(scores, value, attended, largest, total, factor)
    for at in range(diagonal, tl.minimum(start + QUERIES, end), KEYS):
        place = at + tl.arange(0, KEYS)
        key = keys.load([at, kv_head, 0]).reshape(KEYS, WIDTH)
        value = values.load([at, kv_head, 0]).reshape(KEYS, WIDTH)
        # Another sequence's NaN would survive a weight of zero.
        value = tl.where((place < end)[:, None], value, 0.0)
        distance = token[:, None] - place[None, :]
        scores = _scores(
            query, key, distance, cap_inner, cap_outer, window, True, HAS_WINDOW, HAS_CAP
        )
        attended, largest, total = _add(scores, value, attended, largest, total, factor)
    attended = attended / total[:, None]
    row = token.to(tl.int64) * num_heads + head
    place = output + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(place, attended.to(output.dtype.element_ty), mask=(token < end)[:, None])


@triton.jit
def _scores(
    query,
    key,
    distance,
    cap_inner,
    cap_outer,
    window,
    IS_MASKED: tl.constexpr,  # noqa: N803
    HAS_WINDOW: tl.constexpr,  # noqa: N803
    HAS_CAP: tl.constexpr,  # noqa: N803
):
    """Scores of a tile of queries and one of keys, far below all others where nothing is seen."""
    scores = tl.dot(query, tl.trans(key))
    if HAS_CAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1).
        scores = (1.0 - 2.0 / (tl.exp2(scores * cap_inner) + 1.0)) * cap_outer
    if IS_MASKED:
        is_seen = distance >= 0
        if HAS_WINDOW:
            is_seen = is_seen & (distance < window)
        scores = tl.where(is_seen, scores, -1.0e30)
    return scores


@triton.jit
def _add(scores, value, attended, largest, total, factor):
    """Takes one tile of keys into the running softmax."""
    now_largest = tl.maximum(largest, tl.max(scores, 1) * factor)
    weight = tl.exp2(scores * factor - now_largest[:, None])
    shrink = tl.exp2(largest - now_largest)
    total = total * shrink + tl.sum(weight, 1)
    attended = tl.dot(weight.to(value.dtype), value, attended * shrink[:, None])
    return attended, now_largest, total
