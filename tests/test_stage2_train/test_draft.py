"""Drafting from cached context obeys the mask that training uses."""

import pytest
import torch

from stage2_train.architecture import AttentionRule
from stage2_train.attention import block_mask
from stage2_train.draft import ContextCache, draft_logits, draft_mask, head_of

RULES = [
    AttentionRule(),
    AttentionRule(is_causal=True),
    AttentionRule(is_causal=True, sliding_window=4),
    AttentionRule(sliding_window=4),
]


@pytest.mark.parametrize("rule", RULES)
def test_the_mask_is_that_of_training_cell_by_cell(rule):
    anchors, block_size, num_tokens = torch.tensor([0, 1, 6, 9]), 5, 9
    drafted = draft_mask(
        anchors,
        torch.full_like(anchors, block_size),
        num_visible=num_tokens,
        block_size=block_size,
        rule=rule,
    )
    for row, anchor in enumerate(anchors):
        trained = block_mask(
            torch.zeros(1, dtype=torch.long),
            anchor[None],
            num_context_tokens=num_tokens,
            block_size=block_size,
            rule=rule,
        )
        assert torch.equal(drafted[row, 0], trained)


@pytest.mark.parametrize("rule", RULES)
def test_a_shorter_block_hides_its_missing_tokens_only(rule):
    anchors = torch.tensor([6, 6])
    whole, cut = draft_mask(anchors, torch.tensor([5, 3]), num_visible=6, block_size=5, rule=rule)[
        :, 0
    ]
    assert torch.equal(cut[:, :9], whole[:, :9])
    assert not cut[:, 9:].any()


def some_states(drafter, *, num_rows=2, num_tokens=8):
    torch.manual_seed(1)
    return torch.randn(num_rows, num_tokens, drafter.fc.in_features, dtype=drafter.fc.weight.dtype)


def draft(drafter, head, states, anchors, *, extra_slots=0, num_visible=None):
    num_rows, num_tokens, _ = states.shape
    context = ContextCache(drafter, batch_size=num_rows, num_slots=num_tokens + extra_slots)
    positions = torch.arange(num_tokens).expand(num_rows, -1)
    context.write(states, positions, positions)
    return draft_logits(
        drafter,
        head,
        context,
        anchor_ids=torch.tensor([3] * num_rows),
        anchors=anchors,
        block_lengths=torch.full_like(anchors, drafter.architecture.block_size),
        num_visible=num_visible or num_tokens,
    )


def test_states_at_and_after_the_anchor_change_nothing(make_target, make_drafter, make_head):
    target = make_target().double()
    drafter = make_drafter(target)
    head = head_of(drafter, make_head(target))
    states, anchors = some_states(drafter), torch.tensor([4, 6])
    changed = states.clone()
    changed[0, 4:], changed[1, 6:] = 100.0, -100.0
    before, after = (draft(drafter, head, each, anchors) for each in (states, changed))
    assert torch.equal(before, after)
    changed[0, 3] = 100.0
    assert not torch.equal(before[0], draft(drafter, head, changed, anchors)[0])


def test_unused_slots_and_late_slots_change_nothing(make_target, make_drafter, make_head):
    target = make_target().double()
    drafter = make_drafter(target)
    head = head_of(drafter, make_head(target))
    states, anchors = some_states(drafter), torch.tensor([4, 6])
    plain = draft(drafter, head, states, anchors)
    more = draft(drafter, head, states, anchors, extra_slots=7, num_visible=13)
    fewer = draft(drafter, head, states, anchors, num_visible=6)
    torch.testing.assert_close(more, plain)
    torch.testing.assert_close(fewer, plain)


def test_context_written_in_pieces_over_rejected_tokens_is_the_same(
    make_target, make_drafter, make_head
):
    target = make_target().double()
    drafter = make_drafter(target)
    states = some_states(drafter, num_rows=1)
    whole = ContextCache(drafter, batch_size=1, num_slots=8)
    pieces = ContextCache(drafter, batch_size=1, num_slots=8)
    positions = torch.arange(8)[None]
    whole.write(states, positions, positions)
    rejected = torch.full_like(states[:, :5], 9.0)
    pieces.write(rejected, positions[:, :5], positions[:, :5])
    for start, stop in ((0, 3), (3, 8)):
        part = slice(start, stop)
        pieces.write(states[:, part], positions[:, part], positions[:, part])
    for one, other in zip(whole.visible(8), pieces.visible(8), strict=True):
        torch.testing.assert_close(one, other)


def test_the_drafters_own_scales_are_used(make_target, make_drafter, make_head):
    target = make_target()
    drafter = make_drafter(
        target, input_embedding_scale=3.0, output_multiplier=0.5, final_logit_softcapping=2.0
    )
    head = head_of(drafter, make_head(target))
    token_ids, hidden = torch.tensor([5]), torch.randn(1, 32)
    raw = target.lm_head(hidden) * 0.5
    torch.testing.assert_close(head.embed(token_ids), target.model.embed_tokens(token_ids) * 3.0)
    torch.testing.assert_close(head.logits(hidden), torch.tanh(raw / 2.0) * 2.0)
