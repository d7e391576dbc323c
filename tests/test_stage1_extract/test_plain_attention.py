"""Rectangles: every token once, hardly any filling, and attention as if each were alone."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stage1_extract.plain_attention import (
    MAX_FILLED_FRACTION,
    attend_by_scores,
    attend_by_sdpa,
    attend_in_rectangles,
    groups_of_like_length,
    rectangles,
    visible,
)

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=30)


@given(lengths=LENGTHS, max_scores=st.one_of(st.none(), st.integers(1, 5000)))
def test_groups_hold_each_sequence_once_and_little_else(
    lengths: list[int], max_scores: int | None
) -> None:
    groups = groups_of_like_length(lengths, max_scores=max_scores)
    assert sorted(itertools.chain(*groups)) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[index] for index in group)
        num_real = sum(lengths[index] for index in group)
        assert num_real >= (1 - MAX_FILLED_FRACTION) * longest * len(group)
        assert len(group) == 1 or max_scores is None or longest**2 * len(group) <= max_scores


@given(lengths=LENGTHS)
def test_every_token_has_its_place(lengths: list[int]) -> None:
    starts = (0, *itertools.accumulate(lengths))
    places = torch.cat([each.places for each in rectangles(starts, CPU, None)])
    assert sorted(places.tolist()) == list(range(sum(lengths)))
    for each in rectangles(starts, CPU, None):
        assert torch.equal(each.rows.flatten()[each.real], each.places)


RULES: list[dict[str, Any]] = [
    {},
    {"sliding_window": 4},
    {"softcap": 2.0},
    {"softcap": 2.0, "s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0]), "sliding_window": 3},
]


@pytest.mark.parametrize("rule", RULES)
def test_attention_is_that_of_each_sequence_alone(rule: dict[str, Any]) -> None:
    lengths = [5, 1, 12, 11, 5, 30]
    starts = (0, *itertools.accumulate(lengths))
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, sum(lengths), 8, generator=generator) for heads in (4, 2, 2)
    )
    needs_scores = "softcap" in rule
    options = {"scaling": None, "sliding_window": None} | rule
    if needs_scores:
        options = {"s_aux": None} | options
    attend = partial(attend_by_scores if needs_scores else attend_by_sdpa, **options)
    found = attend_in_rectangles(query, key, value, starts, attend, max_scores=300)
    for start, end in itertools.pairwise(starts):
        alone = attend(*(each[:, :, start:end] for each in (query, key, value)))
        expected = alone.transpose(1, 2)
        torch.testing.assert_close(found[:, start:end], expected, rtol=1e-5, atol=1e-6)


def test_the_window_counts_the_token_itself() -> None:
    assert visible(4, 2, device=CPU).int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]
