"""Triton kernels that encode hidden states: one read of a token's states, one write of its bytes.

The bits are those of the numpy reference in `storage.encodings`. One program holds all channels of
a token in registers: largest magnitude, scale, quotients, bytes.
"""

import math

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int32, Shaped
from torch import Tensor

from storage.encodings import LARGEST_NORMALIZED, SMALLEST_SCALE
from storage.rotated import SMALLEST_STEP, group_size, rotation_size

ROTATED = {"int4": (4, 32), "int3": (3, 64), "int2": (2, 64)}
"""Bits a channel and channels a group of the rotated encodings."""

NOT_FINITE = tl.constexpr(-1)
"""Status of a token that holds NaN or infinity; else the number of its values that were cut."""


def encode_layer(
    encoding: str,
    states: Float[Tensor, "tokens hidden"],
    *,
    channel_scales: Float32[Tensor, "hidden"] | None,
    data: Shaped[Tensor, "tokens width"],
    scales: Float32[Tensor, "tokens"],
    status: Int32[Tensor, "tokens"],
) -> None:
    """Encodes hidden states of one layer.

    Args:
        encoding: A name in `storage.encodings.ENCODINGS`.
        states: On a GPU (or anywhere under Triton's interpreter), channels next to each other.
        channel_scales: Of the layer record, for calibrated encodings.
        data: Filled with the encoded states, as bf16, fp8, int8 or bytes of bit planes.
        scales: Filled with the token scales where the encoding has them.
        status: Filled with -1 where a state is NaN or infinite, else with the number of values
            beyond what the encoding can hold, which were cut.
    """
    num_tokens, hidden_size = states.shape
    if num_tokens == 0:
        return
    padded = triton.next_power_of_2(hidden_size)
    common = {
        "HIDDEN": hidden_size,
        "PADDED": padded,
        "num_warps": max(1, min(16, padded // 512)),
    }
    if encoding == "bf16":
        as_bits = data.view(torch.uint16)
        _encode_bf16[(num_tokens,)](states, as_bits, status, states.stride(0), **common)
        return
    channels = scales if channel_scales is None else channel_scales
    if encoding in ROTATED:
        bits, group_channels = ROTATED[encoding]
        size = rotation_size(hidden_size)
        _encode_rotated[(num_tokens,)](
            states,
            channels,
            data,
            scales,
            status,
            states.stride(0),
            data.stride(0),
            float(LARGEST_NORMALIZED),
            float(SMALLEST_STEP),
            1 / math.sqrt(size),
            BITS=bits,
            GROUP=group_size(hidden_size, group_channels),
            LEVELS=size.bit_length() - 1,
            **common,
        )
        return
    _encode_scaled[(num_tokens,)](
        states,
        channels,
        data.view(torch.int8 if encoding == "int8" else torch.uint8),
        scales,
        status,
        states.stride(0),
        float(LARGEST_NORMALIZED),
        float(SMALLEST_SCALE),
        448.0 if encoding == "fp8" else 127.0,
        HAS_CHANNEL_SCALES=channel_scales is not None,
        IS_INT8=encoding == "int8",
        **common,
    )


@triton.jit
def _encode_bf16(states, data, status, stride, HIDDEN: tl.constexpr, PADDED: tl.constexpr):  # noqa: N803
    """One token, rounded to nearest, ties to even; a large float32 becomes infinite only then."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, PADDED)
    inside = channel < HIDDEN
    value = tl.load(states + token * stride + channel, mask=inside, other=0.0).to(tl.float32)
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    tl.store(data + token * HIDDEN + channel, rounded.to(tl.uint16), mask=inside)
    # NaN is unequal to itself and so is infinity minus infinity.
    is_broken = (value - value != 0.0) | ((rounded & 0x7F80) == 0x7F80)
    tl.store(status + token, -tl.max(is_broken.to(tl.int32), axis=0))


@triton.jit
def _normalized(
    states,
    channel_scales,
    channel,
    limit,
    HIDDEN: tl.constexpr,  # noqa: N803
    HAS_CHANNEL_SCALES: tl.constexpr,  # noqa: N803
):
    """A token's values over their channels' scales, and its status."""
    inside = channel < HIDDEN
    value = tl.load(states + channel, mask=inside, other=0.0).to(tl.float32)
    # NaN is unequal to itself and so is infinity minus infinity.
    is_broken = tl.max((value - value != 0.0).to(tl.int32), axis=0)
    num_cut = 0
    if HAS_CHANNEL_SCALES:
        channel_scale = tl.load(channel_scales + channel, mask=inside, other=1.0)
        largest = limit * channel_scale
        num_cut = tl.sum((tl.abs(value) > largest).to(tl.int32), axis=0)
        value = tl.minimum(tl.maximum(value, -largest), largest)
        value = tl.div_rn(value, channel_scale)
    return value, tl.where(is_broken > 0, NOT_FINITE, num_cut)


@triton.jit
def _encode_scaled(
    states,
    channel_scales,
    data,
    scales,
    status,
    stride,
    limit,
    smallest,
    largest_code,
    HIDDEN: tl.constexpr,  # noqa: N803
    PADDED: tl.constexpr,  # noqa: N803
    HAS_CHANNEL_SCALES: tl.constexpr,  # noqa: N803
    IS_INT8: tl.constexpr,  # noqa: N803
):
    """One token as fp8 or int8: its largest value becomes the largest code."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, PADDED)
    value, state = _normalized(
        states + token * stride, channel_scales, channel, limit, HIDDEN, HAS_CHANNEL_SCALES
    )
    tl.store(status + token, state)
    largest = tl.max(tl.abs(value), axis=0)
    scale = tl.maximum(tl.div_rn(largest, largest_code), smallest)
    tl.store(scales + token, scale)
    quotient = tl.div_rn(value, tl.broadcast_to(scale, (PADDED,)))
    # Rounding of the division can pass the largest code by one unit.
    quotient = tl.minimum(tl.maximum(quotient, -largest_code), largest_code)
    code = _round_to_integer(quotient).to(tl.int8) if IS_INT8 else _round_to_e4m3(quotient)
    tl.store(data + token * HIDDEN + channel, code, mask=channel < HIDDEN)


@triton.jit
def _round_to_integer(value):
    """Nearest integers, ties to even, below 2**22: what adding 1.5 * 2**23 leaves of a float32."""
    return (value + 12582912.0) - 12582912.0


@triton.jit
def _round_to_e4m3(value):
    """e4m3fn bits of values within +-448: nearest, ties to even, as the reference rounds them."""
    magnitude = tl.abs(value)
    bits = magnitude.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    subnormal = _round_to_integer(magnitude * 512.0).to(tl.uint32)
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    sign = (value.to(tl.uint32, bitcast=True) >> 31) << 7
    return (code | sign).to(tl.uint8)


@triton.jit
def _encode_rotated(
    states,
    channel_scales,
    data,
    scales,
    status,
    stride,
    data_stride,
    limit,
    smallest,
    factor,
    HIDDEN: tl.constexpr,  # noqa: N803
    PADDED: tl.constexpr,  # noqa: N803
    BITS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    LEVELS: tl.constexpr,  # noqa: N803
):
    """One token: butterflies, group steps under one scale, codes as bit planes."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, PADDED)
    value, state = _normalized(
        states + token * stride, channel_scales, channel, limit, HIDDEN, True
    )
    tl.store(status + token, state)
    # Lanes beyond the hidden size are zero and fill whole rotations of their own.
    for level in tl.static_range(LEVELS):
        pairs = tl.reshape(value, (PADDED // (2 << level), 2, 1 << level))
        first, second = tl.split(tl.permute(pairs, (0, 2, 1)))
        mixed = tl.join(first + second, first - second)
        value = tl.reshape(tl.permute(mixed, (0, 2, 1)), (PADDED,))
    value = value * factor
    half = 1 << (BITS - 1)
    groups = tl.reshape(value, (PADDED // GROUP, GROUP))
    step = tl.max(tl.abs(groups), axis=1) * (1.0 / half)
    scale = tl.maximum(tl.max(step, axis=0), smallest)
    tl.store(scales + token, scale)
    ratio = tl.sqrt_rn(tl.div_rn(step, tl.broadcast_to(scale, (PADDED // GROUP,))))
    step_code = tl.minimum(tl.maximum(tl.ceil(ratio * 255.0), 1.0), 255.0)
    row = data + token * data_stride
    group = tl.arange(0, PADDED // GROUP)
    step_place = row + BITS * (HIDDEN // 8) + group
    tl.store(step_place, step_code.to(tl.uint8), mask=group < HIDDEN // GROUP)
    step = step_code * step_code * tl.div_rn(scale, 65025.0)
    quotient = tl.div_rn(groups, tl.broadcast_to(step[:, None], (PADDED // GROUP, GROUP)))
    code = tl.minimum(tl.maximum(tl.floor(quotient) + half, 0.0), 2.0 * half - 1.0)
    bits_of_bytes = tl.reshape(code.to(tl.int32), (PADDED // 8, 8))
    byte = tl.arange(0, PADDED // 8)
    for plane in tl.static_range(BITS):
        shifted = ((bits_of_bytes >> plane) & 1) << tl.arange(0, 8)[None, :]
        packed = tl.sum(shifted, axis=1)
        place = row + plane * (HIDDEN // 8) + byte
        tl.store(place, packed.to(tl.uint8), mask=byte < HIDDEN // 8)
