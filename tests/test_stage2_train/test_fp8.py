"""fp8 products are near the exact ones, and change neither names nor weights of a model."""

import pytest
import torch
from torch import nn

from stage2_train.config import TrainConfig
from stage2_train.fp8 import (
    FP8_MAX,
    Fp8Linear,
    Fp8Rows,
    freeze_fp8,
    input_gradient,
    power_of_two_above,
    product,
    quantize_rows,
    transposed_codes,
    use_fp8,
    weight_gradient,
)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.detach().float() - expected).norm() / expected.norm()).item()


def uneven(num_rows: int, num_columns: int, *, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = 10.0 ** torch.randint(-4, 4, (num_rows, 1), generator=generator)
    return torch.randn(num_rows, num_columns, generator=generator) * size


def numbers_of(rows: Fp8Rows) -> torch.Tensor:
    return rows.codes.double() * rows.scales.double()


def test_rows_keep_their_size():
    matrix = uneven(20, 64, seed=0)
    rows = quantize_rows(matrix)
    assert relative_error(numbers_of(rows), matrix) < 0.03
    largest = rows.codes.float().abs().amax(dim=1)
    assert ((largest > FP8_MAX / 2.1) & (largest <= FP8_MAX)).all()
    assert (quantize_rows(torch.zeros(3, 16)).codes.float() == 0).all()


def test_scales_are_powers_of_two():
    numbers = torch.tensor([1.0, 1.0000001, 2.0, 3.0, 4.0, 0.75, 2.0**-60, 448.0])
    expected = torch.tensor([1.0, 2.0, 2.0, 4.0, 4.0, 1.0, 2.0**-60, 512.0])
    assert torch.equal(power_of_two_above(numbers), expected)
    scales = quantize_rows(uneven(50, 16, seed=2)).scales
    assert (torch.frexp(scales).mantissa == 0.5).all()


def test_transposed_codes_are_the_same_numbers():
    rows = quantize_rows(uneven(20, 64, seed=0))
    assert torch.equal(transposed_codes(rows.codes, None).float()[:, :20], rows.codes.float().t())
    factors = 2.0 ** -torch.arange(20.0)[:, None]
    found = transposed_codes(rows.codes, factors).float()
    # Beyond the smallest exponent codes are spaced evenly, 2^-9 apart.
    error = (found[:, :20] - (rows.codes.float() * factors).t()).abs()
    assert error.max() <= 2.0**-10
    assert found.shape == (64, 32)
    assert (found[:, 20:] == 0).all()


def test_product_is_near_the_exact_one():
    left, right = uneven(20, 256, seed=0), uneven(30, 256, seed=1)
    found = product(quantize_rows(left), quantize_rows(right))
    assert found.dtype == torch.bfloat16
    expected = left @ right.t()
    # Judged where each entry has the size of its rows.
    size = left.norm(dim=1, keepdim=True) * right.norm(dim=1)
    assert ((found.float() - expected) / size).abs().max() < 0.02


def test_gradients_are_the_products_of_what_was_rounded():
    weight, hidden, above = torch.randn(48, 64), torch.randn(40, 64), uneven(40, 48, seed=1)
    above *= 1e-3
    of_rows, of_weight = quantize_rows(hidden), quantize_rows(weight)
    slopes = quantize_rows(above * of_weight.scales.t())
    rounded = numbers_of(slopes) / of_weight.scales.t().double()
    # bf16 keeps eight bits of the result; nothing but it is lost on the way.
    found = input_gradient(slopes, of_weight.codes)
    assert relative_error(found.double(), rounded @ numbers_of(of_weight)) < 2.0**-8
    found = weight_gradient(slopes, of_rows, of_weight.scales)
    assert relative_error(found.double(), rounded.t() @ numbers_of(of_rows)) < 2.0**-8
    assert found.shape == weight.shape


@pytest.mark.parametrize("weight_gradients", [False, True])
def test_linear_maps_have_near_gradients(weight_gradients):
    torch.manual_seed(0)
    plain = nn.Linear(64, 48, bias=False)
    fast = nn.Linear(64, 48, bias=False)
    fast.load_state_dict(plain.state_dict())
    use_fp8(fast.bfloat16(), weight_gradients=weight_gradients)
    assert type(fast) is Fp8Linear
    # 26 rows: the sum of the weight gradient is filled up to 32.
    hidden, above = torch.randn(2, 13, 64), torch.randn(2, 13, 48)
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
    with pytest.raises(ValueError, match="an LM head of 32 to 50"):
        freeze_fp8(torch.randn(50, 32))


def test_fp8_is_refused_in_a_drafter_of_float32():
    with pytest.raises(ValueError, match="fp8 products leave in bfloat16"):
        TrainConfig(fp8="all", dtype="float32")


def test_a_frozen_weight_serves_both_products():
    weight = torch.randn(48, 32)
    frozen = freeze_fp8(weight)
    hidden, slopes = torch.randn(5, 32), torch.randn(5, 48)
    logits = product(quantize_rows(hidden), frozen.by_output)
    assert relative_error(logits, hidden @ weight.t()) < 0.05
    back = product(quantize_rows(slopes), frozen.by_input)
    assert relative_error(back, slopes @ weight) < 0.05


def test_without_gradients_it_multiplies_as_a_served_drafter():
    plain = nn.Linear(32, 48, bias=False).bfloat16()
    fast = nn.Linear(32, 48, bias=False).bfloat16()
    fast.load_state_dict(plain.state_dict())
    use_fp8(fast)
    hidden = torch.randn(5, 32).bfloat16()
    assert not torch.equal(fast(hidden), plain(hidden))
    for no_gradients in (torch.no_grad, torch.inference_mode):
        with no_gradients():
            assert torch.equal(fast(hidden), plain(hidden))


COMPILED = """
from collections import Counter
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from stage2_train.fp8 import use_fp8

class Projections(nn.Module):
    def __init__(self):
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(64, width, bias=False) for width in (64, 32, 32))

    def forward(self, hidden, context):
        hidden, context = hidden * 2, context * 3
        query, key, value = self.maps
        return query(hidden), key(hidden), value(hidden), key(context), value(context)

counts = Counter()

def count(graph, inputs):
    counts.update(str(node.target) for node in graph.graph.nodes)
    return graph

backend = aot_autograd(
    fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition
)
torch.manual_seed(0)
model = Projections().bfloat16()
use_fp8(model, weight_gradients=True)
hidden = torch.randn(2, 20, 64).bfloat16().requires_grad_()
context = torch.randn(1, 33, 64).bfloat16().requires_grad_()
results = []
for run in (model, torch.compile(model, fullgraph=True, dynamic=False, backend=backend)):
    mapped = run(hidden, context)
    loss = sum((part.float() ** 2).sum() for part in mapped)
    leaves = [hidden, context, *model.parameters()]
    results.append([*mapped, *torch.autograd.grad(loss, leaves)])
assert all(torch.equal(plain, fast) for plain, fast in zip(*results, strict=True))
# Three weights, two inputs, five gradients: each is transposed once, whoever shares it.
assert counts["dflash_offline.transposed_codes.default"] == 3 + 2 + 5, counts
"""


def test_compiled_code_quantizes_once_what_maps_share(run_script):
    run_script(COMPILED)
