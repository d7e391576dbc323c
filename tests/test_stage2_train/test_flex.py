"""The analytic tables are torch's own, and FlexAttention under them is plain attention."""

import itertools

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from stage2_train.architecture import AttentionRule
from stage2_train.attention import block_mask, make_sdpa_attend, visible
from stage2_train.flex import make_block_mask, visible_runs

RULES = [
    AttentionRule(is_causal=is_causal, sliding_window=window)
    for is_causal, window in itertools.product((False, True), (None, 1, 9, 200))
]
TABLES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
TRANSPOSED = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")


def make_anchors(num_context_tokens: int, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted anchors of sequences of uneven length; the last two blocks are padding."""
    generator = torch.Generator().manual_seed(num_blocks)
    cuts = [0, num_context_tokens // 7, num_context_tokens // 2, num_context_tokens - 3]
    stops, _ = torch.randint(
        1, num_context_tokens - 3, (num_blocks - 2,), generator=generator
    ).sort()
    starts = torch.tensor([max(cut for cut in cuts[:3] if cut <= stop) for stop in stops.tolist()])
    padding = torch.tensor([num_context_tokens - 3] * 2)
    return torch.cat((starts, padding)), torch.cat((stops, padding))


@pytest.mark.parametrize(
    ("num_context_tokens", "num_blocks", "block_size"),
    [(512, 32, 16), (640, 24, 16), (300, 13, 10), (128, 64, 8), (256, 8, 128), (256, 5, 200)],
)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_tables_are_those_of_create_block_mask(num_context_tokens, num_blocks, block_size, rule):
    context_start, context_stop = make_anchors(num_context_tokens, num_blocks)
    num_queries = num_blocks * block_size
    shape = {"num_context_tokens": num_context_tokens, "block_size": block_size}

    def rule_by_cell(batch, head, query, key):
        return visible(
            query, key, context_start=context_start, context_stop=context_stop, rule=rule, **shape
        )

    num_keys = num_context_tokens + num_queries
    expected = create_block_mask(rule_by_cell, None, None, num_queries, num_keys, device="cpu")
    runs = visible_runs(context_start, context_stop, rule=rule, **shape)
    found = make_block_mask(runs, num_keys=num_keys)
    assert found.seq_lengths == expected.seq_lengths
    for name in TABLES + TRANSPOSED:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    query, key = torch.arange(num_queries)[:, None], torch.arange(num_keys)[None, :]
    none = torch.tensor(0)
    assert torch.equal(found.mask_mod(none, none, query, key), rule_by_cell(None, None, query, key))


def test_flex_attention_is_plain_attention():
    context_start, context_stop = make_anchors(256, 16)
    shape = {"num_context_tokens": 256, "block_size": 8}
    generator = torch.Generator().manual_seed(0)
    heads = [
        torch.randn(1, num_heads, num_tokens, 16, generator=generator)
        for num_heads, num_tokens in ((4, 128), (2, 384), (2, 384))
    ]
    for rule in RULES:
        runs = visible_runs(context_start, context_stop, rule=rule, **shape)
        flex_mask = make_block_mask(runs, num_keys=384)
        plain_mask = block_mask(context_start, context_stop, rule=rule, **shape)
        torch.testing.assert_close(
            flex_attention(*heads, block_mask=flex_mask, enable_gqa=True),
            make_sdpa_attend([plain_mask])(*heads, 0),
        )


def test_runs_never_end_before_they_start():
    context_start, context_stop = make_anchors(256, 16)
    for rule in RULES:
        runs = visible_runs(
            context_start, context_stop, num_context_tokens=256, block_size=8, rule=rule
        )
        assert (runs.context_start <= runs.context_stop).all()
        assert (runs.block_start < runs.block_stop).all()
