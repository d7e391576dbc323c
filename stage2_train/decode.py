"""Turns stored hidden states back into numbers, in the layout the drafter's `fc` reads.

The arithmetic is fp32 in the order of `storage.encodings`, the reference, so the numbers are its
own up to the rounding to the drafter's type. On a GPU one kernel a layer does it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Shaped, UInt8
from torch import Tensor

from storage.rotated import group_size, rotation_size
from storage.schema import LayerRecord

# Bits and channels of a group of the rotated encodings, as `storage.encodings` lays them out.
ROTATED = {"int4": (4, 32), "int3": (3, 64), "int2": (2, 64)}
SCALED = ("fp8", "int8")


@dataclass(frozen=True, kw_only=True)
class LayerDecoder:
    """How one stored layer is decoded, with its scales on the drafter's device."""

    encoding: str
    channel_scales: Float32[Tensor, "hidden"] | None = None

    def __post_init__(self) -> None:
        """Refuses what stage 2 cannot decode."""
        known = ("bf16", *SCALED, *ROTATED)
        if self.encoding not in known:
            raise ValueError(
                f"stage 2 cannot decode the encoding {self.encoding!r}; "
                f"expected one of {', '.join(known)}"
            )


def layer_decoders(
    records: Mapping[str, LayerRecord], names: Sequence[str], device: torch.device
) -> tuple[LayerDecoder, ...]:
    """Makes the decoders of some layers of a store, in the order of their names."""
    return tuple(
        LayerDecoder(
            encoding=records[name].encoding,
            channel_scales=None
            if (scales := records[name].channel_scales) is None
            else torch.tensor(scales, dtype=torch.float32, device=device),
        )
        for name in names
    )


def decode_layer(
    decoder: LayerDecoder,
    data: Shaped[Tensor, "tokens width"],
    scales: Float32[Tensor, "tokens"] | None,
    *,
    out: Float[Tensor, "tokens hidden"],
) -> None:
    """Decodes one layer into `out`, a slice of the batch's features; zero scales give zeros.

    Args:
        decoder: how the layer is stored.
        data: stored numbers, as the store keeps them.
        scales: scale of each token, for encodings that have one.
        out: place of the decoded states, of the drafter's type.
    """
    if out.is_cuda:
        # Imported here, for a CPU needs no Triton.
        from stage2_train.decode_kernels import decode_layer_fused

        decode_layer_fused(decoder, data, scales, out=out)
    else:
        out.copy_(plain_values(decoder, data, scales, hidden_size=out.shape[1]))


def plain_values(
    decoder: LayerDecoder,
    data: Shaped[Tensor, "tokens width"],
    scales: Float32[Tensor, "tokens"] | None,
    *,
    hidden_size: int,
) -> Float[Tensor, "tokens hidden"]:
    """Gives the decoded states by plain operations."""
    if decoder.encoding == "bf16":
        return data.view(torch.bfloat16)
    assert scales is not None
    if decoder.encoding in ROTATED:
        values = rotated_values(decoder.encoding, data, scales, hidden_size=hidden_size)
    else:
        stored = data.view(torch.float8_e4m3fn) if decoder.encoding == "fp8" else data
        values = stored.to(torch.float32) * scales[:, None]
    return values if decoder.channel_scales is None else values * decoder.channel_scales


def rotated_values(
    encoding: str,
    rows: UInt8[Tensor, "tokens width"],
    scales: Float32[Tensor, "tokens"],
    *,
    hidden_size: int,
) -> Float32[Tensor, "tokens hidden"]:
    """Gives channel-normalized states back from bit planes and group scales."""
    bits, group_channels = ROTATED[encoding]
    plane_bytes = hidden_size // 8
    planes = rows[:, : bits * plane_bytes].unflatten(1, (bits, plane_bytes))
    shifts = torch.arange(8, dtype=torch.uint8, device=rows.device)
    bit = planes[..., None].bitwise_right_shift(shifts).bitwise_and(1).flatten(2)
    codes = sum(bit[:, plane].to(torch.float32) * 2**plane for plane in range(bits))
    centered = codes - 2 ** (bits - 1) + 0.5
    steps = rows[:, bits * plane_bytes :].to(torch.float32).square() * (scales / 255.0**2)[:, None]
    channels = group_size(hidden_size, group_channels)
    return _unrotate((centered.unflatten(1, (-1, channels)) * steps[..., None]).flatten(1))


def _unrotate(values: Float32[Tensor, "tokens hidden"]) -> Float32[Tensor, "tokens hidden"]:
    size = rotation_size(values.shape[1])
    half = 1
    while half < size:
        first, second = values.unflatten(1, (-1, 2, half)).unbind(dim=2)
        values = torch.stack((first + second, first - second), dim=2).flatten(1)
        half *= 2
    # A power of two or its root: the factor of the reference, rounded to fp32 as there.
    return values * torch.tensor(1 / math.sqrt(size), dtype=torch.float32, device=values.device)
