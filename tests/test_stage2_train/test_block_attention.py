"""Block attention, interpreted and on a GPU, is plain attention, and so are its gradients."""

import itertools

import pytest
import torch

from stage2_train.architecture import AttentionRule
from stage2_train.attention import block_mask
from stage2_train.block_attention import query_ranges, suits
from stage2_train.flex import visible_runs

RULES = [
    AttentionRule(is_causal=is_causal, sliding_window=window)
    for is_causal, window in itertools.product((False, True), (None, 9, 200))
]


def make_anchors(num_context_tokens: int, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted anchors of three packed sequences; the last two blocks are padding."""
    generator = torch.Generator().manual_seed(num_blocks)
    cuts = [0, num_context_tokens // 7, num_context_tokens // 2]
    end = num_context_tokens - 3
    stops, _ = torch.randint(1, end, (num_blocks - 2,), generator=generator).sort()
    starts = torch.tensor([max(cut for cut in cuts if cut <= stop) for stop in stops.tolist()])
    padding = torch.tensor([end, end])
    return torch.cat((starts, padding)), torch.cat((stops, padding))


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("num_context_tokens", [256, 700])
def test_ranges_hold_every_query_that_sees_a_tile_and_only_whole_ones_inside(
    num_context_tokens, rule
):
    context_start, context_stop = make_anchors(num_context_tokens, 32)
    shape = {"num_context_tokens": num_context_tokens, "block_size": 16, "rule": rule}
    seen = block_mask(context_start, context_stop, **shape)[:, :num_context_tokens]
    ranges = query_ranges(
        visible_runs(context_start, context_stop, **shape),
        num_context_tokens=num_context_tokens,
        tile_keys=128,
    )
    tiles = seen.split(128, dim=1)
    assert ranges.shape == (len(tiles), 4)
    num_whole = 0
    for tile, (first, full, rest, last) in zip(tiles, ranges.tolist(), strict=True):
        touched = tile.any(dim=1)
        assert not touched[:first].any()
        assert not touched[last:].any()
        assert tile[full:rest].all()
        num_whole += max(rest - full, 0)
    assert num_whole > 0 or num_context_tokens == 256 or rule.sliding_window == 9


def test_blocks_that_tiles_cannot_hold_are_left_to_flex_attention():
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "num_queries": 8192}
    assert suits(**shape, block_size=16)
    assert not suits(**shape, block_size=10)
    assert not suits(**{**shape, "head_dim": 96}, block_size=16)
    assert not suits(**{**shape, "num_queries": 8192 + 16}, block_size=16)
    # Five heads to a key head lie one after the other.
    assert suits(**{**shape, "num_heads": 40}, block_size=16)


SCRIPT = """
import dataclasses
import itertools
import sys
import torch
from stage2_train import block_attention
from stage2_train.architecture import AttentionRule
from stage2_train.attention import block_mask, make_sdpa_attend
from stage2_train.flex import visible_runs

device = torch.device(sys.argv[1])
is_gpu = device.type == "cuda"
if not is_gpu:
    # Small tiles, so that a small problem has several of each kind.
    for name, rows, keys in (
        ("_FORWARD", 64, 32), ("_BACKWARD_ROWS", 64, 32), ("_BACKWARD_CONTEXT", 32, 64)
    ):
        tiling = block_attention.Tiling(rows=rows, keys=keys, num_warps=4, num_stages=1)
        setattr(block_attention, name, tiling)

def make_anchors(num_context_tokens, num_blocks):
    generator = torch.Generator().manual_seed(num_blocks)
    cuts = [0, num_context_tokens // 7, num_context_tokens // 2]
    end = num_context_tokens - 3
    stops, _ = torch.randint(1, end, (num_blocks - 2,), generator=generator).sort()
    starts = torch.tensor([max(cut for cut in cuts if cut <= stop) for stop in stops.tolist()])
    padding = torch.tensor([end, end])
    return torch.cat((starts, padding)), torch.cat((stops, padding))

dtype, scale = (torch.bfloat16, 4) if is_gpu else (torch.float32, 1)
rules = [AttentionRule(is_causal=c, sliding_window=w) for c, w in
         ((False, None), (True, None), (False, 9), (True, 60))]
cases = [(200, 16, 16, 8, 2, rule) for rule in rules]
cases += [(300, 16, 8, 6, 2, rules[0]), (128, 16, 16, 5, 1, rules[0])]
for num_context, num_blocks, block_size, num_heads, num_kv_heads, rule in cases:
    num_context, num_blocks = num_context * scale, num_blocks * scale
    head_dim = 64 if is_gpu else 16
    start, stop = (part.to(device) for part in make_anchors(num_context, num_blocks))
    shape = {"num_context_tokens": num_context, "block_size": block_size, "rule": rule}
    num_queries = num_blocks * block_size
    assert block_attention.suits(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        num_queries=num_queries, block_size=block_size,
    )
    parts = [
        torch.randn(tokens, heads, head_dim, device=device, dtype=dtype).requires_grad_()
        for tokens, heads in (
            (num_queries, num_heads), (num_context, num_kv_heads), (num_context, num_kv_heads),
            (num_queries, num_kv_heads), (num_queries, num_kv_heads),
        )
    ]
    slopes = torch.randn_like(parts[0])
    exact = [part.detach().double().requires_grad_() for part in parts]
    keys, values = (
        torch.cat((exact[n], exact[n + 2])).transpose(0, 1)[None] for n in (1, 2)
    )
    attend = make_sdpa_attend([block_mask(start, stop, **shape)])
    expected = attend(exact[0].transpose(0, 1)[None], keys, values, 0)[0].transpose(0, 1)
    wanted = [expected, *torch.autograd.grad(expected, exact, slopes.double())]
    runs = visible_runs(start, stop, **shape)
    tables = block_attention.block_tables(runs, num_context_tokens=num_context)
    results = []
    for _ in range(2):
        mixed = block_attention.attend_to_blocks(
            parts[0], (parts[1], parts[2]), (parts[3], parts[4]), tables
        )
        results.append([mixed, *torch.autograd.grad(mixed, parts, slopes)])
    for exact_part, found, again in zip(wanted, *results, strict=True):
        assert torch.equal(found, again)
        error = float((found - exact_part).norm() / exact_part.norm())
        assert error < (1e-2 if is_gpu else 1e-5), (rule, num_heads, error)
"""


def test_attention_and_gradients_are_the_plain_ones_and_repeat_themselves(run_script):
    run_script(SCRIPT)


@pytest.mark.gpu
def test_attention_and_gradients_on_a_gpu(run_script):
    run_script(SCRIPT, device="cuda")
