"""D-PACE's weights are their formula, block by block, and reach the gradient."""

import json
import math

import pytest
import torch
from pydantic import ValidationError

from stage2_train.config import LossConfig
from stage2_train.pace import pace_weights, weighted_later
from stage2_train.train import EXIT_DONE, train_drafter

BLOCK_SIZE = 5


def pace_by_hand(probabilities: dict[int, float], smoothing: float) -> dict[int, float]:
    """Weights of one block from its probabilities by offset; offsets without a label are absent."""
    smoothed = {
        offset: (1 - smoothing) * probabilities[offset] + smoothing
        if offset in probabilities
        else 1
        for offset in range(1, BLOCK_SIZE)
    }
    reached = {m: math.prod(smoothed[j] for j in range(1, m + 1)) for m in range(1, BLOCK_SIZE)}
    return {k: sum(reached[m] for m in probabilities if m >= k) for k in probabilities}


@pytest.mark.parametrize("smoothing", [0.0, 0.5, 1.0])
def test_weights_are_the_formula(smoothing):
    blocks = [{1: 0.9, 2: 0.5, 3: 0.1, 4: 0.7}, {}, {1: 0.2, 3: 0.6}]
    row_index = torch.tensor([b * BLOCK_SIZE + k for b, block in enumerate(blocks) for k in block])
    probability = torch.tensor([p for block in blocks for p in block.values()])
    found = pace_weights(
        probability, row_index, num_blocks=3, block_size=BLOCK_SIZE, smoothing=smoothing
    )
    expected = [w for block in blocks for w in pace_by_hand(block, smoothing).values()]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_certain_labels_weigh_what_is_left_of_the_block():
    row_index = torch.arange(1, BLOCK_SIZE)
    found = pace_weights(torch.ones(4), row_index, num_blocks=1, block_size=BLOCK_SIZE)
    assert found.tolist() == [4.0, 3.0, 2.0, 1.0]


def test_weights_filled_in_later_reach_the_gradient():
    hidden = torch.randn(3, 2, requires_grad=True)
    weights = torch.empty(3)
    loss = weighted_later(hidden, weights).square().sum()
    weights.copy_(torch.tensor([0.0, 1.0, 2.0]))
    loss.backward()
    torch.testing.assert_close(hidden.grad, 2 * hidden.detach() * weights[:, None])


def test_a_drafter_learns_at_its_own_pace(make_run):
    run = make_run(
        train={
            "epochs": 16,
            "num_anchors": 32,
            "checkpoint_steps": 1000,
            "validation_steps": 1000,
            "optimizer": {"learning_rate": 2e-2},
            "loss": {"weighting": "d_pace"},
            "batches_per_step": 2,
        },
    )
    assert train_drafter(run) == EXIT_DONE
    lines = (run.drafter_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert records[-2]["loss"] < 0.3 * records[0]["loss"]
    assert records[-1]["acceptance_length"] > 2.0


def test_pace_is_the_default_where_nothing_else_is_asked():
    assert LossConfig().is_paced
    assert not LossConfig(gamma=4.0).is_paced
    assert not LossConfig(min_weight=0.5).is_paced
    assert not LossConfig(kind="kl").is_paced
    assert not LossConfig(weighting="decay").is_paced
    assert LossConfig(weighting="d_pace", gamma=4.0).is_paced


def test_pace_goes_with_the_labels():
    with pytest.raises(ValidationError, match='d_pace" goes with'):
        LossConfig(kind="kl", weighting="d_pace")
