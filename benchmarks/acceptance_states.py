"""All states of a store in one encoding on one device, for the acceptance benchmark."""

from collections.abc import Sequence

import torch
from acceptance_table import CONTROL
from drafter_lanes import ResidentStates
from encoding_round_trips import ROUND_TRIPS

from stage1_extract.encode import channel_scales_on, encode_on_device, encode_on_host
from stage2_train.collate import EncodedLayer
from stage2_train.decode import LayerDecoder, layer_decoders
from storage.encodings import ENCODINGS, calibrate_channels
from storage.schema import LayerRecord

SCALE_TOKENS = 16_384
"""Sampled tokens from which channel scales are taken, as `store encode` does."""

_ENCODED_TOKENS = 32_768


def resident_states(
    encoding: str, states: Sequence[torch.Tensor], samples: Sequence[torch.Tensor]
) -> ResidentStates:
    """Encodes all states by the product's code; candidates are kept decoded, in bf16.

    Args:
        encoding: one name for all layers, or one for each, joined by dots.
        states: bf16 [tokens, hidden] of each layer, on the device.
        samples: tokens of each layer to calibrate on.
    """
    if encoding in ("bf16", CONTROL):
        layers = [_with_zero_row(each) for each in states]
    elif encoding.split(".")[0] in ENCODINGS:
        names = encoding.split(".")
        return _encoded(names * len(states) if len(names) == 1 else names, states, samples)
    else:
        layers = _decoded(encoding, states, samples)
    return ResidentStates(
        layers=[EncodedLayer(data=each, scales=None) for each in layers],
        decoders=[LayerDecoder(encoding="bf16")] * len(states),
    )


def _with_zero_row(part: torch.Tensor) -> torch.Tensor:
    return torch.cat([part, part.new_zeros(1, *part.shape[1:])])


def _encoded(
    names: Sequence[str], states: Sequence[torch.Tensor], samples: Sequence[torch.Tensor]
) -> ResidentStates:
    hidden_size, device = states[0].shape[1], states[0].device
    records = {}
    for number, name in enumerate(names):
        scales = None
        if ENCODINGS[name].calibrated:
            few = samples[number][:SCALE_TOKENS].float().cpu().numpy()
            scales = tuple(calibrate_channels(few).tolist())
        records[str(number)] = LayerRecord(
            name=str(number), encoding=name, hidden_size=hidden_size, channel_scales=scales
        )
    channels = channel_scales_on(device, records, list(records))
    pieces: dict[str, list[EncodedLayer]] = {name: [] for name in records}
    for start in range(0, len(states[0]), _ENCODED_TOKENS):
        part = {str(n): s[start : start + _ENCODED_TOKENS] for n, s in enumerate(states)}
        if device.type == "cuda":
            buffers = encode_on_device(part, records, channels)
            for name, found in pieces.items():
                scales_of = buffers.scales[name].clone()
                found.append(EncodedLayer(data=buffers.data[name].clone(), scales=scales_of))
        else:
            for name, encoded in encode_on_host(part, records).encoded.items():
                assert encoded.scales is not None
                data, scales_of = torch.from_numpy(encoded.data), torch.from_numpy(encoded.scales)
                pieces[name].append(EncodedLayer(data=data, scales=scales_of))
    layers = [
        EncodedLayer(
            data=_with_zero_row(torch.cat([_as_bytes(each.data) for each in found])),
            scales=_with_zero_row(
                torch.cat([each.scales for each in found if each.scales is not None])
            ),
        )
        for found in pieces.values()
    ]
    return ResidentStates(layers=layers, decoders=layer_decoders(records, list(records), device))


def _as_bytes(codes: torch.Tensor) -> torch.Tensor:
    # Not every operation knows fp8 numbers; decoding takes their bits.
    return codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes


def _decoded(
    encoding: str, states: Sequence[torch.Tensor], samples: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    round_trip = ROUND_TRIPS[encoding]([each.float() for each in samples])
    decoded = [each.new_zeros(len(each) + 1, each.shape[1]) for each in states]
    for start in range(0, len(states[0]), _ENCODED_TOKENS):
        rows = slice(start, start + _ENCODED_TOKENS)
        found = round_trip([each[rows].float() for each in states])
        for values, out in zip(found, decoded, strict=True):
            out[start : start + len(values)] = values
    return decoded
