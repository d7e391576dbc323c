"""How hidden states become bytes and back: specification and numpy reference.

Each encoding is one entry of ENCODINGS. All arithmetic is float32 in the order written here, so
that GPU kernels can be tested against it bit for bit. NaN and infinity are refused, never encoded.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Num, Shaped, UInt8, UInt16

from storage.errors import NonFiniteStatesError

FP8_MAX = np.float32(448.0)
"""Largest finite value of e4m3fn."""

SMALLEST_SCALE = np.float32(2.0**-126)
"""Lower bound of every token scale, so that dividing by it never overflows."""


@dataclass
class EncodedStates:
    """Hidden states of one layer of one sequence, as they are stored."""

    data: Shaped[np.ndarray, "tokens width"]
    scales: Float32[np.ndarray, " tokens"] | None = None


@dataclass(frozen=True)
class Encoding:
    """How one encoding lays out a token and turns states into bytes and back."""

    dtype: str
    """numpy type of the stored array."""
    width: Callable[[int], int]
    """Stored elements of a token, from the hidden size."""
    has_scales: bool
    """Whether each token has a float32 scale."""
    encode: Callable[[np.ndarray], EncodedStates]
    """float32 [tokens, hidden] -> EncodedStates."""
    decode: Callable[[EncodedStates], np.ndarray]
    """EncodedStates -> float32 [tokens, hidden]."""


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


def _decode_bf16(encoded: EncodedStates) -> Float32[np.ndarray, "tokens hidden"]:
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


def _decode_fp8(encoded: EncodedStates) -> Float32[np.ndarray, "tokens hidden"]:
    assert encoded.scales is not None
    return np.asarray(E4M3_VALUES[encoded.data] * encoded.scales[:, None])


ENCODINGS: dict[str, Encoding] = {
    "bf16": Encoding(
        dtype="uint16",
        width=lambda hidden_size: hidden_size,
        has_scales=False,
        encode=_encode_bf16,
        decode=_decode_bf16,
    ),
    "fp8": Encoding(
        dtype="uint8",
        width=lambda hidden_size: hidden_size,
        has_scales=True,
        encode=_encode_fp8,
        decode=_decode_fp8,
    ),
}


def encoding_named(name: str) -> Encoding:
    """The entry of ENCODINGS, or ValueError listing the names there are."""
    if name not in ENCODINGS:
        raise ValueError(f"unknown encoding {name!r}; expected one of {', '.join(ENCODINGS)}")
    return ENCODINGS[name]


def encode(encoding: str, states: Num[np.ndarray, "tokens hidden"]) -> EncodedStates:
    """Encodes hidden states of one layer.

    Args:
        encoding: a name in ENCODINGS.
        states: float32, or bfloat16 bits as uint16, [tokens, hidden].

    Raises:
        NonFiniteStatesError: a state is NaN or infinite (or overflows on rounding).
    """
    wide = bf16_to_float32(states) if states.dtype == np.uint16 else states.astype(np.float32)
    finite = np.isfinite(wide)
    if not finite.all():
        token = int(np.argmin(finite.all(axis=1)))
        raise NonFiniteStatesError(f"hidden state at token {token} holds NaN or infinity")
    return encoding_named(encoding).encode(wide)


def decode(encoding: str, encoded: EncodedStates) -> Float32[np.ndarray, "tokens hidden"]:
    """float32 values of encoded states, [tokens, hidden]."""
    return encoding_named(encoding).decode(encoded)


def encoded_bytes_per_token(encoding: str, hidden_size: int) -> int:
    """Bytes that one token of one layer takes, its scale included."""
    entry = encoding_named(encoding)
    return entry.width(hidden_size) * np.dtype(entry.dtype).itemsize + 4 * entry.has_scales
