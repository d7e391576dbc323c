"""Laws of anchors, shares, labels and weights."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from stage2_train.blocks import (
    Supervision,
    choose_anchors,
    eligible_anchors,
    label_blocks,
    make_blocks,
    offset_weights,
    share_anchors,
)

masks = arrays(np.bool_, st.integers(1, 40))


def make_supervision(number: int, num_tokens: int = 30) -> Supervision:
    rng = np.random.default_rng(number)
    return Supervision(
        sequence_id=f"sequence-{number}",
        token_ids=rng.integers(1, 1000, num_tokens).astype(np.int32),
        loss_mask=rng.random(num_tokens) < 0.7,
    )


@given(masks)
def test_an_anchor_and_its_successor_are_supervised(loss_mask):
    anchors = set(eligible_anchors(loss_mask).tolist())
    for position in range(len(loss_mask)):
        has_successor = position + 1 < len(loss_mask)
        is_eligible = bool(has_successor and loss_mask[position] and loss_mask[position + 1])
        assert (position in anchors) == is_eligible


@given(st.lists(st.integers(0, 500), min_size=1, max_size=20), st.integers(1, 300))
def test_shares_are_fair_and_starve_none(num_eligible, num_anchors):
    eligible = np.array(num_eligible, np.int64)
    shares = share_anchors(eligible, num_anchors=num_anchors)
    assert shares.sum() == min(num_anchors, eligible.sum())
    assert (shares >= 0).all()
    assert (shares <= eligible).all()
    if num_anchors >= (eligible > 0).sum():
        assert (shares[eligible > 0] > 0).all()
        # Beyond the one that each sequence has for sure, in proportion up to rounding.
        beyond, capacity = shares - (eligible > 0), eligible - (eligible > 0)
        exact = capacity * beyond.sum() / max(1, capacity.sum())
        assert (np.abs(beyond - exact) <= 1).all()


@given(st.integers(0, 60), st.integers(0, 5), st.text(max_size=5))
def test_anchors_depend_on_seed_epoch_and_id_alone(num_chosen, epoch, sequence_id):
    eligible = np.arange(3, 53, dtype=np.int64)
    draw = {"seed": 7, "epoch": epoch, "sequence_id": sequence_id}
    anchors = choose_anchors(eligible, num_chosen=num_chosen, **draw)
    assert len(set(anchors.tolist())) == len(anchors) == min(num_chosen, 50)
    assert (np.diff(anchors) > 0).all()
    assert set(anchors) <= set(eligible)
    # A larger share keeps what a smaller one has, so packing neighbours never change a draw.
    more = choose_anchors(eligible, num_chosen=num_chosen + 1, **draw)
    assert set(anchors) <= set(more)


def test_anchors_differ_between_epochs_seeds_and_sequences():
    eligible = np.arange(1000, dtype=np.int64)
    base = {"seed": 0, "epoch": 0, "sequence_id": "a"}
    draws = [
        choose_anchors(eligible, num_chosen=20, **(base | change)).tolist()
        for change in ({}, {"epoch": 1}, {"seed": 1}, {"sequence_id": "b"})
    ]
    assert len({tuple(draw) for draw in draws}) == 4


def test_anchors_are_the_same_on_every_machine():
    eligible = np.arange(100, dtype=np.int64)
    drawn = choose_anchors(eligible, num_chosen=5, seed=0, epoch=0, sequence_id="a")
    assert drawn.tolist() == [25, 29, 50, 75, 90]


@pytest.mark.parametrize(
    ("block_size", "gamma", "expected"), [(16, None, 7.0), (10, None, 5.0), (8, None, 4.0)]
)
def test_weights_decay_as_in_the_paper(block_size, gamma, expected):
    weights = offset_weights(block_size, gamma=gamma)
    assert weights[0] == 0
    for offset in range(1, block_size):
        assert weights[offset] == pytest.approx(np.exp(-(offset - 1) / expected), rel=1e-6)
    np.testing.assert_array_equal(weights, offset_weights(block_size, gamma=expected))


def test_small_weights_are_dropped():
    weights = offset_weights(16, min_weight=0.3)
    kept = offset_weights(16)
    np.testing.assert_array_equal(weights, np.where(kept < 0.3, 0, kept))
    assert (weights > 0).sum() == 9


def check_labels(label, anchors, sequence, block_size, stop_at_unsupervised):
    """The label of offset k is the token at anchor + k; it counts where the rule says so."""
    labels, counts = label(
        anchors,
        token_ids=sequence.token_ids,
        loss_mask=sequence.loss_mask,
        block_size=block_size,
        stop_at_unsupervised=stop_at_unsupervised,
    )
    for block, anchor in enumerate(anchors):
        is_open = True
        for offset in range(block_size):
            place = anchor + offset
            is_supervised = place < len(sequence.loss_mask) and sequence.loss_mask[place]
            if offset > 0 and not is_supervised:
                is_open = False
            wanted = offset > 0 and is_supervised and (is_open or not stop_at_unsupervised)
            assert counts[block, offset] == wanted, (block, offset)
            if wanted:
                assert labels[block, offset] == sequence.token_ids[place]


@pytest.mark.parametrize("stop_at_unsupervised", [False, True])
@pytest.mark.parametrize("number", range(5))
def test_labels_are_the_tokens_after_the_anchor(number, stop_at_unsupervised):
    sequence = make_supervision(number)
    anchors = eligible_anchors(sequence.loss_mask)
    check_labels(label_blocks, anchors, sequence, 6, stop_at_unsupervised)


@pytest.mark.parametrize("shift", [-1, 1])
def test_labels_shifted_by_one_would_be_noticed(shift):
    def shifted(anchors, **arguments):
        return label_blocks(anchors + shift, **arguments)

    sequence = make_supervision(0)
    anchors = eligible_anchors(sequence.loss_mask)[1:]
    check_labels(label_blocks, anchors, sequence, 6, False)
    with pytest.raises(AssertionError):
        check_labels(shifted, anchors, sequence, 6, False)


def test_blocks_are_sorted_and_padded_at_the_end():
    packed = [make_supervision(number, num_tokens=20) for number in range(3)]
    blocks = make_blocks(
        packed, num_anchors=64, weight_of_offset=offset_weights(5), seed=0, epoch=0
    )
    num_eligible = sum(len(eligible_anchors(s.loss_mask)) for s in packed)
    assert len(blocks.position) == 64
    assert blocks.num_valid == num_eligible
    assert (np.diff(blocks.context_stop) >= 0).all()
    assert (blocks.weight[num_eligible:] == 0).all()
    np.testing.assert_array_equal(
        blocks.context_start[num_eligible:], blocks.context_stop[num_eligible:]
    )
    # Each block starts at a token of its own sequence and knows its place there.
    for block in range(num_eligible):
        number, position = divmod(int(blocks.context_stop[block]), 20)
        assert blocks.context_start[block] == 20 * number
        assert blocks.position[block] == position
        assert blocks.anchor_token_id[block] == packed[number].token_ids[position]


def test_a_window_keeps_the_positions_of_its_sequence():
    sequence = make_supervision(1)
    window = Supervision(
        sequence_id=sequence.sequence_id,
        token_ids=sequence.token_ids[10:],
        loss_mask=sequence.loss_mask[10:],
        first_position=10,
    )
    blocks = make_blocks(
        [window], num_anchors=4, weight_of_offset=offset_weights(5), seed=0, epoch=0
    )
    np.testing.assert_array_equal(blocks.position, blocks.context_stop + 10)


def test_a_batch_without_supervision_is_all_padding():
    silent = Supervision(
        sequence_id="a", token_ids=np.arange(9, dtype=np.int32), loss_mask=np.zeros(9, np.bool_)
    )
    blocks = make_blocks(
        [silent], num_anchors=4, weight_of_offset=offset_weights(5), seed=0, epoch=0
    )
    assert blocks.num_valid == 0
    assert len(blocks.position) == 4
