"""Encode: hidden states to the bytes of the store, on the device where they are.

On a GPU the kernels of `encode_kernels` do it and only the small form is copied to the host; on
the CPU it is the numpy reference itself. The bits are the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int32, Shaped
from numpy import ndarray
from torch import Tensor

from storage.encodings import EncodedStates, encode, encoding_named
from storage.errors import NonFiniteStatesError
from storage.schema import LayerRecord

NOT_FINITE = -1
"""Status of a token with NaN or infinity; else the number of its values that were cut."""


@dataclass(frozen=True, kw_only=True)
class EncodedBatch:
    """Encoded states of a batch on the host, sequences end to end, all layers."""

    encoded: Mapping[str, EncodedStates]
    """By layer name."""
    status: Mapping[str, Int32[ndarray, "tokens"]]
    """By layer name: `NOT_FINITE`, or how many of a token's values were cut."""

    def broken_layer(self, tokens: slice) -> str | None:
        """The first layer with NaN or infinity in a range of tokens."""
        broken = (name for name, each in self.status.items() if each[tokens].min() == NOT_FINITE)
        return next(broken, None)

    def num_saturated(self, tokens: slice) -> int:
        """Values in a range of tokens that lay beyond what their encoding can hold."""
        return sum(self.saturated_by_layer(tokens).values())

    def saturated_by_layer(self, tokens: slice) -> dict[str, int]:
        """The same by layer name."""
        return {name: int(np.maximum(each[tokens], 0).sum()) for name, each in self.status.items()}

    def of(self, tokens: slice) -> dict[str, EncodedStates]:
        """The encoded states of a range of tokens by layer; views, nothing is copied."""
        return {
            name: EncodedStates(
                each.data[tokens], None if each.scales is None else each.scales[tokens]
            )
            for name, each in self.encoded.items()
        }


def encode_on_host(
    states: Mapping[str, Float[Tensor, "tokens hidden"]], layers: Mapping[str, LayerRecord]
) -> EncodedBatch:
    """Encodes a batch with the reference; tokens that are not finite become zeros with a status."""
    encoded, status = {}, {}
    for name, record in layers.items():
        values = states[name].detach().contiguous()
        is_finite = torch.isfinite(values).all(dim=-1)
        values = torch.where(is_finite[:, None], values, 0.0)
        is_bf16 = values.dtype == torch.bfloat16
        host = values.view(torch.uint16).numpy() if is_bf16 else values.float().numpy()
        layer_status = np.where(is_finite.numpy(), 0, NOT_FINITE).astype(np.int32)
        encoded[name] = _encode_reference(record, host, layer_status)
        status[name] = layer_status
    return EncodedBatch(encoded=encoded, status=status)


def _encode_reference(
    record: LayerRecord,
    states: Shaped[ndarray, "tokens hidden"],
    status: Int32[ndarray, "tokens"],
) -> EncodedStates:
    """The reference's bytes; a token that overflows on rounding gets its status and is zeroed."""
    scales = record.channel_scale_array
    try:
        return encode(record.encoding, states, channel_scales=scales)
    except NonFiniteStatesError:
        limit = torch.finfo(torch.bfloat16).max
        status[np.abs(states).max(axis=1) > limit] = NOT_FINITE
        finite = np.where(status[:, None] == NOT_FINITE, np.float32(0), states)
        return encode(record.encoding, finite, channel_scales=scales)


@dataclass
class DeviceBuffers:
    """Memory for the encoded form of one batch on one device, all layers in one piece."""

    whole: Shaped[Tensor, "bytes"]
    data: dict[str, Shaped[Tensor, "tokens width"]] = field(default_factory=dict)
    scales: dict[str, Float[Tensor, "tokens"]] = field(default_factory=dict)
    status: dict[str, Int32[Tensor, "tokens"]] = field(default_factory=dict)


_TORCH_DTYPES = {
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
_ALIGNMENT_BYTES = 256


def buffer_bytes(layers: Mapping[str, LayerRecord], num_tokens: int) -> int:
    """Bytes that the encoded form of a batch takes."""
    return sum(_aligned(num_tokens * row) for record in layers.values() for row in _rows(record))


def _rows(record: LayerRecord) -> tuple[int, int, int]:
    """Bytes of one token's data, scale and status."""
    entry = encoding_named(record.encoding)
    width_bytes = entry.width(record.hidden_size) * np.dtype(entry.dtype).itemsize
    return width_bytes, 4, 4


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def divide(
    whole: Shaped[Tensor, "bytes"], layers: Mapping[str, LayerRecord], num_tokens: int
) -> DeviceBuffers:
    """Lays a batch's arrays out in a piece of memory: the same on the device and on the host."""
    buffers = DeviceBuffers(whole[: buffer_bytes(layers, num_tokens)])
    start = 0

    def take(row_bytes: int, dtype: torch.dtype) -> Tensor:
        nonlocal start
        part = whole[start : start + num_tokens * row_bytes].view(dtype)
        start += _aligned(num_tokens * row_bytes)
        return part

    for name, record in layers.items():
        data_bytes, scale_bytes, status_bytes = _rows(record)
        dtype = _TORCH_DTYPES.get(record.encoding, torch.uint8)
        buffers.data[name] = take(data_bytes, dtype).view(num_tokens, -1)
        buffers.scales[name] = take(scale_bytes, torch.float32)
        buffers.status[name] = take(status_bytes, torch.int32)
    return buffers


def as_batch(buffers: DeviceBuffers, layers: Mapping[str, LayerRecord]) -> EncodedBatch:
    """Buffers on the host as the arrays that a shard takes; views, nothing is copied."""
    encoded = {}
    for name, record in layers.items():
        entry = encoding_named(record.encoding)
        bits = buffers.data[name].view(getattr(torch, entry.dtype)).numpy()
        scales = buffers.scales[name].numpy() if entry.has_scales else None
        encoded[name] = EncodedStates(bits, scales)
    status = {name: each.numpy() for name, each in buffers.status.items()}
    return EncodedBatch(encoded=encoded, status=status)


def encode_on_device(
    states: Mapping[str, Float[Tensor, "tokens hidden"]],
    layers: Mapping[str, LayerRecord],
    channel_scales: Mapping[str, Float[Tensor, "hidden"] | None],
) -> DeviceBuffers:
    """Encodes a batch with the kernels into fresh memory on its device, without waiting.

    Args:
        states: By layer name, on a GPU.
        layers: The layer records.
        channel_scales: By layer name on the same device; None where there are none.
    """
    from stage1_extract.encode_kernels import encode_layer

    first = next(iter(states.values()))
    num_bytes = buffer_bytes(layers, len(first))
    whole = torch.empty(num_bytes, dtype=torch.uint8, device=first.device)
    buffers = divide(whole, layers, len(first))
    for name, record in layers.items():
        encode_layer(
            record.encoding,
            states[name],
            channel_scales=channel_scales[name],
            data=buffers.data[name],
            scales=buffers.scales[name],
            status=buffers.status[name],
        )
    return buffers


def channel_scales_on(
    device: str | torch.device, layers: Mapping[str, LayerRecord], names: Sequence[str]
) -> dict[str, Float[Tensor, "hidden"] | None]:
    """The layers' channel scales on a device."""
    scales = {name: layers[name].channel_scale_array for name in names}
    return {
        name: None if each is None else torch.from_numpy(each).to(device)
        for name, each in scales.items()
    }
