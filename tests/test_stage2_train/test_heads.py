"""Heads normed and turned in one pass, interpreted and on a GPU, are the plain ones."""

import pytest
import torch

from stage2_train.drafter import RmsNorm, rotate
from stage2_train.heads import normed_and_turned


def test_a_cpu_norms_then_turns():
    heads, norm = torch.randn(5, 3, 16), RmsNorm(16, 1e-6)
    rotation = torch.randn(5, 16), torch.randn(5, 16)
    found = normed_and_turned(heads, norm, rotation)
    assert torch.equal(found, rotate(norm(heads), rotation))


SCRIPT = """
import sys
import torch
from stage2_train import head_kernels, heads
from stage2_train.drafter import rotate

# So few programs that each takes several turns; other scripts may run in this process.
usual, head_kernels._NUM_PROGRAMS = head_kernels._NUM_PROGRAMS, 3
device = torch.device(sys.argv[1])
torch.manual_seed(0)
for num_tokens, num_heads, head_dim in ((37, 4, 16), (50, 3, 64), (130, 1, 128)):
    parts = [torch.randn(num_tokens, num_heads, head_dim), 1 + torch.randn(head_dim) / 4]
    parts = [part.to(device).requires_grad_() for part in parts]
    angles = torch.randn(num_tokens, head_dim // 2, device=device).repeat(1, 2)
    rotation, slopes = (angles.cos(), angles.sin()), torch.randn_like(parts[0])
    exact = [part.detach().double().requires_grad_() for part in parts]
    normed = torch.nn.functional.rms_norm(exact[0], (head_dim,), exact[1], 1e-5)
    expected = rotate(normed, tuple(part.double() for part in rotation))
    wanted = [expected, *torch.autograd.grad(expected, exact, slopes.double())]
    results = []
    for _ in range(2):
        found = heads._normed_and_turned(*parts, *rotation, 1e-5)
        results.append([found, *torch.autograd.grad(found, parts, slopes)])
    for exact_part, found, again in zip(wanted, *results, strict=True):
        assert torch.equal(found, again)
        torch.testing.assert_close(found.double(), exact_part, rtol=1e-4, atol=1e-5)
head_kernels._NUM_PROGRAMS = usual
"""


def test_one_pass_gives_the_plain_heads_and_gradients(run_script, device):
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    run_script(SCRIPT, device=device)
