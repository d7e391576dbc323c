"""Triton kernels that decode stored hidden states straight into the drafter's features."""

import math

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Shaped
from torch import Tensor

from stage2_train.decode import ROTATED, LayerDecoder
from storage.rotated import group_size, rotation_size

_ROWS = 8


def decode_layer_fused(
    decoder: LayerDecoder,
    data: Shaped[Tensor, "tokens width"],
    scales: Float32[Tensor, "tokens"] | None,
    *,
    out: Float[Tensor, "tokens hidden"],
) -> None:
    """Does what `decode.decode_layer` says, in one pass over the stored bytes."""
    num_tokens, hidden_size = out.shape
    if decoder.encoding == "bf16":
        out.copy_(data.view(torch.bfloat16))
        return
    assert scales is not None
    channel_scales = decoder.channel_scales
    if decoder.encoding in ROTATED:
        bits, group_channels = ROTATED[decoder.encoding]
        size = rotation_size(hidden_size)
        _decode_rotated[(triton.cdiv(num_tokens, _ROWS), hidden_size // size)](
            data,
            scales,
            scales if channel_scales is None else channel_scales,
            out,
            num_tokens,
            data.stride(0),
            out.stride(0),
            1 / math.sqrt(size),
            HIDDEN=hidden_size,
            BITS=bits,
            SIZE=size,
            GROUP=group_size(hidden_size, group_channels),
            LEVELS=size.bit_length() - 1,
            HAS_CHANNEL_SCALES=channel_scales is not None,
            ROWS=_ROWS,
        )
        return
    stored = data.view(torch.float8_e4m3fn) if decoder.encoding == "fp8" else data
    _decode_scaled[(num_tokens, triton.cdiv(hidden_size, 1024))](
        stored,
        scales,
        scales if channel_scales is None else channel_scales,
        out,
        stored.stride(0),
        out.stride(0),
        HIDDEN=hidden_size,
        HAS_CHANNEL_SCALES=channel_scales is not None,
        CHANNELS=1024,
    )


@triton.jit
def _decode_scaled(
    data,
    scales,
    channel_scales,
    out,
    data_stride,
    out_stride,
    HIDDEN: tl.constexpr,  # noqa: N803
    HAS_CHANNEL_SCALES: tl.constexpr,  # noqa: N803
    CHANNELS: tl.constexpr,  # noqa: N803
):
    """One token and a run of channels: value = stored * token scale * channel scale."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < HIDDEN
    stored = tl.load(data + token * data_stride + channel, mask=inside, other=0.0)
    value = stored.to(tl.float32) * tl.load(scales + token)
    if HAS_CHANNEL_SCALES:
        value = value * tl.load(channel_scales + channel, mask=inside, other=0.0)
    tl.store(out + token * out_stride + channel, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _decode_rotated(
    data,
    scales,
    channel_scales,
    out,
    num_tokens,
    data_stride,
    out_stride,
    factor,
    HIDDEN: tl.constexpr,  # noqa: N803
    BITS: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    LEVELS: tl.constexpr,  # noqa: N803
    HAS_CHANNEL_SCALES: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
):
    """Some tokens and one rotation's channels: bit planes, group steps, then the butterflies."""
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    channel = tl.program_id(1) * SIZE + tl.arange(0, SIZE)[None, :]
    inside = (token < num_tokens) & (channel < HIDDEN)
    row = data + token * data_stride
    code = tl.zeros((ROWS, SIZE), dtype=tl.float32)
    for plane in tl.static_range(BITS):
        byte = tl.load(row + plane * (HIDDEN // 8) + channel // 8, mask=inside, other=0)
        code += ((byte.to(tl.int32) >> (channel % 8)) & 1).to(tl.float32) * (1 << plane)
    step_code = tl.load(row + BITS * (HIDDEN // 8) + channel // GROUP, mask=inside, other=0)
    token_scale = tl.load(scales + token, mask=token < num_tokens, other=0.0)
    step = step_code.to(tl.float32) * step_code.to(tl.float32) * tl.div_rn(token_scale, 65025.0)
    value = (code - (1 << (BITS - 1)) + 0.5) * step
    for level in tl.static_range(LEVELS):
        pairs = tl.reshape(value, (ROWS, SIZE // (2 << level), 2, 1 << level))
        first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        mixed = tl.join(first + second, first - second)
        value = tl.reshape(tl.permute(mixed, (0, 1, 3, 2)), (ROWS, SIZE))
    value = value * factor
    if HAS_CHANNEL_SCALES:
        value = value * tl.load(channel_scales + channel, mask=channel < HIDDEN, other=0.0)
    tl.store(out + token * out_stride + channel, value.to(out.dtype.element_ty), mask=inside)
