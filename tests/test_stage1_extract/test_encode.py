"""Encode: the device's bits are the reference's bits."""

import numpy as np
import pytest
import torch

from stage1_extract.encode import (
    NOT_FINITE,
    EncodedBatch,
    as_batch,
    buffer_bytes,
    divide,
    encode_on_host,
)
from storage.encodings import ENCODINGS, EncodedStates, encode
from storage.schema import LayerRecord

# Limits of the formats: subnormals of e4m3, ties, the largest values, zero of both signs.
EDGES = [0.0, -0.0, 1.0, 447.9, 448.0, 449.0, 0.0009765625, 0.00146484375, 1e-30, 3e4, -1e5]


def states(rows: int = 5, hidden: int = 48, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, hidden, generator=generator)
    values *= 10.0 ** torch.randint(-6, 6, (rows, 1), generator=generator)
    values[0, : len(EDGES)] = torch.tensor(EDGES)
    values[1] = 0.0
    return values


def record(encoding: str, *, name: str = "3", hidden: int = 48) -> LayerRecord:
    is_calibrated = ENCODINGS[encoding].calibrated
    scales = tuple(np.linspace(0.5, 2.0, hidden).tolist()) if is_calibrated else None
    return LayerRecord(name=name, encoding=encoding, hidden_size=hidden, channel_scales=scales)


def assert_same(found: EncodedStates, expected: EncodedStates) -> None:
    assert found.data.dtype == expected.data.dtype
    np.testing.assert_array_equal(found.data, expected.data)
    assert (found.scales is None) == (expected.scales is None)
    if expected.scales is not None:
        np.testing.assert_array_equal(found.scales, expected.scales)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_the_reference(encoding: str, dtype: torch.dtype) -> None:
    layer = record(encoding)
    values = states().to(dtype)
    raw = values.view(torch.uint16).numpy() if dtype == torch.bfloat16 else values.numpy()
    expected = encode(encoding, raw, channel_scales=layer.channel_scale_array)
    batch = encode_on_host({"3": values}, {"3": layer})
    assert_same(batch.encoded["3"], expected)
    assert batch.broken_layer(slice(None)) is None
    assert batch.num_saturated(slice(None)) == 0


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_flagged_at_its_token(encoding: str, bad: float) -> None:
    values = states()
    expected = encode_on_host({"3": values}, {"3": record(encoding)}).encoded["3"]
    values[3, 7] = bad
    batch = encode_on_host({"3": values}, {"3": record(encoding)})
    assert batch.status["3"].tolist() == [0, 0, 0, NOT_FINITE, 0]
    others = [0, 1, 2, 4]
    np.testing.assert_array_equal(batch.encoded["3"].data[others], expected.data[others])


def test_a_value_that_overflows_bf16_is_flagged() -> None:
    values = torch.ones(2, 48)
    values[1, 3] = torch.finfo(torch.float32).max
    batch = encode_on_host({"3": values}, {"3": record("bf16")})
    assert batch.status["3"].tolist() == [0, NOT_FINITE]


def test_an_unknown_encoding_lists_the_known() -> None:
    layer = LayerRecord(name="3", encoding="int1", hidden_size=48)
    with pytest.raises(ValueError, match="expected one of bf16, fp8"):
        encode_on_host({"3": states()}, {"3": layer})


def test_a_batch_is_cut_into_its_sequences() -> None:
    layers = {"3": record("fp8"), "9": record("bf16", name="9")}
    values = {"3": states(seed=3), "9": states(seed=9)}
    values["9"][4, 0] = torch.nan
    batch = encode_on_host(values, layers)
    assert batch.broken_layer(slice(0, 4)) is None
    assert batch.broken_layer(slice(3, 5)) == "9"
    for name, layer in layers.items():
        expected = encode(layer.encoding, values[name][1:4].numpy())
        assert_same(batch.of(slice(1, 4))[name], expected)


def test_cut_values_are_counted_by_sequence() -> None:
    status = np.array([0, 2, 0, NOT_FINITE, 5], dtype=np.int32)
    batch = EncodedBatch(encoded={}, status={"3": status, "9": status})
    assert batch.num_saturated(slice(0, 2)) == 4
    assert batch.num_saturated(slice(2, 5)) == 10


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_memory_is_divided_without_overlap(encoding: str) -> None:
    layers = {"3": record(encoding), "9": record("bf16", name="9")}
    num_bytes = buffer_bytes(layers, 7)
    buffers = divide(torch.zeros(num_bytes + 100, dtype=torch.uint8), layers, 7)
    assert len(buffers.whole) == num_bytes
    parts = [*buffers.data.values(), *buffers.scales.values(), *buffers.status.values()]
    for number, part in enumerate(parts):
        part.view(torch.uint8).fill_(number + 1)
    for number, part in enumerate(parts):
        assert (part.view(torch.uint8) == number + 1).all()
    batch = as_batch(buffers, layers)
    for name, layer in layers.items():
        expected = encode(
            layer.encoding,
            np.zeros((7, 48), dtype=np.float32),
            channel_scales=layer.channel_scale_array,
        )
        assert batch.encoded[name].data.shape == expected.data.shape
        assert batch.encoded[name].data.dtype == expected.data.dtype
