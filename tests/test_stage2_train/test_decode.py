"""Decoding equals the store's own reference, bit for bit."""

import numpy as np
import pytest
import torch

from stage2_train.decode import LayerDecoder, decode_layer, layer_decoders
from storage.encodings import ENCODINGS, calibrate_channels, decode, encode
from storage.schema import LayerRecord


def make_states(hidden_size: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    token_size = 10.0 ** rng.integers(-3, 5, (50, 1))
    channel_size = 10.0 ** rng.integers(-1, 2, (1, hidden_size))
    return (rng.standard_normal((50, hidden_size)) * token_size * channel_size).astype(np.float32)


def encoded_and_decoder(encoding: str, hidden_size: int):
    states = make_states(hidden_size)
    scales = calibrate_channels(states) if ENCODINGS[encoding].calibrated else None
    decoder = LayerDecoder(
        encoding=encoding, channel_scales=None if scales is None else torch.from_numpy(scales)
    )
    encoded = encode(encoding, states, channel_scales=scales)
    return encoded, decoder, decode(encoding, encoded, channel_scales=scales)


@pytest.mark.parametrize("hidden_size", [16, 64, 192])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_decoding_is_the_stores_reference(encoding, hidden_size):
    encoded, decoder, expected = encoded_and_decoder(encoding, hidden_size)
    features = torch.full((50, 3 * hidden_size), torch.nan)
    decode_layer(
        decoder,
        torch.from_numpy(encoded.data),
        None if encoded.scales is None else torch.from_numpy(encoded.scales),
        out=features[:, hidden_size : 2 * hidden_size],
    )
    before, found, after = features.split(hidden_size, dim=1)
    assert torch.equal(found, torch.from_numpy(expected))
    assert before.isnan().all()
    assert after.isnan().all()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_padding_decodes_to_zero(encoding):
    encoded, decoder, _ = encoded_and_decoder(encoding, 64)
    out = torch.full((3, 64), torch.nan, dtype=torch.bfloat16)
    data = torch.zeros_like(torch.from_numpy(encoded.data[:3]))
    decode_layer(decoder, data, torch.zeros(3), out=out)
    assert (out == 0).all()


def test_decoders_take_the_scales_of_their_records():
    records = {
        "1": LayerRecord(name="1", encoding="bf16", hidden_size=2),
        "9": LayerRecord(name="9", encoding="int8", hidden_size=2, channel_scales=(0.5, 2.0)),
    }
    calibrated, plain = layer_decoders(records, ["9", "1"], torch.device("cpu"))
    assert calibrated.channel_scales.tolist() == [0.5, 2.0]
    assert plain.channel_scales is None


def test_unknown_encodings_are_refused():
    with pytest.raises(ValueError, match="cannot decode the encoding 'int5'"):
        LayerDecoder(encoding="int5")
