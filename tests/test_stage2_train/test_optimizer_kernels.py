"""The optimizer's kernels, interpreted and on a GPU, are torch's AdamW and gradient norm."""

import pytest

SCRIPT = """
import sys
import torch
from stage2_train.optimizer_kernels import adamw_update

torch.set_default_device(sys.argv[1])
torch.manual_seed(0)
for shape, dtype in (((5000,), torch.bfloat16), ((3, 70), torch.float32)):
    expected = torch.nn.Parameter(torch.randn(shape))
    plain = torch.optim.AdamW([expected], betas=(0.9, 0.95), weight_decay=0.1, eps=1e-8)
    master = expected.detach().clone()
    weight = master.to(dtype)
    moments = torch.zeros(shape), torch.zeros(shape)
    for step in range(1, 4):
        gradient = torch.randn(shape).to(dtype)
        for group in plain.param_groups:
            group["lr"] = 0.01 / step
        expected.grad = gradient.float() * 0.5
        plain.step()
        adamw_update(
            master, *moments, weight, gradient, gradient_scale=torch.tensor(0.5),
            learning_rate=0.01 / step, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=step,
        )
        torch.testing.assert_close(master, expected.detach(), rtol=1e-5, atol=1e-6)
        # The interpreter cuts bf16 off where a GPU rounds it.
        torch.testing.assert_close(weight.float(), master, rtol=2**-7, atol=0.0)
    state = plain.state[expected]
    expected_moments = (state["exp_avg"], state["exp_avg_sq"])
    torch.testing.assert_close(moments, expected_moments, rtol=1e-5, atol=1e-7)
"""


def test_kernel_is_torchs_adamw(run_script, device):
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    run_script(SCRIPT, device=device)


NORM = """
import sys
import torch
from stage2_train import optimizer_kernels

torch.set_default_device(sys.argv[1])
torch.manual_seed(0)
# So few programs that each of the largest tensor's takes several turns; other scripts may run in
# this process.
usual, optimizer_kernels._NUM_SUMS = optimizer_kernels._NUM_SUMS, 4
for dtype in (torch.bfloat16, torch.float32):
    gradients = [torch.randn(shape).to(dtype) for shape in ((70_000,), (3, 70), (1,))]
    expected = torch.cat([gradient.double().reshape(-1) for gradient in gradients]).norm()
    found = [optimizer_kernels.norm_of(gradients) for _ in range(2)]
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-5, atol=0.0)
    assert torch.equal(*found)
optimizer_kernels._NUM_SUMS = usual
"""


def test_norm_is_that_of_all_gradients_and_repeats_itself(run_script, device):
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    run_script(NORM, device=device)
