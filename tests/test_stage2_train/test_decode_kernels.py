"""The decode kernels, run by Triton's interpreter, give the reference's numbers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = """
import sys
import numpy as np
import torch
from stage2_train.decode import LayerDecoder, plain_values
from stage2_train.decode_kernels import decode_layer_fused
from storage.encodings import ENCODINGS, calibrate_channels, decode, encode

rng = np.random.default_rng(0)
for encoding in ENCODINGS:
    for hidden_size, num_tokens in ((16, 3), (192, 11), (1152, 9)):
        states = rng.standard_normal((num_tokens, hidden_size)) * 10.0 ** rng.integers(
            -2, 4, (num_tokens, 1)
        )
        states = states.astype(np.float32)
        scales = calibrate_channels(states) if ENCODINGS[encoding].calibrated else None
        encoded = encode(encoding, states, channel_scales=scales)
        decoder = LayerDecoder(
            encoding=encoding, channel_scales=None if scales is None else torch.from_numpy(scales)
        )
        features = torch.full((num_tokens, 2 * hidden_size), torch.nan)
        decode_layer_fused(
            decoder,
            torch.from_numpy(encoded.data),
            None if encoded.scales is None else torch.from_numpy(encoded.scales),
            out=features[:, hidden_size:],
        )
        expected = torch.from_numpy(decode(encoding, encoded, channel_scales=scales))
        torch.testing.assert_close(features[:, hidden_size:], expected, rtol=1e-6, atol=0.0)
        assert features[:, :hidden_size].isnan().all()
        print(encoding, hidden_size)
"""


def test_kernels_give_the_references_numbers():
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    # A process of its own, for the interpreter is chosen when the kernels are defined.
    run = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == 18
