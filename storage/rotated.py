"""Two to four bits a channel: Hadamard rotation, group scales, bit planes.

A row of one token holds `bits` planes of `hidden / 8` bytes, then one scale code per group.
Plane p holds bit p of each channel's code, channel 8 * j + i in bit i of byte j.
"""

import math

import numpy as np
from jaxtyping import Float32, UInt8

ROTATION_CHANNELS = 64
"""Channels mixed by one rotation, fewer if the hidden size has no such factor."""

SMALLEST_STEP = np.float32(2.0**-100)
"""Lower bound of a token's scale: its 65,025th part is still a normal number."""

_CODE_SQUARES = np.float32(255.0**2)


def rotation_size(hidden_size: int) -> int:
    """Channels of one rotation: the largest power of two up to 64 that divides the hidden size."""
    if hidden_size % 8:
        raise ValueError(
            f"int4, int3 and int2 need a hidden size divisible by 8, got {hidden_size}; keep the"
            ' states in another encoding, for example store.encoding = "int8"'
        )
    return math.gcd(hidden_size, ROTATION_CHANNELS)


def group_size(hidden_size: int, group_channels: int) -> int:
    """Channels that share a scale: `group_channels`, at most one rotation."""
    return min(group_channels, rotation_size(hidden_size))


def row_bytes(hidden_size: int, *, bits: int, group_channels: int) -> int:
    """Bytes of one token: bit planes and scale codes."""
    return hidden_size // 8 * bits + hidden_size // group_size(hidden_size, group_channels)


def rotate(values: Float32[np.ndarray, "tokens hidden"]) -> Float32[np.ndarray, "tokens hidden"]:
    """Multiplies each run of channels with the orthonormal Walsh-Hadamard matrix.

    Spreads single large channels over their run; applied twice it gives its input back.
    """
    size = rotation_size(values.shape[1])
    mixed = values.reshape(len(values), -1, size)
    half = 1
    while half < size:
        pairs = mixed.reshape(len(values), -1, 2, half)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        mixed = np.stack([first + second, first - second], axis=2)
        half *= 2
    return np.asarray(mixed.reshape(values.shape) * np.float32(1 / math.sqrt(size)))


def encode_rotated(
    values: Float32[np.ndarray, "tokens hidden"], *, bits: int, group_channels: int
) -> tuple[UInt8[np.ndarray, "tokens bytes"], Float32[np.ndarray, " tokens"]]:
    """Rows of bit planes and scale codes, and the token scales, of channel-normalized states.

    A code k of 0..2**bits-1 stands for (k - 2**(bits-1) + 0.5) * step: no code is lost on the
    sign, and the largest value of a group errs by half a step as every other does. A group's
    step is the token's scale times the square of its scale code / 255, rounded up.
    """
    half = np.float32(2 ** (bits - 1))
    groups = _grouped(rotate(values), group_channels)
    steps = np.abs(groups).max(axis=2) / half
    scales = np.maximum(steps.max(axis=1), SMALLEST_STEP)
    ratio = np.sqrt(steps / scales[:, None])
    scale_codes = np.clip(np.ceil(ratio * np.float32(255)), 1, 255).astype(np.uint8)
    steps = group_steps(scale_codes, scales)
    codes = np.clip(np.floor(groups / steps[:, :, None]) + half, 0, 2 * half - 1)
    planes = _to_planes(codes.reshape(values.shape).astype(np.uint8), bits)
    return np.concatenate([planes, scale_codes], axis=1), scales


def decode_rotated(
    rows: UInt8[np.ndarray, "tokens bytes"],
    scales: Float32[np.ndarray, " tokens"],
    *,
    hidden_size: int,
    bits: int,
    group_channels: int,
) -> Float32[np.ndarray, "tokens hidden"]:
    """Channel-normalized states back from rows and token scales."""
    plane_bytes = hidden_size // 8 * bits
    codes = _from_planes(rows[:, :plane_bytes], bits).astype(np.float32)
    centered = codes - np.float32(2 ** (bits - 1)) + np.float32(0.5)
    steps = group_steps(rows[:, plane_bytes:], scales)
    groups = _grouped(centered, group_channels) * steps[:, :, None]
    return rotate(groups.reshape(len(rows), hidden_size))


def group_steps(
    scale_codes: UInt8[np.ndarray, "tokens groups"], scales: Float32[np.ndarray, " tokens"]
) -> Float32[np.ndarray, "tokens groups"]:
    """The distance of neighbouring codes in each group."""
    squares = scale_codes.astype(np.float32) ** 2
    return np.asarray(squares * (scales / _CODE_SQUARES)[:, None])


def _grouped(
    values: Float32[np.ndarray, "tokens hidden"], group_channels: int
) -> Float32[np.ndarray, "tokens groups channels"]:
    size = group_size(values.shape[1], group_channels)
    return values.reshape(len(values), -1, size)


def _to_planes(
    codes: UInt8[np.ndarray, "tokens hidden"], bits: int
) -> UInt8[np.ndarray, "tokens plane_bytes"]:
    planes = [np.packbits((codes >> p) & 1, axis=1, bitorder="little") for p in range(bits)]
    return np.concatenate(planes, axis=1)


def _from_planes(
    planes: UInt8[np.ndarray, "tokens plane_bytes"], bits: int
) -> UInt8[np.ndarray, "tokens hidden"]:
    parts = np.split(planes, bits, axis=1)
    unpacked = [np.unpackbits(part, axis=1, bitorder="little") for part in parts]
    return np.asarray(sum(bit << p for p, bit in enumerate(unpacked)), dtype=np.uint8)
