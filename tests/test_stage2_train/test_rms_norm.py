"""Our RMSNorm is torch's, forwards and backwards."""

import pytest
import torch
from torch.nn import functional

from stage2_train.rms_norm import rms_norm


@pytest.mark.parametrize("shape", [(7, 12), (2, 3, 4, 8)])
def test_values_and_gradients_are_torchs(shape):
    torch.manual_seed(0)
    hidden = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(shape[-1], dtype=torch.float64, requires_grad=True)
    expected = functional.rms_norm(hidden, weight.shape, weight, 1e-5)
    found = rms_norm(hidden, weight, 1e-5)
    torch.testing.assert_close(found, expected)
    above = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad(found, (hidden, weight), above),
        torch.autograd.grad(expected, (hidden, weight), above),
    )
    assert torch.autograd.gradcheck(lambda h, w: rms_norm(h, w, 1e-5), (hidden, weight))


def test_input_is_left_alone_and_inference_is_torchs_own():
    hidden, weight = torch.randn(5, 8), torch.randn(8)
    before = hidden.clone()
    trained = rms_norm(hidden.requires_grad_(), weight, 1e-5)
    assert torch.equal(hidden, before)
    with torch.no_grad():
        inferred = rms_norm(hidden, weight, 1e-5)
        assert torch.equal(inferred, functional.rms_norm(hidden, (8,), weight, 1e-5))
    torch.testing.assert_close(trained.detach(), inferred)
