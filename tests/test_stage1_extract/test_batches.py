"""Batches: every sequence once, within the budget, hardly any padding."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage1_extract.batches import batches_for, length_bucketed_batches, packed_batches
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


@given(lengths=LENGTHS, batch_tokens=st.integers(2, 1000))
def test_packs_keep_the_order_and_the_budget(lengths: list[int], batch_tokens: int) -> None:
    batches = packed_batches(lengths, batch_tokens=batch_tokens)
    assert [index for batch in batches for index in batch] == list(range(len(lengths)))
    sizes = [sum(lengths[index] for index in batch) for batch in batches]
    for batch, size in zip(batches, sizes, strict=True):
        assert batch
        assert len(batch) == 1 or size <= batch_tokens
    for size, following in zip(sizes, batches[1:], strict=False):
        assert size + lengths[following[0]] > batch_tokens


@pytest.mark.parametrize(
    ("batching", "expected"),
    [
        ("packed", [[0], [1, 2]]),
        ("padded", [[1], [2], [0]]),
        ("single", [[0], [1], [2]]),
    ],
)
def test_each_way_has_its_batches(batching: Batching, expected: list[list[int]]) -> None:
    assert batches_for(batching, [9, 2, 7], batch_tokens=10) == expected
