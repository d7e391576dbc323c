"""Packed attention: sequences end to end in one row, each attending to itself only.

Registered with transformers as the attention function "packed_sequences". The model hands on the
boundaries that its forward pass was called with, on the device (`cu_seq_lens_q`: transformers' own
name) and on the host, so that nobody waits for the device to know them. On a GPU one kernel does
all sequences: our own from Hopper on, torch's `varlen_attn` on older ones and for widths that ours
does not take. Elsewhere, and for what neither can do (float32; soft caps and sinks on older GPUs),
those of like length are done together. To the compiler it is one opaque operator of fixed shapes,
whatever the boundaries.
"""

import inspect
import itertools
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int32
from numpy import ndarray
from torch import Tensor
from transformers import AttentionInterface

from stage1_extract.device_copy import to_device
from stage1_extract.plain_attention import (
    MAX_SCORES,
    Attend,
    attend_by_scores,
    attend_by_sdpa,
    attend_in_rectangles,
)
from stage1_extract.query_tiles import max_tiles, tiles_of

PACKED_ATTENTION = "packed_sequences"


class PackingUnsupportedError(ValueError):
    """The model does not attend in a way that can be packed."""


def packed_input(
    token_ids: Sequence[Int32[ndarray, "_"]],
    *,
    device: str | torch.device,
    row_tokens: int | None = None,
    num_boundaries: int | None = None,
) -> dict[str, Any]:
    """Arguments of a forward pass over sequences laid end to end; positions restart at each.

    Args:
        token_ids: The sequences.
        device: Where the model is.
        row_tokens: Length of the row; a sequence of zeros fills it up. None fits the row to the
            sequences.
        num_boundaries: Entries of the boundaries, the last one repeated; None as many as needed.

    Returns:
        Named as the model takes them. With `row_tokens` the tiles of the attention kernel are among
        them, so that a recorded pass finds all it needs on the device.
    """
    lengths = [len(each) for each in token_ids]
    row = torch.zeros(row_tokens or sum(lengths), dtype=torch.long)
    torch.cat([torch.as_tensor(each) for each in token_ids], out=row[: sum(lengths)])
    if len(row) > sum(lengths):
        lengths.append(len(row) - sum(lengths))
    starts = [0, *itertools.accumulate(lengths)]
    starts += [len(row)] * ((num_boundaries or 0) - len(starts))
    boundaries = torch.tensor(starts, dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    on_device = to_device(boundaries, device)
    tiles: dict[str, Tensor] = {}
    if row_tokens is not None:
        most = max_tiles(row_tokens, num_sequences=len(starts))
        tiles["query_tiles"] = to_device(tiles_of(starts, num_tiles=most), device)
    return {
        "input_ids": to_device(row, device)[None],
        "position_ids": to_device(positions, device)[None],
        "cu_seq_lens_q": on_device,
        "cu_seq_lens_k": on_device,
        "host_boundaries": boundaries,
        **tiles,
    }


def attend_packed(
    module: torch.nn.Module,
    query: Float[Tensor, "1 heads tokens width"],
    key: Float[Tensor, "1 kv_heads tokens width"],
    value: Float[Tensor, "1 kv_heads tokens value_width"],
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Int32[Tensor, "ends"] | None = None,
    host_boundaries: Int32[Tensor, "ends"] | None = None,
    query_tiles: Int32[Tensor, "tiles 3"] | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "1 tokens heads value_width"], None]:
    """Causal attention of each packed sequence within itself, as transformers calls it.

    Args:
        module: The attention layer; only whether it is causal is asked.
        query: After rotation; so are the keys.
        key: One head serves several query heads where there are fewer.
        value: Its width may differ from the keys'.
        attention_mask: Must be None: boundaries say it all.
        scaling: Factor of the scores; None takes the usual one.
        sliding_window: Tokens that a query sees, itself included; None sees all before it.
        softcap: Bound of the scores by tanh.
        s_aux: A learnt score of each head that takes part in the softmax and has no value (sink).
        cu_seq_lens_q: First token of each sequence, and the end of the last, on the device.
        host_boundaries: The same on the host.
        query_tiles: Of the same sequences, on the device, for passes that are recorded.

    Raises:
        PackingUnsupportedError: Boundaries do not reach this layer, it has a mask of its own, or
            is not causal.
    """
    if cu_seq_lens_q is None or host_boundaries is None:
        raise PackingUnsupportedError("the model does not hand sequence boundaries to its layers")
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise PackingUnsupportedError("a layer has a mask of its own")
    attended = torch.ops.dflash_offline.packed_attention(
        query,
        key,
        value,
        cu_seq_lens_q,
        host_boundaries,
        scaling,
        sliding_window,
        softcap,
        s_aux,
        query_tiles,
    )
    return attended, None


