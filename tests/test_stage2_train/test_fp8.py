"""fp8 products are near the exact ones, and change neither names nor weights of a model."""

import pytest
import torch
from torch import nn

from stage2_train.fp8 import (
    FP8_MAX,
    Fp8Linear,
    freeze_fp8,
    product,
    quantize_rows,
    use_fp8,
)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.detach().float() - expected).norm() / expected.norm()).item()


def uneven(num_rows: int, num_columns: int, *, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = 10.0 ** torch.randint(-4, 4, (num_rows, 1), generator=generator)
    return torch.randn(num_rows, num_columns, generator=generator) * size


def test_rows_keep_their_size():
    matrix = uneven(20, 64, seed=0)
    rows = quantize_rows(matrix)
    assert relative_error(rows.codes.float() * rows.scales, matrix) < 0.03
    torch.testing.assert_close(rows.codes.float().abs().amax(dim=1), torch.full((20,), FP8_MAX))
    assert (quantize_rows(torch.zeros(3, 16)).codes.float() == 0).all()


def test_product_is_near_the_exact_one():
    left, right = uneven(20, 256, seed=0), uneven(30, 256, seed=1)
    found = product(quantize_rows(left), quantize_rows(right))
    assert found.dtype == torch.bfloat16
    expected = left @ right.t()
    # Judged where each entry has the size of its rows.
    size = left.norm(dim=1, keepdim=True) * right.norm(dim=1)
    assert ((found.float() - expected) / size).abs().max() < 0.02


def test_linear_maps_have_near_gradients():
    torch.manual_seed(0)
    plain = nn.Linear(64, 48, bias=False)
    fast = nn.Linear(64, 48, bias=False)
    fast.load_state_dict(plain.state_dict())
    use_fp8(fast.bfloat16())
    assert type(fast) is Fp8Linear
    hidden, above = torch.randn(2, 10, 64), torch.randn(2, 10, 48)
    results = []
    for linear in (plain, fast):
        leaf = hidden.to(linear.weight.dtype).requires_grad_()
        mapped = linear(leaf)
        gradients = torch.autograd.grad((mapped.float() * above).sum(), (leaf, linear.weight))
        results.append((mapped, *gradients))
    for expected, found in zip(*results, strict=True):
        assert relative_error(found, expected.detach()) < 0.05


def test_names_and_weights_stay():
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    use_fp8(model)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(w, before[name]) for name, w in model.state_dict().items())


def test_odd_widths_are_refused():
    with pytest.raises(ValueError, match="divisible by 16"):
        use_fp8(nn.Linear(20, 32, bias=False))


def test_a_frozen_weight_serves_both_products():
    weight = torch.randn(48, 32)
    frozen = freeze_fp8(weight)
    hidden, slopes = torch.randn(5, 32), torch.randn(5, 48)
    logits = product(quantize_rows(hidden), frozen.by_output)
    assert relative_error(logits, hidden @ weight.t()) < 0.05
    back = product(quantize_rows(slopes), frozen.by_input)
    assert relative_error(back, slopes @ weight) < 0.05
