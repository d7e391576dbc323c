import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.encodings import (
    E4M3_VALUES,
    ENCODINGS,
    bf16_to_float32,
    calibrate_channels,
    decode,
    encode,
    encoded_bytes_per_token,
    encoding_of_layer,
    encodings_for,
    float32_to_bf16,
    float32_to_e4m3,
)
from storage.errors import NonFiniteStatesError

CALIBRATED = [name for name, entry in ENCODINGS.items() if entry.calibrated]
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


def scales_for(encoding: str, hidden_size: int = 64) -> np.ndarray | None:
    if not ENCODINGS[encoding].calibrated:
        return None
    return np.geomspace(0.01, 30, hidden_size).astype(np.float32)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_extreme_states_stay_finite(encoding: str) -> None:
    states = np.zeros((4, 64), dtype=np.float32)
    states[1, 3] = 100_900.0
    states[2] = 1e-40
    states[3] = 3e38
    scales = scales_for(encoding)
    encoded = encode(encoding, states, channel_scales=scales)
    restored = decode(encoding, encoded, channel_scales=scales)
    assert np.isfinite(restored).all()
    np.testing.assert_allclose(restored[0], 0, atol=1e-25)
    assert abs(restored[1, 3] / 100_900.0 - 1) < (0.6 if encoding in ("int3", "int2") else 0.1)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_states_are_refused(encoding: str, bad: float) -> None:
    states = np.ones((3, 64), dtype=np.float32)
    states[2, 5] = bad
    with pytest.raises(NonFiniteStatesError, match="token 2"):
        encode(encoding, states, channel_scales=scales_for(encoding))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_stored_bytes_are_as_promised(encoding: str) -> None:
    states = np.ones((3, 64), dtype=np.float32)
    encoded = encode(encoding, states, channel_scales=scales_for(encoding))
    num_bytes = encoded.data.nbytes + (0 if encoded.scales is None else encoded.scales.nbytes)
    assert num_bytes == 3 * encoded_bytes_per_token(encoding, 64)
    assert encoded.data.dtype == np.dtype(ENCODINGS[encoding].dtype)
    assert encoded.data.shape == (3, ENCODINGS[encoding].width(64))


@pytest.mark.parametrize(
    ("encoding", "largest_share"),
    [("fp8", 0.505), ("int8", 0.505), ("int4", 0.285), ("int3", 0.2), ("int2", 0.135)],
)
def test_share_of_bf16_at_the_width_of_an_8b_target(encoding: str, largest_share: float) -> None:
    exact = encoded_bytes_per_token("bf16", 4096)
    assert encoded_bytes_per_token(encoding, 4096) / exact <= largest_share


def real_looking_states(num_tokens: int, seed: int) -> np.ndarray:
    """Channels of very unlike size, one of them massive, and a sink token."""
    rng = np.random.default_rng(seed)
    channels = np.exp(np.random.default_rng(7).standard_normal(64))
    channels[11] = 300.0
    states = rng.standard_normal((num_tokens, 64)) * channels
    states *= np.exp(0.3 * rng.standard_normal((num_tokens, 1)))
    states[0, 11] = 100_000.0
    return states.astype(np.float32)


@pytest.mark.parametrize(
    ("encoding", "largest_error"),
    [("fp8", 0.03), ("int8", 0.016), ("int4", 0.14), ("int3", 0.3), ("int2", 0.6)],
)
def test_no_channel_is_ruined(encoding: str, largest_error: float) -> None:
    states = real_looking_states(400, seed=1)[1:]
    calibrated = ENCODINGS[encoding].calibrated
    scales = calibrate_channels(real_looking_states(2000, seed=2)) if calibrated else None
    encoded = encode(encoding, states, channel_scales=scales)
    restored = decode(encoding, encoded, channel_scales=scales)
    error = np.sqrt(np.mean((restored - states) ** 2, axis=0) / np.mean(states**2, axis=0))
    assert error.max() < largest_error


@pytest.mark.parametrize("encoding", CALIBRATED)
def test_calibrated_encodings_need_their_scales(encoding: str) -> None:
    states = np.ones((1, 64), dtype=np.float32)
    with pytest.raises(ValueError, match="needs the channel scales"):
        encode(encoding, states)
    encoded = encode(encoding, states, channel_scales=scales_for(encoding))
    with pytest.raises(ValueError, match="needs the channel scales"):
        decode(encoding, encoded)


def test_silent_channels_get_a_scale() -> None:
    samples = np.zeros((10, 16), dtype=np.float32)
    samples[:, 3] = 2.0
    scales = calibrate_channels(samples)
    assert scales[3] == 4.0
    assert np.all(scales >= np.float32(1e-4))
    assert np.all(calibrate_channels(np.zeros((3, 8), dtype=np.float32)) > 0)


def test_unknown_encoding_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="bf16, fp8"):
        encode("fp4", np.ones((1, 2), dtype=np.float32))


@pytest.mark.parametrize("hidden_size", [8, 12, 36, 40, 576])
def test_an_encoding_is_for_a_width_if_it_can_keep_it(hidden_size: int) -> None:
    suitable = encodings_for(hidden_size)
    assert {"bf16", "fp8", "int8"} <= set(suitable)
    for name in set(ENCODINGS) - set(suitable):
        with pytest.raises(ValueError, match=r'divisible by 8.*store\.encoding = "int8"'):
            encoded_bytes_per_token(name, hidden_size)
    states = np.random.default_rng(0).standard_normal((3, hidden_size)).astype(np.float32)
    scales = np.ones(hidden_size, dtype=np.float32)
    for name in suitable:
        encoded = encode(name, states, channel_scales=scales)
        assert decode(name, encoded, channel_scales=scales).shape == states.shape


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_distributions_keep_eight_bits(encoding: str) -> None:
    assert encoding_of_layer("9", encoding) == encoding
    is_small = encoded_bytes_per_token(encoding, 4096) < 4096
    assert encoding_of_layer("lm_head_input", encoding) == ("int8" if is_small else encoding)
