"""What arrives from a GPU is what the reference encodes, buffers used again and again."""

from collections.abc import Callable

import pytest

SCRIPT = """
import numpy as np
import torch
from stage1_extract.encode import encode_on_host
from stage1_extract.loss_sample import take_sample
from stage1_extract.transfer import CudaTransfer
from storage.schema import LayerRecord

scales = tuple(np.linspace(0.5, 2.0, 192).tolist())
layers = {
    name: LayerRecord(
        name=name,
        encoding=encoding,
        hidden_size=192,
        channel_scales=scales if encoding.startswith("int") else None,
    )
    for name, encoding in (("1", "fp8"), ("5", "bf16"), ("9", "int8"), ("13", "int4"))
}
transfer = CudaTransfer(layers, device="cuda:0", batch_tokens=300, write_buffer_bytes=1)
assert transfer.num_buffers == 2
generator = torch.Generator().manual_seed(0)
batches = [
    {
        name: (torch.randn(count, 192, generator=generator) * 30).to(torch.bfloat16)
        for name in layers
    }
    for count in (300, 7, 120, 300, 1)
]
batches[2]["9"][5, 3] = torch.nan
pending = []

def check(states, arrival):
    found, expected = arrival.wait(), encode_on_host(states, layers)
    for name in layers:
        status = expected.status[name]
        np.testing.assert_array_equal(found.status[name], status)
        good = status == 0
        np.testing.assert_array_equal(
            found.encoded[name].data[good], expected.encoded[name].data[good]
        )
        if expected.encoded[name].scales is not None:
            np.testing.assert_array_equal(
                found.encoded[name].scales[good], expected.encoded[name].scales[good]
            )
    if (sample := arrival.sample()) is not None:
        for name, expected in take_sample(states).items():
            torch.testing.assert_close(sample[name], expected, rtol=0, atol=0, equal_nan=True)
    seconds = arrival.seconds()
    assert set(seconds) == {"idle", "forward", "wait", "encode", "copy"}
    assert all(value >= 0 for value in seconds.values())
    arrival.release()

for states in batches:
    transfer.begin()
    on_device = {name: each.cuda() for name, each in states.items()}
    if len(pending) == 2:
        check(*pending.pop(0))
    pending.append((states, transfer.start(on_device, with_sample=len(pending) == 0)))
for each in pending:
    check(*each)
"""


@pytest.mark.gpu
def test_what_arrives_is_what_the_reference_encodes(run_script: Callable[..., None]) -> None:
    run_script(SCRIPT, device="cuda")
