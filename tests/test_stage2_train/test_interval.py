"""Work of ranks adds up, and its time is shared out."""

import pytest

from stage2_train.interval import Interval, rates, time_shares


def test_the_store_must_give_its_bytes_while_the_drafter_computes():
    done = Interval(num_state_bytes=600, elapsed_s=10.0, wait_s=4.0, copy_s=1.0)
    assert time_shares(done) == {
        "wait_fraction": 0.4,
        "compute_fraction": 0.6,
        "copy_fraction": 0.1,
        "read_bytes_per_s": 60.0,
        "read_bytes_per_s_needed": 100.0,
    }


def test_ranks_make_the_same_steps_and_the_slowest_sets_the_pace():
    first = Interval(num_steps=4, num_tokens=100, num_blocks=10, token_room=200, block_room=10)
    second = Interval(num_steps=4, num_tokens=80, num_blocks=6, token_room=200, block_room=10)
    first.elapsed_s, first.wait_s, second.elapsed_s, second.wait_s = 2.0, 0.5, 2.5, 1.0
    found = rates(first + second, block_size=16)
    assert found["step_s"] == 2.5 / 4
    assert found["tokens_per_s"] == 180 / 2.5
    assert found["block_tokens_per_s"] == 16 * 16 / 2.5
    assert found["wait_fraction"] == pytest.approx(0.4)
    assert found["token_fill_fraction"] == 0.45
