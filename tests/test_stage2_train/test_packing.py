"""Laws of packing an epoch with arrays: it is the plain packing, segment by segment."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage2_train.batches import Window, pack
from stage2_train.packing import PackedEpoch, pack_epoch

BATCH_TOKENS = 100


def whole(index: int) -> Window:
    return Window(sequence_index=index, start=0, stop=1)


def packed(num_tokens: np.ndarray, order: np.ndarray, **changes: int) -> PackedEpoch:
    settings = {"batch_tokens": BATCH_TOKENS, "segment_sequences": 30, "num_open": 5} | changes
    return pack_epoch(order.copy(), num_tokens[order], draw=whole, **settings)


def indices_of(epoch: PackedEpoch) -> list[list[int]]:
    return [[window.sequence_index for window in batch] for batch in epoch]


def plainly_packed(
    num_tokens: np.ndarray,
    order: np.ndarray,
    *,
    batch_tokens: int = BATCH_TOKENS,
    segment_sequences: int = 30,
    num_open: int = 5,
) -> list[list[int]]:
    found = []
    for start in range(0, len(order), segment_sequences):
        windows = [
            Window(sequence_index=index, start=0, stop=min(int(num_tokens[index]), batch_tokens))
            for index in order[start : start + segment_sequences].tolist()
        ]
        batches = pack(windows, batch_tokens=batch_tokens, num_open=num_open)
        found += [[window.sequence_index for window in batch] for batch in batches]
    return found


# Few segments are packed one by one, many together; some end in a piece of a segment.
@settings(deadline=None)
@given(
    st.integers(0, 400),
    st.sampled_from([1, 5, 64]),
    st.sampled_from([1, 7, 30]),
    st.integers(1, 150),
    st.integers(0, 9),
)
def test_segments_are_packed_as_the_plain_packing_does(
    count, num_open, segment_sequences, longest, seed
):
    rng = np.random.default_rng(seed)
    num_tokens, order = rng.integers(1, longest + 1, count), rng.permutation(count)
    changes = {"num_open": num_open, "segment_sequences": segment_sequences}
    epoch = packed(num_tokens, order, **changes)
    expected = plainly_packed(num_tokens, order, **changes)
    assert indices_of(epoch) == expected
    assert len(epoch) == len(expected)


def test_one_segment_is_the_plain_packing_of_the_whole_epoch():
    rng = np.random.default_rng(0)
    num_tokens, order = rng.integers(1, 60, 500), rng.permutation(500)
    epoch = packed(num_tokens, order, segment_sequences=65_536)
    assert indices_of(epoch) == plainly_packed(num_tokens, order, segment_sequences=500)


def test_batches_are_taken_by_place_and_by_range():
    num_tokens = np.random.default_rng(0).integers(1, 60, 300)
    epoch = packed(num_tokens, np.arange(300))
    batches = list(epoch)
    assert epoch[3] == batches[3]
    assert epoch[-1] == batches[-1]
    assert list(epoch[5:9]) == batches[5:9]
    assert list(epoch[5:][2:4]) == batches[7:9]
    assert list(epoch[9:5]) == []
    with pytest.raises(IndexError):
        epoch[len(batches)]
    with pytest.raises(ValueError, match="step 1"):
        epoch[::2]
