import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.encodings import (
    E4M3_VALUES,
    ENCODINGS,
    bf16_to_float32,
    decode,
    encode,
    encoded_bytes_per_token,
    float32_to_bf16,
    float32_to_e4m3,
)
from storage.errors import NonFiniteStatesError

FINITE = E4M3_VALUES[np.isfinite(E4M3_VALUES)]


def test_e4m3_table_is_e4m3fn() -> None:
    torch = pytest.importorskip("torch")
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(codes, E4M3_VALUES)


@given(st.lists(st.floats(-500, 500, width=32), min_size=1, max_size=50))
def test_e4m3_rounds_like_torch(values: list[float]) -> None:
    torch = pytest.importorskip("torch")
    array = np.clip(np.array(values, dtype=np.float32), -448, 448)
    expected = torch.from_numpy(array).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(float32_to_e4m3(array), expected)


def test_e4m3_ties_go_to_even() -> None:
    values = np.unique(FINITE[FINITE >= 0])
    ties = (values[:-1] + values[1:]) / 2
    code = float32_to_e4m3(ties.astype(np.float32))
    assert np.all(code % 2 == 0)


@given(st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=50))
def test_bf16_rounds_like_torch(values: list[float]) -> None:
    torch = pytest.importorskip("torch")
    array = np.array(values, dtype=np.float32)
    expected = torch.from_numpy(array).bfloat16().view(torch.uint16).numpy()
    np.testing.assert_array_equal(float32_to_bf16(array), expected)


@given(st.integers(0, 2**16 - 1))
def test_bf16_bits_pass_unchanged(bits: int) -> None:
    states = np.array([[bits]], dtype=np.uint16)
    if not np.isfinite(bf16_to_float32(states)).all():
        with pytest.raises(NonFiniteStatesError):
            encode("bf16", states)
        return
    np.testing.assert_array_equal(encode("bf16", states).data, states)


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32), exponent=st.integers(-120, 110))
def test_fp8_error_is_bounded_at_every_magnitude(seed: int, exponent: int) -> None:
    rng = np.random.default_rng(seed)
    states = (rng.standard_normal((3, 8)) * 2.0**exponent).astype(np.float32)
    restored = decode("fp8", encode("fp8", states))
    largest = np.abs(states).max(axis=1, keepdims=True)
    # Half a step of a 3-bit mantissa, or half of the smallest subnormal step.
    bound = np.maximum(np.abs(states) / 16, largest / 448 * 2.0**-10)
    assert np.all(np.abs(restored - states) <= bound * 1.001 + 2.0**-149)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_extreme_states_stay_finite(encoding: str) -> None:
    states = np.zeros((4, 64), dtype=np.float32)
    states[1, 3] = 100_900.0
    states[2] = 1e-40
    states[3] = 3e38
    restored = decode(encoding, encode(encoding, states))
    assert np.isfinite(restored).all()
    np.testing.assert_array_equal(restored[0], 0)
    assert abs(restored[1, 3] / 100_900.0 - 1) < 0.1


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_states_are_refused(encoding: str, bad: float) -> None:
    states = np.ones((3, 64), dtype=np.float32)
    states[2, 5] = bad
    with pytest.raises(NonFiniteStatesError, match="token 2"):
        encode(encoding, states)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_stored_bytes_are_as_promised(encoding: str) -> None:
    encoded = encode(encoding, np.ones((3, 64), dtype=np.float32))
    num_bytes = encoded.data.nbytes + (0 if encoded.scales is None else encoded.scales.nbytes)
    assert num_bytes == 3 * encoded_bytes_per_token(encoding, 64)
    assert encoded.data.dtype == np.dtype(ENCODINGS[encoding].dtype)
    assert encoded.data.shape == (3, ENCODINGS[encoding].width(64))


def test_unknown_encoding_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="bf16, fp8"):
        encode("fp4", np.ones((1, 2), dtype=np.float32))
