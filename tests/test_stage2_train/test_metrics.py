"""Sums over blocks: right by hand, and the same however batches are cut."""

import pytest
import torch

from stage2_train.metrics import BlockSums, block_sums, simulated_acceptance_length, summarize

BLOCK_SIZE = 4
# Offsets 1 to 3 of four blocks: right, wrong, or without a label that counts.
RIGHT, WRONG, NONE = 1, 0, None
BLOCKS = [
    [RIGHT, RIGHT, WRONG],
    [RIGHT, RIGHT, RIGHT],
    [WRONG, RIGHT, RIGHT],
    [RIGHT, NONE, NONE],
]


def sums_of(blocks: list[list[int | None]]) -> BlockSums:
    rows = [
        (block * BLOCK_SIZE + offset, value)
        for block, values in enumerate(blocks)
        for offset, value in enumerate(values, start=1)
        if value is not None
    ]
    index, correct = zip(*rows, strict=True)
    return block_sums(
        row_loss=torch.tensor([2.0 - value for value in correct]),
        is_correct=torch.tensor(correct, dtype=torch.bool),
        row_weight=torch.tensor([1.0 / (i % BLOCK_SIZE) for i in index]),
        row_index=torch.tensor(index),
        num_blocks=len(blocks),
        block_size=BLOCK_SIZE,
    )


def test_sums_by_hand():
    sums = sums_of(BLOCKS)
    assert sums.num_rows.tolist() == [0, 4, 3, 3]
    assert sums.num_correct.tolist() == [0, 3, 3, 2]
    assert sums.num_reached.tolist() == [0, 4, 2, 2]
    assert sums.num_accepted.tolist() == [0, 3, 2, 1]
    summary = summarize(sums)
    assert summary["accuracy_by_offset"] == pytest.approx([0.75, 1.0, 2 / 3], abs=1e-6)
    assert summary["accuracy"] == pytest.approx(0.8)
    # 1 + 3/4 + 3/4 * 2/2 + 3/4 * 2/2 * 1/2
    assert simulated_acceptance_length(sums) == pytest.approx(2.875)


def test_blocks_without_a_cut_give_the_plain_mean():
    whole = BLOCKS[:3]
    lengths = [3, 4, 1]
    assert simulated_acceptance_length(sums_of(whole)) == pytest.approx(sum(lengths) / 3)


def test_sums_of_parts_are_the_sums_of_the_whole():
    whole = sums_of(BLOCKS)
    parts = sums_of(BLOCKS[:1]) + sums_of(BLOCKS[1:])
    found, expected = summarize(parts), summarize(whole)
    assert found.pop("loss") == pytest.approx(expected.pop("loss"))
    assert found == expected


def test_padding_changes_nothing():
    whole = sums_of(BLOCKS)
    padded = sums_of([*BLOCKS, [NONE, NONE, NONE]])
    assert summarize(padded) == summarize(whole)


def test_nothing_seen_is_no_error():
    empty = block_sums(
        row_loss=torch.zeros(0),
        is_correct=torch.zeros(0, dtype=torch.bool),
        row_weight=torch.zeros(0),
        row_index=torch.zeros(0, dtype=torch.int64),
        num_blocks=2,
        block_size=BLOCK_SIZE,
    )
    assert summarize(empty)["simulated_acceptance_length"] == 1.0
