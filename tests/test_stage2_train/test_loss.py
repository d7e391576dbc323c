"""The chunked loss is plain cross-entropy, values and gradients."""

import dataclasses

import pytest
import torch

from stage2_train.loss import head_cross_entropy, plain_cross_entropy, row_chunks, row_maximum
from stage2_train.target_head import TargetHead
from tests.test_stage2_train.conftest import tied_head

NUM_ROWS, HIDDEN, VOCAB = 23, 12, 40


def make_head(*, dtype: torch.dtype = torch.float64, **changes) -> TargetHead:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    head = tied_head(weight)
    return dataclasses.replace(head, **changes).to("cpu", dtype)


def make_rows(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(NUM_ROWS, HIDDEN, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCAB, (NUM_ROWS,), generator=generator)
    weights = torch.rand(NUM_ROWS, generator=generator, dtype=torch.float64)
    return (
        hidden.to(dtype).requires_grad_(),
        labels,
        weights.to(torch.promote_types(dtype, torch.float32)),
    )


HEADS = [
    {},
    {"logit_scale": 0.25},
    {"final_logit_softcapping": 3.0},
    {"logit_scale": 2.0, "final_logit_softcapping": 5.0},
    {"lm_head_bias": torch.linspace(-1, 1, VOCAB, dtype=torch.float64)},
]


@pytest.mark.parametrize("chunk_rows", [1, 8, 23, 100])
@pytest.mark.parametrize("changes", HEADS, ids=lambda changes: "-".join(changes) or "plain")
def test_loss_and_gradient_are_the_plain_ones(changes, chunk_rows):
    head = make_head(**changes)
    hidden, labels, weights = make_rows()
    expected = plain_cross_entropy(hidden, labels, weights, head=head)
    found = head_cross_entropy(hidden, labels, weights, head=head, chunk_rows=chunk_rows)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.row_loss, expected.row_loss)
    assert torch.equal(found.is_top, expected.is_top)
    torch.testing.assert_close(
        torch.autograd.grad(3.0 * found.loss, hidden),
        torch.autograd.grad(3.0 * expected.loss, hidden),
    )


@pytest.mark.parametrize("changes", HEADS, ids=lambda changes: "-".join(changes) or "plain")
def test_gradient_is_that_of_finite_differences(changes):
    head = make_head(**changes)
    hidden, labels, weights = make_rows()

    def loss(hidden):
        return head_cross_entropy(hidden, labels, weights, head=head, chunk_rows=7).loss

    assert torch.autograd.gradcheck(loss, hidden)


def test_bf16_is_near_the_reference():
    head, reference = make_head(dtype=torch.bfloat16), make_head()
    hidden, labels, weights = make_rows(torch.bfloat16)
    exact = hidden.detach().double().requires_grad_()
    expected = plain_cross_entropy(exact, labels, weights.double(), head=reference)
    found = head_cross_entropy(hidden, labels, weights, head=head, chunk_rows=8)
    torch.testing.assert_close(found.loss.double(), expected.loss, rtol=0.01, atol=0.0)
    (gradient,) = torch.autograd.grad(found.loss, hidden)
    (expected_gradient,) = torch.autograd.grad(expected.loss, exact)
    error = (gradient.double() - expected_gradient).norm() / expected_gradient.norm()
    assert error < 0.02


def test_no_gradient_is_made_where_none_is_wanted():
    hidden, labels, weights = make_rows()
    found = head_cross_entropy(hidden.detach(), labels, weights, head=make_head(), chunk_rows=8)
    assert not found.loss.requires_grad


def test_a_hopeless_label_has_a_finite_loss():
    hidden, labels, weights = make_rows(torch.float32)
    head = make_head(dtype=torch.float32)
    found = head_cross_entropy(1e4 * hidden, labels, weights, head=head, chunk_rows=8)
    assert torch.isfinite(found.row_loss).all()
    (gradient,) = torch.autograd.grad(found.loss, hidden)
    assert torch.isfinite(gradient).all()


def test_the_head_gets_no_gradient():
    head = make_head()
    head.lm_head_weight.requires_grad_()
    hidden, labels, weights = make_rows()
    head_cross_entropy(hidden, labels, weights, head=head, chunk_rows=8).loss.backward()
    assert head.lm_head_weight.grad is None


def test_maxima_of_bf16_are_exact():
    probabilities = torch.rand(9, 300).bfloat16()
    assert torch.equal(row_maximum(probabilities), probabilities.amax(dim=1))


@pytest.mark.parametrize(("num_rows", "chunk_rows"), [(0, 8), (7680, 2048), (1000, 300), (5, 100)])
def test_chunks_cover_every_row_once_and_are_as_few_as_can_be(num_rows, chunk_rows):
    chunks = list(row_chunks(num_rows, chunk_rows=chunk_rows))
    assert [row for chunk in chunks for row in range(num_rows)[chunk]] == list(range(num_rows))
    assert len(chunks) == -(-num_rows // chunk_rows)
    assert all(chunk.stop - chunk.start <= chunk_rows for chunk in chunks)
