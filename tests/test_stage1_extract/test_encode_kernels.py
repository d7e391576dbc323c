"""The encode kernels, interpreted and on a GPU, give the reference's bits."""

from collections.abc import Callable

import pytest

SCRIPT = """
import sys
import numpy as np
import torch
from stage1_extract.encode import (
    NOT_FINITE, as_batch, channel_scales_on, divide, encode_on_device, encode_on_host
)
from storage.encodings import ENCODINGS, calibrate_channels, encode
from storage.schema import LayerRecord

device = sys.argv[1]
EDGES = [0.0, -0.0, 1.0, 447.9, 448.0, 449.0, 0.0009765625, 0.00146484375, 1e-30, 3e4, -1e5]
rng = np.random.default_rng(0)

def encoded_by_kernel(record, states):
    layers = {"0": record}
    scales = channel_scales_on(device, layers, ["0"])
    on_device = encode_on_device({"0": states.to(device)}, layers, scales)
    host = divide(on_device.whole.cpu(), layers, len(states))
    return as_batch(host, layers)

def check(record, states):
    batch = encoded_by_kernel(record, states)
    raw = states.view(torch.uint16).numpy() if states.dtype == torch.bfloat16 else states.numpy()
    expected = encode(record.encoding, raw, channel_scales=record.channel_scale_array)
    found = batch.encoded["0"]
    assert found.data.dtype == expected.data.dtype
    if expected.scales is not None:
        np.testing.assert_array_equal(found.scales, expected.scales)
    np.testing.assert_array_equal(found.data, expected.data)
    assert (batch.status["0"] == 0).all() and batch.num_saturated(slice(None)) == 0
    return batch

for encoding, entry in ENCODINGS.items():
    for hidden_size, num_tokens in ((16, 3), (48, 7), (192, 11), (1152, 9), (4096, 5)):
        states = rng.standard_normal((num_tokens, hidden_size)) * 10.0 ** rng.integers(
            -6, 6, (num_tokens, 1)
        )
        states = states.astype(np.float32)
        states[0, : len(EDGES)] = EDGES
        states[1] = 0.0
        scales = None
        if entry.calibrated:
            scales = tuple(float(each) for each in calibrate_channels(states[2:]))
        record = LayerRecord(
            name="0", encoding=encoding, hidden_size=hidden_size, channel_scales=scales
        )
        for dtype in (torch.float32, torch.bfloat16):
            check(record, torch.from_numpy(states).to(dtype))
        # Rows apart from each other, as in a row of fixed length.
        wide = torch.from_numpy(np.concatenate([states, states], axis=1))
        check(record, wide[:, :hidden_size])
        for bad in (np.nan, np.inf, -np.inf):
            broken = torch.from_numpy(states.copy())
            broken[2, 5] = bad
            batch = encoded_by_kernel(record, broken)
            on_host = encode_on_host({"0": broken}, {"0": record})
            expected = [0] * num_tokens
            expected[2] = NOT_FINITE
            assert batch.status["0"].tolist() == on_host.status["0"].tolist() == expected
            assert batch.broken_layer(slice(0, 2)) is None
            assert batch.broken_layer(slice(1, 3)) == "0"
            others = [index for index in range(num_tokens) if index != 2]
            np.testing.assert_array_equal(
                batch.encoded["0"].data[others], on_host.encoded["0"].data[others]
            )

record = LayerRecord(name="0", encoding="bf16", hidden_size=16)
largest = torch.full((1, 16), torch.finfo(torch.float32).max)
assert encoded_by_kernel(record, largest).status["0"].tolist() == [NOT_FINITE]

scales = (1e-4,) * 16
for encoding in ("int8", "int4"):
    record = LayerRecord(name="0", encoding=encoding, hidden_size=16, channel_scales=scales)
    states = torch.ones(2, 16)
    states[1, :3] = 3e38
    assert encoded_by_kernel(record, states).status["0"].tolist() == [0, 3]
"""


def test_kernels_give_the_references_bits(run_script: Callable[..., None], device: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    run_script(SCRIPT, device=device)
