"""The decode kernels, interpreted and on a GPU, give the reference's numbers."""

import pytest

SCRIPT = """
import sys
import numpy as np
import torch
from stage2_train.decode import LayerDecoder, plain_values
from stage2_train.decode_kernels import decode_layer_fused
from storage.encodings import ENCODINGS, calibrate_channels, decode, encode

device = sys.argv[1]
rng = np.random.default_rng(0)
shapes = ((16, 3), (192, 11), (1152, 9))
for encoding in ENCODINGS:
    # Each shape of a rotated encoding compiles a kernel for seconds on a GPU: one is enough there.
    for hidden_size, num_tokens in shapes if device == "cpu" else shapes[1:2]:
        states = rng.standard_normal((num_tokens, hidden_size)) * 10.0 ** rng.integers(
            -2, 4, (num_tokens, 1)
        )
        states = states.astype(np.float32)
        scales = calibrate_channels(states) if ENCODINGS[encoding].calibrated else None
        encoded = encode(encoding, states, channel_scales=scales)
        channel_scales = None if scales is None else torch.from_numpy(scales).to(device)
        decoder = LayerDecoder(encoding=encoding, channel_scales=channel_scales)
        features = torch.full((num_tokens, 2 * hidden_size), torch.nan, device=device)
        decode_layer_fused(
            decoder,
            torch.from_numpy(encoded.data).to(device),
            None if encoded.scales is None else torch.from_numpy(encoded.scales).to(device),
            out=features[:, hidden_size:],
        )
        expected = torch.from_numpy(decode(encoding, encoded, channel_scales=scales)).to(device)
        torch.testing.assert_close(features[:, hidden_size:], expected, rtol=1e-6, atol=0.0)
        assert features[:, :hidden_size].isnan().all()
"""


def test_kernels_give_the_references_numbers(run_script, device):
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    run_script(SCRIPT, device=device)
