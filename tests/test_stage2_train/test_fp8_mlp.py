"""The MLP with fp8 products is near the plain one, its gradients too, compiled or not."""

import copy

import pytest
import torch

from stage2_train.drafter import DrafterMlp
from stage2_train.fp8 import use_fp8
from stage2_train.fp8_mlp import Fp8Mlp


@pytest.fixture
def plain(architecture) -> DrafterMlp:
    torch.manual_seed(0)
    mlp = DrafterMlp(architecture)
    with torch.no_grad():
        for weight in mlp.parameters():
            weight.normal_(std=0.2)
    return mlp.bfloat16()


def results_of(mlp: DrafterMlp, hidden: torch.Tensor, above: torch.Tensor) -> list[torch.Tensor]:
    leaf = hidden.clone().requires_grad_()
    mapped = mlp(leaf)
    return [mapped.detach(), *torch.autograd.grad(mapped, (leaf, *mlp.parameters()), above)]


def test_it_is_near_the_plain_one(plain):
    fast = copy.deepcopy(plain)
    use_fp8(fast, weight_gradients=True)
    assert type(fast) is Fp8Mlp
    assert fast.state_dict().keys() == plain.state_dict().keys()
    hidden, above = torch.randn(2, 2, 13, 32).bfloat16()
    expected, found = (results_of(mlp, hidden, above) for mlp in (plain, fast))
    assert found[0].shape == expected[0].shape
    for ours, exact in zip(found, expected, strict=True):
        assert ours.dtype == exact.dtype
        assert (ours - exact).float().norm() < 0.08 * exact.float().norm()


def test_without_gradients_it_multiplies_as_a_served_drafter(plain):
    fast = copy.deepcopy(plain)
    use_fp8(fast, weight_gradients=True)
    hidden = torch.randn(5, 32).bfloat16()
    with torch.no_grad():
        assert torch.equal(fast(hidden), plain(hidden))


COMPILED = """
import torch
from stage2_train.fp8 import use_fp8
from torch import nn
from stage2_train.drafter import DrafterMlp

mlp = DrafterMlp.__new__(DrafterMlp)
nn.Module.__init__(mlp)
torch.manual_seed(0)
mlp.gate_proj, mlp.up_proj = (nn.Linear(32, 48, bias=False) for _ in range(2))
mlp.down_proj = nn.Linear(48, 32, bias=False)
mlp.bfloat16()
use_fp8(mlp, weight_gradients=True)
hidden, above = torch.randn(2, 20, 32).bfloat16()
results = []
for run in (mlp, torch.compile(mlp, fullgraph=True, dynamic=False, backend="aot_eager")):
    leaf = hidden.clone().requires_grad_()
    mapped = run(leaf)
    results.append([mapped, *torch.autograd.grad(mapped, (leaf, *mlp.parameters()), above)])
assert all(torch.equal(plain, fast) for plain, fast in zip(*results, strict=True))
"""


def test_it_compiles_whole(run_script):
    run_script(COMPILED)
