"""The attention kernel, interpreted and on a GPU, gives what attention by definition gives."""

from collections.abc import Callable

import pytest

SCRIPT = """
import itertools, sys
import torch
from stage1_extract.attention_kernel import attend_by_tiles, can_attend
from stage1_extract.plain_attention import attend_by_scores, attend_in_rectangles
from stage1_extract.query_tiles import tiles_of
from functools import partial

device = sys.argv[1]
dtype = torch.float32 if device == "cpu" else torch.bfloat16
tolerance = 1e-5 if device == "cpu" else 2e-2
RULES = [
    {}, {"scaling": 0.3}, {"sliding_window": 1}, {"sliding_window": 37}, {"softcap": 2.0},
    {"softcap": 0.5, "sliding_window": 70}, {"s_aux": True}, {"s_aux": True, "sliding_window": 5},
]
LENGTHS = ([5], [1, 64, 1], [63, 65, 128, 3, 150])

def states(num_tokens, *, width, num_heads, num_kv_heads, is_token_major):
    generator = torch.Generator().manual_seed(num_tokens + width)
    for heads in (num_heads, num_kv_heads, num_kv_heads):
        shape = (1, num_tokens, heads, width) if is_token_major else (1, heads, num_tokens, width)
        made = torch.randn(shape, generator=generator).to(device, dtype)
        yield made.transpose(1, 2) if is_token_major else made

def expected(made, starts, *, scaling=None, sliding_window=None, softcap=None, s_aux=None):
    rule = {"softcap": softcap, "sliding_window": sliding_window, "scaling": scaling}
    attend = partial(attend_by_scores, s_aux=s_aux, **rule)
    wide = [each.float() for each in made]
    return attend_in_rectangles(*wide, starts, attend, max_scores=2**24)

def check(lengths, rule, *, width, heads, is_token_major):
    starts = tuple(itertools.accumulate(lengths, initial=0))
    made = list(states(starts[-1], width=width, num_heads=heads[0], num_kv_heads=heads[1],
                       is_token_major=is_token_major))
    if rule.get("s_aux"):
        rule = {**rule, "s_aux": torch.linspace(-1, 2, heads[0]).to(device, dtype)}
    assert can_attend(*made) == (device == "cuda")
    tiles = tiles_of(starts).to(device)
    found = attend_by_tiles(*made, tiles, **rule)
    torch.testing.assert_close(
        found.float(), expected(made, starts, **rule), rtol=tolerance, atol=tolerance
    )
    return made, tiles, found

for lengths, rule in itertools.product(LENGTHS, RULES):
    check(lengths, rule, width=32, heads=(4, 2), is_token_major=True)
for width in (64, 128, 256):
    check(LENGTHS[2], {"sliding_window": 70}, width=width, heads=(3, 1), is_token_major=True)
check(LENGTHS[2], {}, width=32, heads=(2, 2), is_token_major=False)

# Another sequence's NaN and another sequence's tokens change nothing.
made, tiles, found = check([64, 30, 40], {}, width=32, heads=(2, 1), is_token_major=True)
for each in made:
    each[:, :, :64] = torch.nan
    each[:, :, 94:] = torch.nan
again = attend_by_tiles(*made, tiles)
assert torch.equal(again[:, 64:94], found[:, 64:94])

# Nor do tiles of nothing.
made, tiles, found = check([70, 10], {}, width=32, heads=(2, 1), is_token_major=True)
again = attend_by_tiles(*made, torch.nn.functional.pad(tiles, (0, 0, 0, 5)))
assert torch.equal(again, found)
"""


def test_the_kernel_is_attention_by_definition(
    run_script: Callable[..., None], device: str
) -> None:
    run_script(SCRIPT, device=device)


@pytest.mark.parametrize(
    ("room_bytes", "width", "num_stages"),
    [
        (232_448, 128, 3),  # H100, H200, B200
        (232_448, 256, 2),
        (101_376, 128, 2),  # RTX 5090: room for less
        (101_376, 256, 0),
        (1_000, 32, 0),
    ],
)
def test_as_many_tiles_as_shared_memory_holds(room_bytes: int, width: int, num_stages: int) -> None:
    from stage1_extract.attention_kernel import stages_in

    assert stages_in(room_bytes, width) == num_stages
