"""How hidden states become bytes and back: specification and numpy reference.

Each encoding is one entry of ENCODINGS. All arithmetic is float32 in the order written here, so
that GPU kernels can be tested against it bit for bit. NaN and infinity are refused, never encoded.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Num, Shaped, UInt8, UInt16

from storage.errors import NonFiniteStatesError
from storage.rotated import decode_rotated, encode_rotated, row_bytes
from storage.schema import LM_HEAD_INPUT

FP8_MAX = np.float32(448.0)
"""Largest finite value of e4m3fn."""

INT8_MAX = np.float32(127.0)
"""Largest code of int8, so that both signs have as many."""

LARGEST_NORMALIZED = np.float32(2.0**100)
"""Where channel-normalized states saturate, far above any real one, so that nothing overflows."""

SMALLEST_SCALE = np.float32(2.0**-126)
"""Lower bound of every token scale, so that dividing by it never overflows."""


@dataclass
class EncodedStates:
    """Hidden states of one layer of one sequence, as they are stored."""

    data: Shaped[np.ndarray, "tokens width"]
    scales: Float32[np.ndarray, " tokens"] | None = None


ChannelScales = Float32[np.ndarray, " hidden"]
"""Static scale of each channel: states divided by it have channels of like size."""


@dataclass(frozen=True)
class Encoding:
    """How one encoding lays out a token and turns states into bytes and back."""

    dtype: str
    """numpy type of the stored array."""
    width: Callable[[int], int]
    """Stored elements of a token, from the hidden size."""
    has_scales: bool
    """Whether each token has a float32 scale."""
    calibrated: bool
    """Whether it needs channel scales, kept in the layer record."""
    encode: Callable[[np.ndarray], EncodedStates]
    """float32 [tokens, hidden] -> EncodedStates; channel-normalized states if calibrated."""
    decode: Callable[[EncodedStates, int], np.ndarray]
    """EncodedStates and hidden size -> float32 [tokens, hidden], normalized likewise."""


def bf16_to_float32(bits: UInt16[np.ndarray, "*shape"]) -> Float32[np.ndarray, "*shape"]:
    """The exact float32 value of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bf16(states: Float32[np.ndarray, "*shape"]) -> UInt16[np.ndarray, "*shape"]:
    """bfloat16 bits of finite values, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(states).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _encode_bf16(states: Float32[np.ndarray, "tokens hidden"]) -> EncodedStates:
    bits = float32_to_bf16(states)
    if np.any((bits & 0x7F80) == 0x7F80):
        raise NonFiniteStatesError("hidden states overflow bfloat16 when rounded")
    return EncodedStates(data=bits)


def _decode_bf16(encoded: EncodedStates, hidden_size: int) -> Float32[np.ndarray, "tokens hidden"]:
    return bf16_to_float32(encoded.data)


def float32_to_e4m3(values: Float32[np.ndarray, "*shape"]) -> UInt8[np.ndarray, "*shape"]:
    """e4m3fn bits of values, clamped to +-448, rounded to nearest, ties to even."""
    magnitude = np.minimum(np.abs(values), FP8_MAX)
    bits = magnitude.view(np.uint32)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - np.uint32((127 - 7) << 3)
    subnormal = np.rint(magnitude * np.float32(2.0**9)).astype(np.uint32)
    code = np.where(magnitude < np.float32(2.0**-6), subnormal, normal).astype(np.uint8)
    return np.asarray(np.where(np.signbit(values), code | 128, code), dtype=np.uint8)


def _e4m3_values() -> Float32[np.ndarray, "256"]:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = np.where(
        exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)
    )
    magnitude[(code & 127) == 127] = np.nan
    return np.where(code < 128, magnitude, -magnitude).astype(np.float32)


E4M3_VALUES = _e4m3_values()
"""float32 value of each e4m3fn code."""


def token_scales(
    states: Float32[np.ndarray, "tokens hidden"], largest: np.float32
) -> Float32[np.ndarray, " tokens"]:
    """Scale of each token: its largest magnitude becomes `largest`."""
    largest_magnitude = np.abs(states).max(axis=1)
    return np.asarray(np.maximum(largest_magnitude / largest, SMALLEST_SCALE))


def _encode_fp8(states: Float32[np.ndarray, "tokens hidden"]) -> EncodedStates:
    scales = token_scales(states, FP8_MAX)
    return EncodedStates(data=float32_to_e4m3(states / scales[:, None]), scales=scales)


def _decode_fp8(encoded: EncodedStates, hidden_size: int) -> Float32[np.ndarray, "tokens hidden"]:
    assert encoded.scales is not None
    return np.asarray(E4M3_VALUES[encoded.data] * encoded.scales[:, None])


def _encode_int8(states: Float32[np.ndarray, "tokens hidden"]) -> EncodedStates:
    scales = token_scales(states, INT8_MAX)
    codes = np.clip(np.rint(states / scales[:, None]), -INT8_MAX, INT8_MAX)
    return EncodedStates(data=codes.astype(np.int8), scales=scales)


def _decode_int8(encoded: EncodedStates, hidden_size: int) -> Float32[np.ndarray, "tokens hidden"]:
    assert encoded.scales is not None
    return np.asarray(encoded.data.astype(np.float32) * encoded.scales[:, None])


def _rotated(bits: int, group_channels: int) -> Encoding:
    layout = {"bits": bits, "group_channels": group_channels}

    def decode_rows(encoded: EncodedStates, hidden_size: int) -> np.ndarray:
        assert encoded.scales is not None
        return decode_rotated(encoded.data, encoded.scales, hidden_size=hidden_size, **layout)

    return Encoding(
        dtype="uint8",
        width=lambda hidden_size: row_bytes(hidden_size, **layout),
        has_scales=True,
        calibrated=True,
        encode=lambda states: EncodedStates(*encode_rotated(states, **layout)),
        decode=decode_rows,
    )


def _one_element_per_channel(hidden_size: int) -> int:
    return hidden_size


ENCODINGS: dict[str, Encoding] = {
    "bf16": Encoding(
        dtype="uint16",
        width=_one_element_per_channel,
        has_scales=False,
        calibrated=False,
        encode=_encode_bf16,
        decode=_decode_bf16,
    ),
    "fp8": Encoding(
        dtype="uint8",
        width=_one_element_per_channel,
        has_scales=True,
        calibrated=False,
        encode=_encode_fp8,
        decode=_decode_fp8,
    ),
    "int8": Encoding(
        dtype="int8",
        width=_one_element_per_channel,
        has_scales=True,
        calibrated=True,
        encode=_encode_int8,
        decode=_decode_int8,
    ),
    "int4": _rotated(bits=4, group_channels=32),
    "int3": _rotated(bits=3, group_channels=64),
    "int2": _rotated(bits=2, group_channels=64),
}


FEWER_BITS = ("int4", "int3", "int2")
"""Encodings fit for what a drafter reads, but not for what distributions are made from."""


def encoding_of_layer(layer: str, encoding: str) -> str:
    """The encoding of one layer of a store that is kept in `encoding`.

    With few bits `lm_head_input` stays at eight: in four, 7% of the target's most probable tokens
    would be others when the head makes its distribution from the stored state, in eight 1%.
    """
    return "int8" if layer == LM_HEAD_INPUT and encoding in FEWER_BITS else encoding


def encodings_for(hidden_size: int) -> list[str]:
    """Names of the encodings that can keep states of this width: few bits go by eight channels."""
    return [name for name in ENCODINGS if hidden_size % 8 == 0 or name not in FEWER_BITS]


def encoding_named(name: str) -> Encoding:
    """The entry of ENCODINGS, or ValueError listing the names there are."""
    if name not in ENCODINGS:
        raise ValueError(f"unknown encoding {name!r}; expected one of {', '.join(ENCODINGS)}")
    return ENCODINGS[name]


def calibrate_channels(samples: Float32[np.ndarray, "tokens hidden"]) -> ChannelScales:
    """Channel scales from some thousand tokens: root mean square of each channel's share.

    Each token is first divided by its own root mean square, so that sink tokens, thousands of
    times larger than the rest, do not decide the scales. A channel that is (almost) silent gets
    1e-4, for a scale of zero would divide by it.
    """
    sizes = np.sqrt(np.mean(samples.astype(np.float64) ** 2, axis=1, keepdims=True))
    shares = samples / np.maximum(sizes, 1e-30)
    return np.asarray(np.maximum(np.sqrt(np.mean(shares**2, axis=0)), 1e-4), dtype=np.float32)


def encode(
    encoding: str,
    states: Num[np.ndarray, "tokens hidden"],
    *,
    channel_scales: ChannelScales | None = None,
) -> EncodedStates:
    """Encodes hidden states of one layer.

    Args:
        encoding: a name in ENCODINGS.
        states: float32, or bfloat16 bits as uint16, [tokens, hidden].
        channel_scales: of the layer record, for calibrated encodings.

    Raises:
        NonFiniteStatesError: a state is NaN or infinite (or overflows on rounding).
    """
    entry = encoding_named(encoding)
    wide = bf16_to_float32(states) if states.dtype == np.uint16 else states.astype(np.float32)
    finite = np.isfinite(wide)
    if not finite.all():
        token = int(np.argmin(finite.all(axis=1)))
        raise NonFiniteStatesError(f"hidden state at token {token} holds NaN or infinity")
    if entry.calibrated:
        limit = LARGEST_NORMALIZED * _needed(encoding, channel_scales)
        wide = np.clip(wide, -limit, limit) / _needed(encoding, channel_scales)
    return entry.encode(wide)


def decode(
    encoding: str,
    encoded: EncodedStates,
    *,
    channel_scales: ChannelScales | None = None,
) -> Float32[np.ndarray, "tokens hidden"]:
    """float32 values of encoded states, [tokens, hidden].

    Args:
        encoding: a name in ENCODINGS.
        encoded: as stored.
        channel_scales: of the layer record, for calibrated encodings.
    """
    entry = encoding_named(encoding)
    if not entry.calibrated:
        return entry.decode(encoded, encoded.data.shape[1])
    scales = _needed(encoding, channel_scales)
    return np.asarray(entry.decode(encoded, len(scales)) * scales)


def _needed(encoding: str, channel_scales: ChannelScales | None) -> ChannelScales:
    if channel_scales is None:
        raise ValueError(f"encoding {encoding} needs the channel scales of the layer record")
    return channel_scales


def encoded_bytes_per_token(encoding: str, hidden_size: int) -> int:
    """Bytes that one token of one layer takes, its scale included."""
    entry = encoding_named(encoding)
    return entry.width(hidden_size) * np.dtype(entry.dtype).itemsize + 4 * entry.has_scales
