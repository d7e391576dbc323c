"""The fp8 kernels, interpreted and on a GPU, give the plain codes and the plain transpose."""

import pytest

SCRIPT = """
import sys
import torch
from stage2_train.fp8 import plain_transposed_codes, quantize_rows
from stage2_train.fp8_kernels import (
    quantize_rows_fused, swiglu_codes_fused, swiglu_slope_codes_fused, transpose_codes,
)
from stage2_train.fp8_mlp import plain_swiglu_codes, plain_swiglu_slope_codes

torch.set_default_device(sys.argv[1])
torch.manual_seed(0)
for shape in ((40, 48), (130, 260), (16, 16)):
    codes = quantize_rows(torch.randn(shape)).codes
    found, expected = (f(codes, None) for f in (transpose_codes, plain_transposed_codes))
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    factors = 2.0 ** -torch.randint(0, 30, (shape[0], 1)).float()
    found = transpose_codes(codes, factors).float()
    expected = plain_transposed_codes(codes, factors).float()
    # The interpreter cuts subnormal codes, 2^-9 apart, off where a GPU rounds them.
    tolerance = 0 if sys.argv[1] == "cuda" else 2.0**-9
    assert (found - expected).abs().max() <= tolerance
    for dtype in (torch.bfloat16, torch.float32):
        matrix = (torch.randn(shape) * 10.0 ** torch.randint(-4, 4, (shape[0], 1))).to(dtype)
        matrix[0] = 0
        if sys.argv[1] == "cpu":
            # The interpreter does not round: numbers that are codes already.
            rounded = quantize_rows(matrix)
            matrix = (rounded.codes.float() * rounded.scales).to(dtype)
        found, expected = quantize_rows_fused(matrix), quantize_rows(matrix)
        assert torch.equal(found.scales, expected.scales)
        assert torch.equal(found.codes.float(), expected.codes.float())
for num_tokens, width in ((5, 48), (3, 272)):
    above, gate, up = 3 * torch.randn(3, num_tokens, width)
    weight_scales = 2.0 ** torch.randint(-9, 0, (2 * width, 1)).float()
    pairs = (
        (swiglu_codes_fused(gate, up), plain_swiglu_codes(gate, up)),
        (
            swiglu_slope_codes_fused(above, gate, up, weight_scales),
            plain_swiglu_slope_codes(above, gate, up, weight_scales),
        ),
    )
    for found, expected in pairs:
        assert torch.equal(found.scales, expected.scales)
        codes, expected_codes = found.codes.float(), expected.codes.float()
        is_near = (codes - expected_codes).abs() <= expected_codes.abs() / 8 + 2.0**-9
        if sys.argv[1] == "cpu":
            # The interpreter loses the carry where a code is rounded up to a power of two.
            is_near |= codes == expected_codes / 2
        assert is_near.all()
"""


def test_kernels_give_what_plain_operations_give(run_script, device):
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    run_script(SCRIPT, device=device)
