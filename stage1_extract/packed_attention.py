"""Packed attention: sequences end to end in one row, each attending to itself only.

Registered with transformers as the attention function "packed_sequences". The model hands on the
boundaries that its forward pass was called with (`cu_seq_lens_q`, `max_length_q`: transformers' own
names). On a GPU one variable-length kernel does all sequences; elsewhere, and for what the kernel
cannot do (soft caps, sinks, other widths), each sequence is computed by itself.
"""

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int32
from numpy import ndarray
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

PACKED_ATTENTION = "packed_sequences"


class PackingUnsupportedError(ValueError):
    """The model does not attend in a way that can be packed."""


def packed_input(
    token_ids: Sequence[Int32[ndarray, "_"]], *, device: str | torch.device
) -> dict[str, Any]:
    """Arguments of a forward pass over sequences laid end to end; positions restart at each."""
    lengths = [len(each) for each in token_ids]
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    row = torch.cat([torch.as_tensor(each, dtype=torch.long) for each in token_ids])
    boundaries = ends.to(device)
    return {
        "input_ids": row.to(device)[None],
        "position_ids": positions.to(device)[None],
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
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
    max_length_q: int | None = None,
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
        cu_seq_lens_q: First token of each sequence, and the end of the last.
        max_length_q: Longest sequence.

    Raises:
        PackingUnsupportedError: Boundaries do not reach this layer, it has a mask of its own, or
            is not causal.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise PackingUnsupportedError("the model does not hand sequence boundaries to its layers")
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise PackingUnsupportedError("a layer has a mask of its own")
    if sliding_window is not None and sliding_window >= max_length_q:
        sliding_window = None
    needs_scores = softcap is not None or s_aux is not None
    if not needs_scores and _kernel_can(query, value):
        return _attend_by_kernel(
            query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window
        ), None
    ends = cu_seq_lens_q.tolist()
    outputs = []
    for start, end in itertools.pairwise(ends):
        q, k, v = (each[:, :, start:end] for each in (query, key, value))
        if needs_scores:
            outputs.append(_attend_by_scores(q, k, v, scaling, sliding_window, softcap, s_aux))
        else:
            outputs.append(_attend_by_sdpa(q, k, v, scaling, sliding_window))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _kernel_can(query: Tensor, value: Tensor) -> bool:
    width = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and value.shape[-1] == width
        and width <= 256
        and width % 8 == 0
    )


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

    # Older torch takes fewer key heads without being told.
    knows_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"enable_gqa": True} if knows_gqa else {}
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
        **options,
    )
    assert isinstance(output, Tensor)
    return output[None]


def _attend_by_sdpa(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, sliding_window: int | None
) -> Float[Tensor, "1 heads tokens width"]:
    num_tokens = query.shape[2]
    is_windowed = sliding_window is not None and sliding_window < num_tokens
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=visible(num_tokens, sliding_window, device=query.device) if is_windowed else None,
        is_causal=not is_windowed,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )


def _attend_by_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Float[Tensor, "1 heads tokens width"]:
    """Attention written out, for what no fused kernel knows; softmax in fp32."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
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


def visible(
    num_tokens: int, sliding_window: int | None, *, device: torch.device
) -> Bool[Tensor, "tokens tokens"]:
    """Which keys (columns) each query (row) sees: itself and those before it, within the window."""
    position = torch.arange(num_tokens, device=device)
    distance = position[:, None] - position[None, :]
    seen = distance >= 0
    return seen if sliding_window is None else seen & (distance < sliding_window)


# Without a mask function of the same name transformers builds no mask for it at all.
AttentionInterface.register(PACKED_ATTENTION, attend_packed)