def _packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor,
    host_boundaries: Tensor,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
    tiles: Tensor | None,
) -> Float[Tensor, "1 tokens heads value_width"]:
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        rule = (scaling, sliding_window, softcap, s_aux)
        return _attend_in_recording(query, key, value, tiles, *rule)
    starts, longest = _starts_of(host_boundaries.numpy().tobytes())
    if sliding_window is not None and sliding_window >= longest:
        sliding_window = None
    if query.is_cuda:
        # Imported only here: Triton is made for GPUs.
        from stage1_extract.attention_kernel import attend_by_tiles, can_attend

        if can_attend(query, key, value):
            return attend_by_tiles(
                query,
                key,
                value,
                _tiles_on(starts, query.device),
                scaling=scaling,
                sliding_window=sliding_window,
                softcap=softcap,
                s_aux=s_aux,
            )
    if softcap is None and s_aux is None:
        if _kernel_can(query, value):
            ends = boundaries[: len(starts)]
            return _attend_by_kernel(query, key, value, ends, longest, scaling, sliding_window)
        attend: Attend = partial(attend_by_sdpa, scaling=scaling, sliding_window=sliding_window)
        max_scores = None
    else:
        attend = partial(
            attend_by_scores,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            s_aux=s_aux,
        )
        max_scores = MAX_SCORES
    return attend_in_rectangles(query, key, value, starts, attend, max_scores=max_scores)


def _attend_in_recording(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tiles: Tensor | None,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Float[Tensor, "1 tokens heads value_width"]:
    """Attention that is being recorded: when it is replayed, the host's boundaries are others."""
    from stage1_extract.attention_kernel import attend_by_tiles, can_attend

    if tiles is None or not can_attend(query, key, value):
        raise PackingUnsupportedError("its attention depends on the host, which a replay does not")
    if sliding_window is not None and sliding_window >= query.shape[2]:
        # The kernel that ran before: another one could not be loaded while recording.
        sliding_window = None
    return attend_by_tiles(
        query,
        key,
        value,
        tiles,
        scaling=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        s_aux=s_aux,
    )


@lru_cache(maxsize=8)
def _tiles_on(starts: tuple[int, ...], device: torch.device) -> Int32[Tensor, "tiles 3"]:
    """The tiles of packed sequences on a device; every layer of a forward pass asks for them."""
    return to_device(tiles_of(starts), device)


@lru_cache(maxsize=8)
def _starts_of(boundaries: bytes) -> tuple[tuple[int, ...], int]:
    """First token of each sequence with the end of the last, and the longest one's tokens.

    Repeated ends stand for no sequence. Every layer of a forward pass asks the same.
    """
    ends = np.frombuffer(boundaries, dtype=np.int32)[1:].tolist()
    starts = (0, *dict.fromkeys(ends))
    return starts, max(end - start for start, end in itertools.pairwise(starts))


def _packed_attention_shape(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    rows, heads, tokens, _width = query.shape
    return query.new_empty(rows, tokens, heads, value.shape[-1])


_operator = torch.library.custom_op(
    "dflash_offline::packed_attention",
    _packed_attention,
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor boundaries, Tensor host_boundaries,"
    " float? scaling, int? sliding_window, float? softcap, Tensor? s_aux, Tensor? tiles)"
    " -> Tensor",
)
_operator.register_fake(_packed_attention_shape)


def _kernel_can(query: Tensor, value: Tensor) -> bool:
    width = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and value.shape[-1] == width
        and width <= 256
        and width % 8 == 0
    )


@cache
def _kernel_options() -> dict[str, Any]:
    from torch.nn.attention.varlen import varlen_attn

    # Older torch takes fewer key heads without being told.
    knows_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return {"enable_gqa": True} if knows_gqa else {}


def _attend_by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor,
    longest: int,
    scaling: float | None,
    sliding_window: int | None,
) -> Float[Tensor, "1 tokens heads width"]:
    from torch.nn.attention.varlen import varlen_attn

    output = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        boundaries,
        boundaries,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        **_kernel_options(),
    )
    assert isinstance(output, Tensor)
    return output[None].contiguous()


# Without a mask function of the same name transformers builds no mask for it at all.
AttentionInterface.register(PACKED_ATTENTION, attend_packed)
