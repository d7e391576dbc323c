import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.rotated import (
    decode_rotated,
    encode_rotated,
    group_size,
    group_steps,
    rotate,
    rotation_size,
    row_bytes,
)


def hadamard(size: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(size)


@pytest.mark.parametrize("hidden_size", [8, 48, 64, 576, 896])
def test_rotation_is_the_orthonormal_hadamard_matrix(hidden_size: int) -> None:
    values = np.random.default_rng(0).standard_normal((3, hidden_size)).astype(np.float32)
    size = rotation_size(hidden_size)
    expected = (values.reshape(3, -1, size) @ hadamard(size)).reshape(3, hidden_size)
    np.testing.assert_allclose(rotate(values), expected, atol=1e-5)
    np.testing.assert_allclose(rotate(rotate(values)), values, atol=1e-5)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    bits=st.integers(2, 4),
    group_channels=st.sampled_from([16, 32, 64]),
    hidden_size=st.sampled_from([8, 16, 48, 64, 192]),
    spread=st.floats(0, 6),
)
def test_no_rotated_value_errs_by_more_than_half_a_step(
    seed: int, bits: int, group_channels: int, hidden_size: int, spread: float
) -> None:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((3, hidden_size)) * np.exp(spread * rng.random(hidden_size))
    values = values.astype(np.float32)
    layout = {"bits": bits, "group_channels": group_channels}
    rows, scales = encode_rotated(values, **layout)
    assert rows.shape == (3, row_bytes(hidden_size, **layout))
    restored = decode_rotated(rows, scales, hidden_size=hidden_size, **layout)
    steps = group_steps(rows[:, hidden_size // 8 * bits :], scales)
    steps = np.repeat(steps, group_size(hidden_size, group_channels), axis=1)
    # Up to what float32 rounding of two rotations adds.
    slack = 1e-5 * np.abs(values).max()
    assert np.all(np.abs(rotate(restored) - rotate(values)) <= 0.5001 * steps + slack)


def test_planes_hold_one_bit_of_each_channel() -> None:
    values = np.zeros((1, 8), dtype=np.float32)
    values[0, 0] = 1.0  # rotated: all channels equal and positive, the top code
    rows, _ = encode_rotated(values, bits=2, group_channels=8)
    assert rows.tolist() == [[0xFF, 0xFF, 255]]
    rows, _ = encode_rotated(-values, bits=2, group_channels=8)
    assert rows.tolist() == [[0x00, 0x00, 255]]
    values = rotate(np.array([[1, -1, 1, 1, -1, -1, 1, 1]], dtype=np.float32))
    rows, _ = encode_rotated(values, bits=2, group_channels=8)
    assert rows.tolist() == [[0b11001101, 0b11001101, 255]]


def test_hidden_sizes_that_do_not_pack_are_refused() -> None:
    with pytest.raises(ValueError, match="divisible by 8"):
        row_bytes(12, bits=4, group_channels=32)
