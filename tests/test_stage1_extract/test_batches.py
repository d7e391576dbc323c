"""Batches: every sequence once, within the budget, hardly any padding."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage1_extract.batches import length_bucketed_batches

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
