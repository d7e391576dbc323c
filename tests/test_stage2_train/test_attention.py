"""The mask is its rule, cell by cell; every way to attend gives the plain one's values."""

import itertools

import pytest
import torch

from stage2_train.architecture import AttentionRule
from stage2_train.attention import (
    block_mask,
    decoding_mask,
    make_decoding_attend,
    make_sdpa_attend,
    make_segment_attend,
    segments_of,
)

RULES = [
    AttentionRule(is_causal=is_causal, sliding_window=window)
    for is_causal, window in itertools.product((False, True), (None, 1, 3, 7))
]
# Three sequences in 20 context tokens; the second has no block, the last block is padding.
CONTEXT_START = torch.tensor([2, 2, 2, 13, 13, 18])
CONTEXT_STOP = torch.tensor([2, 5, 7, 14, 17, 18])
NUM_CONTEXT_TOKENS, BLOCK_SIZE = 20, 4


def sees(query: int, key: int, rule: AttentionRule) -> bool:
    """The rule, told as DFlash tells it, for one query and one key."""
    block, offset = divmod(query, BLOCK_SIZE)
    start, anchor = int(CONTEXT_START[block]), int(CONTEXT_STOP[block])
    if key < NUM_CONTEXT_TOKENS:
        # Places in the batch differ as positions do: the query stands `offset` after its anchor.
        distance = anchor + offset - key
        is_seen = start <= key < anchor
    else:
        key_block, key_offset = divmod(key - NUM_CONTEXT_TOKENS, BLOCK_SIZE)
        distance = offset - key_offset
        is_seen = key_block == block
    if rule.is_causal and distance < 0:
        return False
    if rule.sliding_window is not None and abs(distance) >= rule.sliding_window:
        return False
    return is_seen


def mask_of(rule: AttentionRule) -> torch.Tensor:
    return block_mask(
        CONTEXT_START,
        CONTEXT_STOP,
        num_context_tokens=NUM_CONTEXT_TOKENS,
        block_size=BLOCK_SIZE,
        rule=rule,
    )


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_mask_is_its_rule_cell_by_cell(rule):
    mask = mask_of(rule)
    num_queries = len(CONTEXT_START) * BLOCK_SIZE
    assert mask.shape == (num_queries, NUM_CONTEXT_TOKENS + num_queries)
    for query, key in itertools.product(*map(range, mask.shape)):
        assert mask[query, key] == sees(query, key, rule), (query, key)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_decoding_mask_is_the_block_mask_of_one_block(rule):
    # One sequence whose 9 first tokens are context and whose block starts at position 9.
    training = block_mask(
        torch.tensor([0]),
        torch.tensor([9]),
        num_context_tokens=9,
        block_size=BLOCK_SIZE,
        rule=rule,
    )
    decoding = decoding_mask(BLOCK_SIZE, 9 + BLOCK_SIZE, rule=rule, device=torch.device("cpu"))
    if decoding is None:
        assert training.all()
    else:
        assert torch.equal(decoding, training)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_decoding_mask_is_the_official_one(rule):
    model = pytest.importorskip("dflash.model", reason="the official package is not installed")
    if not rule.is_causal and rule.sliding_window is None:
        return
    official = model._attention_mask(
        torch.zeros(1, 1, 4, 8),
        torch.zeros(1, 1, 11, 8),
        is_causal=rule.is_causal,
        sliding_window=rule.sliding_window,
    )
    ours = decoding_mask(4, 11, rule=rule, device=torch.device("cpu"))
    assert torch.equal(ours, official[0, 0])


def random_heads(num_keys: int, *, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    num_queries = len(CONTEXT_START) * BLOCK_SIZE
    shapes = [(1, 4, num_queries, 8), (1, 2, num_keys, 8), (1, 2, num_keys, 8)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


def test_attention_by_segments_is_plain_attention():
    rules = (RULES[0], RULES[6], RULES[0])
    heads = random_heads(NUM_CONTEXT_TOKENS + len(CONTEXT_START) * BLOCK_SIZE)
    plain = make_sdpa_attend([mask_of(rule) for rule in rules])
    segments = segments_of(
        CONTEXT_START,
        CONTEXT_STOP,
        num_context_tokens=NUM_CONTEXT_TOKENS,
        block_size=BLOCK_SIZE,
        rules=rules,
        dtype=torch.float64,
    )
    by_segments = make_segment_attend(segments)
    for layer_index in range(len(rules)):
        expected = plain(*heads, layer_index)
        found = by_segments(*heads, layer_index)
        torch.testing.assert_close(found, expected)
        above = torch.randn(expected.shape, dtype=torch.float64)
        torch.testing.assert_close(
            torch.autograd.grad(found, heads, above), torch.autograd.grad(expected, heads, above)
        )


def test_decoding_attends_to_all_where_no_rule_forbids():
    queries, keys, values = random_heads(30)
    unmasked = make_sdpa_attend([None])(queries, keys, values, 0)
    decoding = make_decoding_attend([AttentionRule()])
    assert torch.equal(decoding(queries, keys, values, 0), unmasked)
