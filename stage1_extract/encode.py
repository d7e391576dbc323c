"""Encode: hidden states to the bytes of the store, on the device where they are.

The bits are those of the numpy reference in `storage.encodings`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from storage.encodings import FP8_MAX, SMALLEST_SCALE, EncodedStates
from storage.schema import LayerRecord


@dataclass(frozen=True)
class EncodedTensors:
    """Encoded states of one layer, still on the device."""

    data: Shaped[Tensor, "tokens width"]
    """bf16: the values; fp8: float8_e4m3fn."""
    scales: Float[Tensor, "tokens"] | None
    is_finite: Bool[Tensor, "tokens"]
    """False where a state is NaN or infinite; such a token must not be stored."""

    def to_host(self) -> EncodedStates:
        """The same as numpy arrays of bits."""
        bits = torch.uint16 if self.data.dtype == torch.bfloat16 else torch.uint8
        data = self.data.contiguous().view(bits).cpu().numpy()
        return EncodedStates(data, None if self.scales is None else self.scales.cpu().numpy())


def encode_states(encoding: str, states: Float[Tensor, "tokens hidden"]) -> EncodedTensors:
    """Encodes hidden states of one layer.

    Raises:
        ValueError: There is no such encoding.
    """
    if encoding not in _ENCODERS:
        raise ValueError(f"unknown encoding {encoding!r}; expected one of {', '.join(_ENCODERS)}")
    return _ENCODERS[encoding](states)


class EncodedBatch:
    """Encoded states of a batch on the host, sequences end to end, all layers."""

    def __init__(
        self,
        states: Mapping[str, Float[Tensor, "tokens hidden"]],
        layers: Mapping[str, LayerRecord],
    ):
        """Encodes each layer once and copies it to the host."""
        encoded = {name: encode_states(layers[name].encoding, states[name]) for name in layers}
        self._is_finite = {name: each.is_finite.cpu().numpy() for name, each in encoded.items()}
        self._encoded = {name: each.to_host() for name, each in encoded.items()}

    def broken_layer(self, tokens: slice) -> str | None:
        """The first layer with NaN or infinity in a range of tokens."""
        broken = (name for name, each in self._is_finite.items() if not each[tokens].all())
        return next(broken, None)

    def of(self, tokens: slice) -> dict[str, EncodedStates]:
        """The encoded states of a range of tokens by layer; views, nothing is copied."""
        return {
            name: EncodedStates(
                each.data[tokens], None if each.scales is None else each.scales[tokens]
            )
            for name, each in self._encoded.items()
        }


def _encode_bf16(states: Float[Tensor, "tokens hidden"]) -> EncodedTensors:
    data = states.to(torch.bfloat16)
    # Checked after rounding: a large float32 becomes infinite only then.
    return EncodedTensors(data, None, torch.isfinite(data).all(dim=-1))


def _encode_fp8(states: Float[Tensor, "tokens hidden"]) -> EncodedTensors:
    wide = states.float()
    largest = wide.abs().amax(dim=-1)
    # A tensor on the device: CUDA divides by a Python number through its rounded reciprocal.
    fp8_max = torch.full((), float(FP8_MAX), device=wide.device)
    scales = (largest / fp8_max).clamp(min=float(SMALLEST_SCALE))
    # Rounding of the division can pass 448 by one unit, and a cast beyond it would give NaN.
    quotients = (wide / scales[:, None]).clamp(-float(FP8_MAX), float(FP8_MAX))
    # NaN and infinity both survive `amax`, so one flag per token tells.
    return EncodedTensors(quotients.to(torch.float8_e4m3fn), scales, torch.isfinite(largest))


_ENCODERS: dict[str, Callable[[Tensor], EncodedTensors]] = {
    "bf16": _encode_bf16,
    "fp8": _encode_fp8,
}
