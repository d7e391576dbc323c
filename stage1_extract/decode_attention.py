"""Decode attention: one new token of each slot attends to what its slot's buffer holds.

Registered with transformers as the attention function "slot_decode". The cache hands on its whole
buffers; the model hands on how many tokens each slot holds (`slot_tokens`), on the device. Our
kernel reads no more than these, so that room behind them costs nothing. `attend_plainly` is its
reference, and serves where there is no GPU.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import AttentionInterface

DECODE_ATTENTION = "slot_decode"
_BLOCK_TOKENS = 64
# The smallest side of a matrix product on the GPU; query heads of one key head are filled up to it.
_MIN_ROWS = 16


class DecodeUnsupportedError(ValueError):
    """The model attends in a way that this function does not compute."""


def attend_slots(
    module: torch.nn.Module,
    query: Float[Tensor, "slots heads 1 width"],
    key: Float[Tensor, "slots kv_heads room width"],
    value: Float[Tensor, "slots kv_heads room value_width"],
    attention_mask: Tensor | None,
    *,
    slot_tokens: Int64[Tensor, "slots"] | None = None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Float[Tensor, "slots 1 heads value_width"], None]:
    """Attention of each slot's new token to its tokens, itself included, as transformers calls it.

    Args:
        module: The attention layer; not looked at.
        query: After rotation; so are the keys.
        key: The buffers; the new token's key is in its place.
        value: Likewise.
        attention_mask: One element, as the model was handed it: the numbers of tokens say it all.
        slot_tokens: Tokens of each slot before the new one.
        scaling: Factor of the scores; None takes the usual one.
        others: Soft caps, sinks and windows are refused, and so are masks that the model makes.

    Raises:
        DecodeUnsupportedError: The model wants something else, or hands no `slot_tokens` on.
    """
    wanted = [
        name for name in ("softcap", "s_aux", "sliding_window") if others.get(name) is not None
    ]
    if attention_mask is not None and attention_mask.numel() > 1:
        wanted.append("a mask of its own")
    if slot_tokens is None or wanted:
        raise DecodeUnsupportedError(", ".join(wanted) or "slot_tokens were not handed on")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attend = attend_by_kernel if query.is_cuda and _fits(query, value) else attend_plainly
    attended = attend(query[:, :, 0], key, value, slot_tokens + 1, scale)
    return attended[:, None], None


def attend_plainly(
    query: Float[Tensor, "slots heads width"],
    key: Float[Tensor, "slots kv_heads room width"],
    value: Float[Tensor, "slots kv_heads room value_width"],
    num_tokens: Int64[Tensor, "slots"],
    scale: float,
) -> Float[Tensor, "slots heads value_width"]:
    """The reference: all scores at once, in float32."""
    grouped = query.float().unflatten(1, (key.shape[1], -1))
    scores = grouped @ key.float().mT * scale
    is_held = torch.arange(key.shape[2], device=key.device) < num_tokens[:, None]
    shares = scores.masked_fill(~is_held[:, None, None], float("-inf")).softmax(dim=-1)
    # What lies behind a slot's tokens may be anything, and 0 times NaN is NaN.
    held_values = value.float().masked_fill(~is_held[:, None, :, None], 0.0)
    attended: Tensor = (shares @ held_values).flatten(1, 2).to(query.dtype)
    return attended


def attend_by_kernel(
    query: Float[Tensor, "slots heads width"],
    key: Float[Tensor, "slots kv_heads room width"],
    value: Float[Tensor, "slots kv_heads room width"],
    num_tokens: Int64[Tensor, "slots"],
    scale: float,
) -> Float[Tensor, "slots heads width"]:
    """The same by one kernel that goes through each slot's tokens once."""
    num_slots, num_heads, width = query.shape
    num_key_heads, room = key.shape[1:3]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    _attend[(num_slots, num_key_heads)](
        query.contiguous(),
        key,
        value,
        num_tokens,
        out,
        scale * 1.4426950408889634,  # The kernel takes powers of two.
        room,
        group=num_heads // num_key_heads,
        rows=max(_MIN_ROWS, triton.next_power_of_2(num_heads // num_key_heads)),
        width=width,
        block_tokens=_BLOCK_TOKENS,
        num_warps=4,
    )
    return out


def _fits(query: Tensor, value: Tensor) -> bool:
    width = int(query.shape[-1])
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and width == value.shape[-1] == triton.next_power_of_2(width)
        and 16 <= width <= 256
    )


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    num_tokens,
    out,
    scale,
    room,
    group: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
    block_tokens: tl.constexpr,
):
    slot, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_key_heads = tl.num_programs(1)
    row, column = tl.arange(0, rows), tl.arange(0, width)
    heads = (slot * num_key_heads + key_head) * group + row
    query_places = heads[:, None] * width + column[None]
    is_head = (row < group)[:, None]
    queries = tl.load(query + query_places, mask=is_head, other=0.0)
    first = (slot * num_key_heads + key_head) * room * width
    end = tl.load(num_tokens + slot)
    largest = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    gathered = tl.zeros([rows, width], tl.float32)
    for start in range(0, end, block_tokens):
        tokens = start + tl.arange(0, block_tokens)
        places = first + tokens[:, None] * width + column[None]
        is_held = tokens < end
        keys = tl.load(key + places, mask=is_held[:, None], other=0.0)
        values = tl.load(value + places, mask=is_held[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(keys)) * scale
        scores = tl.where(is_held[None], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        shares = tl.exp2(scores - new_largest[:, None])
        shrunk = tl.exp2(largest - new_largest)
        total = total * shrunk + tl.sum(shares, 1)
        gathered = gathered * shrunk[:, None] + tl.dot(shares.to(values.dtype), values)
        largest = new_largest
    result = gathered / total[:, None]
    tl.store(out + query_places, result.to(out.dtype.element_ty), mask=is_head)


AttentionInterface.register(DECODE_ATTENTION, attend_slots)
