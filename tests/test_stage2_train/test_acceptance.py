"""What acceptance lengths say."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stage2_train.acceptance import (
    accept_greedy,
    accepted_by_offset,
    bootstrap_interval,
    mean_acceptance_length,
)

REQUESTS = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=5), min_size=1, max_size=6)


@given(
    drafted=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    chosen=st.lists(st.integers(0, 2), min_size=5, max_size=5),
    num_drafted=st.integers(0, 4),
)
def test_greedy_acceptance_is_the_longest_matching_start(drafted, chosen, num_drafted):
    expected = 0
    while expected < num_drafted and drafted[expected] == chosen[expected]:
        expected += 1
    counted = accept_greedy(
        torch.tensor([drafted]), torch.tensor([chosen]), torch.tensor([num_drafted])
    )
    assert counted.tolist() == [expected]


@given(REQUESTS)
def test_one_plus_the_curve_is_the_mean_over_blocks(requests):
    flat = [length for request in requests for length in request]
    curve = accepted_by_offset(requests, block_size=6)
    assert len(curve) == 5
    assert 1 + sum(curve) == pytest.approx(sum(flat) / len(flat))


@given(REQUESTS)
def test_the_interval_holds_the_mean_and_is_repeatable(requests):
    low, high = bootstrap_interval(requests, seed=3, num_resamples=200)
    mean = mean_acceptance_length(requests)
    assert min(map(min, requests)) <= low <= high <= max(map(max, requests))
    assert (low, high) == bootstrap_interval(requests, seed=3, num_resamples=200)
    if len(requests) == 1:
        assert low == pytest.approx(mean)
        assert high == pytest.approx(mean)


def test_requests_weigh_alike_and_empty_ones_nothing():
    assert mean_acceptance_length([[1, 1, 1, 1], [3], []]) == 2.0
    assert math.isnan(mean_acceptance_length([[]]))
    assert all(math.isnan(share) for share in accepted_by_offset([[]], block_size=3))
    assert all(map(math.isnan, bootstrap_interval([[]], seed=0)))
