"""Batches: every sequence once, within the budget, hardly any padding."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage1_extract.batches import (
    batches_for,
    length_bucketed_batches,
    packed_batches,
    row_sizes,
)
from stage1_extract.config import Batching

LENGTHS = st.lists(st.integers(1, 300), max_size=60)


@given(lengths=LENGTHS, batch_tokens=st.integers(2, 1000))
def test_laws(lengths: list[int], batch_tokens: int) -> None:
    batches = length_bucketed_batches(lengths, batch_tokens=batch_tokens)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[index] for index in batch)
        rectangle = longest * len(batch)
        num_padding = rectangle - sum(lengths[index] for index in batch)
        assert len(batch) == 1 or rectangle <= batch_tokens
        assert num_padding <= 0.05 * rectangle


@pytest.mark.parametrize(
    ("lengths", "batch_tokens", "expected"),
    [
        ([], 10, []),
        ([50], 10, [[0]]),
        ([5, 5, 5], 10, [[0, 1], [2]]),
        ([100, 99, 10], 1000, [[2], [1, 0]]),
    ],
)
def test_examples(lengths: list[int], batch_tokens: int, expected: list[list[int]]) -> None:
    assert length_bucketed_batches(lengths, batch_tokens=batch_tokens) == expected


@given(lengths=LENGTHS, batch_tokens=st.integers(2, 1000), max_sequences=st.integers(1, 10))
def test_packs_keep_the_budget_and_are_full(
    lengths: list[int], batch_tokens: int, max_sequences: int
) -> None:
    batches = packed_batches(lengths, batch_tokens=batch_tokens, max_sequences=max_sequences)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    sizes = [sum(lengths[index] for index in batch) for batch in batches]
    for batch, size in zip(batches, sizes, strict=True):
        assert len(batch) == 1 or size <= batch_tokens
        assert 1 <= len(batch) <= max_sequences
    open_sizes = [
        size
        for batch, size in zip(batches, sizes, strict=True)
        if len(batch) < max_sequences and size < batch_tokens
    ]
    # No two packs with room left could have been one.
    for first, second in itertools.combinations(open_sizes, 2):
        assert first + second > batch_tokens or max_sequences < len(lengths)


def test_packs_of_a_usual_mixture_are_full() -> None:
    lengths = np.random.default_rng(0).lognormal(np.log(700), 1.0, 400).clip(16, 4096).astype(int)
    batches = packed_batches(lengths.tolist(), batch_tokens=8192)
    assert sum(lengths) / (8192 * (len(batches) - 1)) > 0.99


@pytest.mark.parametrize(
    ("batch_tokens", "sizes"),
    [(8192, [1024, 2048, 4096, 8192]), (3000, [1500, 3000]), (1000, [1000]), (2049, [2049])],
)
def test_rows_of_fixed_lengths(batch_tokens: int, sizes: list[int]) -> None:
    assert row_sizes(batch_tokens) == sizes


@pytest.mark.parametrize(
    ("batching", "expected"),
    [
        ("packed", [[0], [2, 1]]),
        ("padded", [[1], [2], [0]]),
        ("single", [[0], [1], [2]]),
    ],
)
def test_each_way_has_its_batches(batching: Batching, expected: list[list[int]]) -> None:
    assert batches_for(batching, [9, 2, 7], batch_tokens=10) == expected
