"""Encode: the device's bits are the reference's bits."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stage1_extract.encode import EncodedBatch, encode_states
from storage.encodings import ENCODINGS, encode
from storage.schema import LayerRecord

# Limits of the formats: subnormals of e4m3, ties, the largest values, zero of both signs.
EDGES = [0.0, -0.0, 1.0, 447.9, 448.0, 449.0, 0.0009765625, 0.00146484375, 1e-30, 3e4, -1e5]


CALIBRATION_FREE = [name for name, entry in ENCODINGS.items() if not entry.calibrated]


def states(rows: int = 5, hidden: int = 48, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, hidden, generator=generator)
    values *= 10.0 ** torch.randint(-6, 6, (rows, 1), generator=generator)
    values[0, : len(EDGES)] = torch.tensor(EDGES)
    values[1] = 0.0
    return values


@pytest.mark.parametrize("encoding", CALIBRATION_FREE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_the_reference(encoding: str, dtype: torch.dtype) -> None:
    values = states().to(dtype)
    encoded = encode_states(encoding, values).to_host()
    raw = values.view(torch.uint16).numpy() if dtype == torch.bfloat16 else values.numpy()
    expected = encode(encoding, raw)
    assert encoded.data.dtype == expected.data.dtype
    np.testing.assert_array_equal(encoded.data, expected.data)
    if expected.scales is None:
        assert encoded.scales is None
    else:
        np.testing.assert_array_equal(encoded.scales, expected.scales)


@pytest.mark.parametrize("encoding", CALIBRATION_FREE)
@given(
    values=hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.integers(1, 9)),
        elements=st.floats(-(2.0**100), 2.0**100, width=32),
    )
)
def test_bits_of_the_reference_for_any_values(encoding: str, values: np.ndarray) -> None:
    encoded = encode_states(encoding, torch.from_numpy(values)).to_host()
    expected = encode(encoding, values)
    np.testing.assert_array_equal(encoded.data, expected.data)
    if expected.scales is not None:
        np.testing.assert_array_equal(encoded.scales, expected.scales)


@pytest.mark.parametrize("encoding", CALIBRATION_FREE)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_flagged_at_its_token(encoding: str, bad: float) -> None:
    values = states()
    values[3, 7] = bad
    assert encode_states(encoding, values).is_finite.tolist() == [True, True, True, False, True]


def test_a_value_that_overflows_bf16_is_flagged() -> None:
    values = torch.full((1, 4), torch.finfo(torch.float32).max)
    assert encode_states("bf16", values).is_finite.tolist() == [False]


def test_an_unknown_encoding_lists_the_known() -> None:
    with pytest.raises(ValueError, match="expected one of bf16, fp8"):
        encode_states("int3", states())


def test_a_batch_is_cut_into_its_sequences() -> None:
    layers = {
        "3": LayerRecord(name="3", encoding="fp8", hidden_size=48),
        "9": LayerRecord(name="9", encoding="bf16", hidden_size=48),
    }
    values = {"3": states(seed=3), "9": states(seed=9)}
    values["9"][4, 0] = torch.nan
    batch = EncodedBatch(values, layers)
    assert batch.broken_layer(slice(0, 4)) is None
    assert batch.broken_layer(slice(3, 5)) == "9"
    for name, record in layers.items():
        expected = encode(record.encoding, values[name][1:4].numpy())
        found = batch.of(slice(1, 4))[name]
        np.testing.assert_array_equal(found.data, expected.data)
        if expected.scales is not None:
            np.testing.assert_array_equal(found.scales, expected.scales)
