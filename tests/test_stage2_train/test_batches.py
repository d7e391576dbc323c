"""Laws of packing: every sequence once, never over budget, well filled, the same every time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage2_train.batches import Window, draw_window, fill_fraction, pack, share_steps

BATCH_TOKENS = 100
lengths = st.lists(st.integers(2, BATCH_TOKENS), max_size=80)


def windows_of(num_tokens):
    return [Window(sequence_index=i, start=0, stop=n) for i, n in enumerate(num_tokens)]


@given(lengths, st.integers(1, 10))
def test_every_window_is_packed_once_within_the_budget(num_tokens, num_open):
    windows = windows_of(num_tokens)
    batches = list(pack(windows, batch_tokens=BATCH_TOKENS, num_open=num_open))
    packed = [window for batch in batches for window in batch]
    assert sorted(packed, key=lambda w: w.sequence_index) == windows
    assert all(sum(w.num_tokens for w in batch) <= BATCH_TOKENS for batch in batches)
    assert batches == list(pack(windows, batch_tokens=BATCH_TOKENS, num_open=num_open))


def test_a_batch_depends_on_the_windows_before_its_end_only():
    rng = np.random.default_rng(0)
    windows = windows_of(rng.integers(2, BATCH_TOKENS, 500).tolist())
    seen: list[Window] = []

    def watched():
        for window in windows:
            seen.append(window)
            yield window

    first = next(pack(watched(), batch_tokens=BATCH_TOKENS, num_open=8))
    assert len(seen) < 100
    again = next(pack(windows[: len(seen)], batch_tokens=BATCH_TOKENS, num_open=8))
    assert first == again


def test_log_normal_lengths_fill_their_batches():
    rng = np.random.default_rng(1)
    num_tokens = np.minimum(rng.lognormal(np.log(700), 1.0, 4000).astype(int) + 2, 4096)
    batches = list(pack(windows_of(num_tokens.tolist()), batch_tokens=4096))
    assert fill_fraction(batches, batch_tokens=4096) > 0.98
    assert fill_fraction([], batch_tokens=4096) == 0


def test_a_window_above_the_budget_is_refused():
    with pytest.raises(ValueError, match="101 tokens exceeds 100"):
        list(pack(windows_of([101]), batch_tokens=BATCH_TOKENS))


def draw(num_tokens, *, epoch=0):
    return draw_window(
        0, num_tokens, window_tokens=BATCH_TOKENS, seed=0, epoch=epoch, sequence_id=lambda _: "id"
    )


@given(st.integers(2, 1000), st.integers(0, 20))
def test_windows_lie_inside_their_sequence(num_tokens, epoch):
    window = draw(num_tokens, epoch=epoch)
    assert 0 <= window.start < window.stop <= num_tokens
    assert window.num_tokens == min(num_tokens, BATCH_TOKENS)
    assert window == draw(num_tokens, epoch=epoch)


def test_long_sequences_show_another_window_each_epoch():
    assert len({draw(10_000, epoch=epoch).start for epoch in range(20)}) > 15


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("num_batches", [0, 1, 5, 12, 13])
def test_ranks_share_every_step_out_exactly(num_ranks, num_batches):
    planned = [[Window(sequence_index=i, start=0, stop=1)] for i in range(num_batches)]
    by_rank = [
        list(share_steps(planned, batches_per_step=6, rank=rank, num_ranks=num_ranks))
        for rank in range(num_ranks)
    ]
    for number, shares in enumerate(zip(*by_rank, strict=True)):
        # All ranks do the same work, and together train the batches of the step, each once.
        assert len({len(share) for share in shares}) == 1
        trained = [s.windows for share in shares for s in share if not s.is_filler]
        expected = planned[6 * number : 6 * number + 6]
        assert sorted(w[0].sequence_index for w in trained) == [
            w[0].sequence_index for w in expected
        ]
    assert {len(steps) for steps in by_rank} == {-(-num_batches // 6)}
    if num_ranks == 1:
        assert not any(share.is_filler for step in by_rank[0] for share in step)
