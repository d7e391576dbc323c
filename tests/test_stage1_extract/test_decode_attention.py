"""Decode attention: the kernel computes what its reference does."""

from collections.abc import Callable

import pytest
import torch

from stage1_extract.decode_attention import attend_plainly


def inputs(
    *, heads: int, kv_heads: int, room: int, width: int, device: str, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    num_tokens = torch.tensor([1, 64, 65, room, 3], device=device)
    return (
        drawn(5, heads, width),
        drawn(5, kv_heads, room, width),
        drawn(5, kv_heads, room, width),
        num_tokens,
    )


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(9, 3, 64), (4, 4, 16), (14, 2, 64)])
def test_reference_is_attention_over_what_each_slot_holds(
    heads: int, kv_heads: int, width: int
) -> None:
    query, key, value, num_tokens = inputs(
        heads=heads, kv_heads=kv_heads, room=70, width=width, device="cpu", dtype=torch.float32
    )
    found = attend_plainly(query, key, value, num_tokens, 0.2)
    for slot, count in enumerate(num_tokens.tolist()):
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[slot, :, None],
            key[slot, :, :count],
            value[slot, :, :count],
            scale=0.2,
            enable_gqa=True,
        )
        torch.testing.assert_close(found[slot], expected[:, 0])


def test_what_lies_behind_a_slots_tokens_does_not_count() -> None:
    query, key, value, num_tokens = inputs(
        heads=4, kv_heads=2, room=70, width=16, device="cpu", dtype=torch.float32
    )
    expected = attend_plainly(query, key, value, num_tokens, 0.25)
    for slot, count in enumerate(num_tokens.tolist()):
        key[slot, :, count:] = float("nan")
        value[slot, :, count:] = float("nan")
    torch.testing.assert_close(attend_plainly(query, key, value, num_tokens, 0.25), expected)


KERNEL_SCRIPT = """
import sys
import torch
from stage1_extract.decode_attention import attend_by_kernel, attend_plainly

device = sys.argv[1]
dtype = torch.float32 if device == "cpu" else torch.bfloat16
tolerance = 1e-5 if device == "cpu" else 2e-2
generator = torch.Generator().manual_seed(0)
for heads, kv_heads, width in ((9, 3, 64), (4, 4, 16), (14, 2, 64), (32, 8, 128)):
    shapes = ((5, heads, width), (5, kv_heads, 200, width), (5, kv_heads, 200, width))
    states = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    num_tokens = torch.tensor([1, 64, 65, 200, 3], device=device)
    found = attend_by_kernel(*states, num_tokens, width**-0.5)
    expected = attend_plainly(*states, num_tokens, width**-0.5)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
"""


def test_kernel_is_the_reference(run_script: Callable[..., None], device: str) -> None:
    run_script(KERNEL_SCRIPT, device=device)
