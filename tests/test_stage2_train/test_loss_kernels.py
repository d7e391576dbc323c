"""The loss kernel, interpreted and on a GPU, gives the plain loss and gradient."""

import pytest

SCRIPT = """
import itertools
import sys
import torch
from torch.nn.functional import cross_entropy
from stage2_train.loss_kernels import rows_to_gradient
from stage2_train.target_head import cap_logits

torch.set_default_device(sys.argv[1])
torch.manual_seed(0)
cases = list(itertools.product((40,), (1.0, 0.5), (None, 4.0), (False, True)))
if sys.argv[1] != "cpu":
    # Each case compiles three kernels there.
    cases = [(40, 1.0, None, False), (40, 0.5, 4.0, True)]
for vocab_size, scale, softcap, has_bias in [*cases, (8200, 1.0, None, False)]:
    num_rows = 3
    logits = 3 * torch.randn(num_rows, vocab_size)
    logits[0, 7] = 90.0
    labels = torch.randint(0, vocab_size, (num_rows,))
    labels[:2] = 7
    weights = torch.rand(num_rows)
    bias = torch.randn(vocab_size) if has_bias else None
    leaf = logits.double().requires_grad_()
    whole = leaf if bias is None else leaf + bias.double()
    expected = cross_entropy(cap_logits(whole * scale, softcap), labels, reduction="none")
    (gradient,) = torch.autograd.grad((expected * weights.double()).sum(), leaf)
    capped = cap_logits(whole * scale, softcap)
    top = capped.gather(1, labels[:, None])[:, 0] >= capped.amax(dim=1)
    for is_wanted in (False, True):
        found, row_loss = logits.clone(), torch.full((num_rows,), torch.nan)
        is_top = torch.zeros(num_rows, dtype=torch.bool)
        rows_to_gradient(
            found, labels, weights, bias=bias, logit_scale=scale, softcap=softcap,
            row_loss=row_loss, is_top=is_top, gradient=found if is_wanted else None,
        )
        torch.testing.assert_close(row_loss, expected.float(), rtol=1e-5, atol=1e-5)
        assert torch.equal(is_top, top)
        wanted = gradient.float() if is_wanted else logits
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    codes = torch.zeros(num_rows, vocab_size, dtype=torch.float8_e4m3fn)
    scales, label_slopes = torch.zeros(2, num_rows)
    rows_to_gradient(
        logits, labels, weights, bias=bias, logit_scale=scale, softcap=softcap,
        row_loss=row_loss, is_top=is_top, gradient=codes, gradient_scales=scales,
        label_slopes=label_slopes,
    )
    found, expected = codes.float() * scales[:, None], gradient.float()
    at_label = labels[:, None]
    torch.testing.assert_close(
        label_slopes[:, None], expected.gather(1, at_label), rtol=1e-4, atol=1e-6
    )
    assert (found.gather(1, at_label) == 0).all()
    expected = expected.scatter(1, at_label, 0.0)
    # The interpreter cuts fp8 off where a GPU rounds it, and where it would carry it halves it.
    error, smallest = (found - expected).abs(), 2.0**-9 * scales[:, None]
    assert (error <= expected / (1.9 if sys.argv[1] == "cpu" else 15) + smallest + 1e-9).all()
"""


def test_kernel_gives_the_plain_loss(run_script, device):
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    run_script(SCRIPT, device=device)
