"""Decoding on the device equals the store's own reference, bit for bit."""

import numpy as np
import pytest
import torch

from stage2_train.decode import decode_layer
from storage.encodings import decode, encode


@pytest.mark.parametrize("encoding", ["bf16", "fp8"])
def test_decoding_is_the_stores_reference(encoding):
    rng = np.random.default_rng(0)
    states = (rng.standard_normal((50, 16)) * 10.0 ** rng.integers(-3, 5, (50, 1))).astype(
        np.float32
    )
    encoded = encode(encoding, states)
    features = torch.full((50, 48), torch.nan)
    decode_layer(
        encoding,
        torch.from_numpy(encoded.data),
        None if encoded.scales is None else torch.from_numpy(encoded.scales),
        out=features[:, 16:32],
    )
    assert torch.equal(features[:, 16:32], torch.from_numpy(decode(encoding, encoded)))
    assert features[:, :16].isnan().all()
    assert features[:, 32:].isnan().all()


@pytest.mark.parametrize("encoding", ["bf16", "fp8"])
def test_padding_decodes_to_zero(encoding):
    dtype = torch.uint16 if encoding == "bf16" else torch.uint8
    out = torch.full((3, 8), torch.nan, dtype=torch.bfloat16)
    decode_layer(encoding, torch.zeros(3, 8, dtype=dtype), torch.zeros(3), out=out)
    assert (out == 0).all()


def test_unknown_encodings_are_refused():
    with pytest.raises(ValueError, match="cannot decode the encoding 'int3'"):
        decode_layer("int3", torch.zeros(1, 8, dtype=torch.uint8), None, out=torch.zeros(1, 8))
