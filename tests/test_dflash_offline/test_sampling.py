"""Rejection sampling gives the target's distribution; gains end at stops and limits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_offline.sampling import accept_sampled, clip_gain, sampling_probabilities

VOCAB_SIZE, NUM_DRAWS = 5, 200_000


@pytest.mark.parametrize("num_drafted", [0, 1, 2])
def test_first_token_has_the_targets_distribution_for_any_draft(num_drafted):
    torch.manual_seed(0)
    p = torch.randn(1, 3, VOCAB_SIZE).mul(1.5).softmax(-1).expand(NUM_DRAWS, -1, -1)
    q = torch.randn(1, 2, VOCAB_SIZE).mul(1.5).softmax(-1).expand(NUM_DRAWS, -1, -1)
    generator = torch.Generator().manual_seed(1)
    drafted = torch.multinomial(q.reshape(-1, VOCAB_SIZE), 1, generator=generator).view(-1, 2)
    num_accepted, next_ids = accept_sampled(
        drafted, q, p, torch.full((NUM_DRAWS,), num_drafted), generator=generator
    )
    assert int(num_accepted.max()) <= num_drafted
    first = torch.where(num_accepted > 0, drafted[:, 0], next_ids)
    frequencies = torch.bincount(first, minlength=VOCAB_SIZE) / NUM_DRAWS
    # Five standard deviations of a frequency.
    bound = 5 * (p[0, 0] * (1 - p[0, 0]) / NUM_DRAWS).sqrt()
    assert ((frequencies - p[0, 0]).abs() < bound).all()


def test_a_drafter_that_knows_the_distribution_is_always_accepted():
    p = torch.rand(64, 4, VOCAB_SIZE).softmax(-1)
    drafted = torch.multinomial(p[:, :3].reshape(-1, VOCAB_SIZE), 1).view(64, 3)
    num_accepted, _ = accept_sampled(drafted, p[:, :3], p, torch.full((64,), 3), generator=None)
    assert num_accepted.tolist() == [3] * 64


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.7, 0), (1.0, 2), (0.6, 4)])
def test_probabilities_follow_their_definition(top_p, top_k):
    torch.manual_seed(2)
    logits = torch.randn(7, VOCAB_SIZE)
    found = sampling_probabilities(logits, temperature=0.6, top_p=top_p, top_k=top_k)
    for row, probabilities in zip(logits, found, strict=True):
        kept = sorted(range(VOCAB_SIZE), key=lambda token: -row[token])
        kept = kept[: top_k or VOCAB_SIZE]
        shares = torch.softmax(row[kept] / 0.6, 0)
        num_kept = next(
            n for n in range(1, len(kept) + 1) if shares[:n].sum() >= top_p - 1e-6 or n == len(kept)
        )
        expected = torch.zeros(VOCAB_SIZE)
        expected[kept[:num_kept]] = shares[:num_kept] / shares[:num_kept].sum()
        torch.testing.assert_close(probabilities, expected)


@given(
    num_accepted=st.integers(0, 3),
    room=st.integers(1, 6),
    stops=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_a_gain_ends_at_the_first_stop_or_the_limit(num_accepted, room, stops):
    gained = 0
    stopped = False
    for place in range(num_accepted + 1):
        if gained == room or stopped:
            break
        gained += 1
        stopped = stops[place]
    found, found_stopped = clip_gain(
        torch.tensor([num_accepted]), torch.tensor([room]), torch.tensor([stops])
    )
    assert (found.tolist(), found_stopped.tolist()) == ([gained], [stopped])
