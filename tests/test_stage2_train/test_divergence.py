"""The chunked divergences are the plain ones, values and gradients, and so is the kernel."""

import dataclasses
import json

import pytest
import torch

from stage2_train.divergence import head_divergence, plain_divergence
from stage2_train.target_head import TargetHead
from stage2_train.train import EXIT_DONE, train_drafter
from tests.test_stage2_train.conftest import tied_head

NUM_ROWS, HIDDEN, VOCAB = 23, 12, 40
KINDS = ("kl", "total_variation")


def make_head(*, dtype: torch.dtype = torch.float64, **changes) -> TargetHead:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    head = tied_head(weight)
    return dataclasses.replace(head, **changes).to("cpu", dtype)


def make_rows(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    hidden, target_hidden = torch.randn(2, NUM_ROWS, HIDDEN, generator=generator).to(dtype)
    labels = torch.randint(0, VOCAB, (NUM_ROWS,), generator=generator)
    weights = torch.rand(NUM_ROWS, generator=generator)
    wide = torch.promote_types(dtype, torch.float32)
    return hidden.requires_grad_(), target_hidden, labels, weights.to(wide)


HEADS = [
    {},
    {"logit_scale": 2.0, "final_logit_softcapping": 5.0},
    {"lm_head_bias": torch.linspace(-1, 1, VOCAB, dtype=torch.float64)},
]


@pytest.mark.parametrize("chunk_rows", [1, 8, 100])
@pytest.mark.parametrize("changes", HEADS, ids=lambda changes: "-".join(changes) or "plain")
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_are_the_plain_ones(kind, changes, chunk_rows):
    head = make_head(**changes)
    hidden, *rows = make_rows()
    expected = plain_divergence(hidden, *rows, kind=kind, head=head)
    found = head_divergence(hidden, *rows, kind=kind, head=head, chunk_rows=chunk_rows)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.row_loss, expected.row_loss)
    assert torch.equal(found.is_top, expected.is_top)
    torch.testing.assert_close(
        torch.autograd.grad(3.0 * found.loss, hidden),
        torch.autograd.grad(3.0 * expected.loss, hidden),
    )


@pytest.mark.parametrize("changes", HEADS, ids=lambda changes: "-".join(changes) or "plain")
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_that_of_finite_differences(kind, changes):
    head = make_head(**changes)
    hidden, *rows = make_rows()

    def loss(hidden):
        return head_divergence(hidden, *rows, kind=kind, head=head, chunk_rows=7).loss

    assert torch.autograd.gradcheck(loss, hidden)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_separates_a_distribution_from_itself(kind):
    head = make_head()
    hidden, _, labels, weights = make_rows()
    found = head_divergence(
        hidden, hidden.detach(), labels, weights, kind=kind, head=head, chunk_rows=8
    )
    torch.testing.assert_close(found.row_loss, torch.zeros_like(found.row_loss))
    (gradient,) = torch.autograd.grad(found.loss, hidden)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))


def test_total_variation_is_at_most_one_and_kl_is_cross_entropy_less_entropy():
    head = make_head()
    hidden, target_hidden, labels, weights = make_rows()
    rows = (hidden * 50, target_hidden * 50, labels, weights)
    found = head_divergence(*rows, kind="total_variation", head=head, chunk_rows=8)
    assert (found.row_loss <= 1.0).all()
    assert found.row_loss.max() > 0.9
    kl = head_divergence(hidden, target_hidden, *rows[2:], kind="kl", head=head, chunk_rows=8)
    wanted = head.logits(target_hidden).softmax(dim=1)
    cross_entropy = -(wanted * head.logits(hidden).log_softmax(dim=1)).sum(dim=1)
    entropy = -(wanted * wanted.log()).sum(dim=1)
    torch.testing.assert_close(kl.row_loss, (cross_entropy - entropy).detach())


KERNEL = """
import sys
import torch
from stage2_train.divergence import _slopes
from stage2_train.divergence_kernels import rows_to_slopes
from stage2_train.target_head import TargetHead

device = sys.argv[1]
generator = torch.Generator().manual_seed(0)
VOCAB = 5000
for scale, softcap in ((1.0, None), (0.5, 4.0)):
    head = TargetHead(
        config={}, embed_weight=torch.zeros(VOCAB, 1), lm_head_weight=torch.zeros(VOCAB, 1),
        lm_head_bias=None, embedding_scale=1.0, logit_scale=scale,
        final_logit_softcapping=softcap, tokenizer_size=VOCAB, mask_token_id=None,
        eos_token_ids=(),
    )
    for kind in ("kl", "total_variation"):
        logits, target_logits = (
            3 * torch.randn(6, VOCAB, generator=generator, dtype=torch.float64) for _ in range(2)
        )
        labels = torch.tensor([0, 4999, 17, 4095, 4096, 9])
        labels[2] = logits[2].argmax()
        weights = torch.rand(6, generator=generator, dtype=torch.float64)
        outputs = []
        for dtype, place in ((torch.float64, "cpu"), (torch.float32, device)):
            row_loss = torch.empty(6, dtype=dtype, device=place)
            is_top = torch.empty(6, dtype=torch.bool, device=place)
            inputs = [t.to(place, dtype) for t in (logits.clone(), target_logits)]
            rows = (labels.to(place), weights.to(place, dtype))
            if place == "cpu" and dtype == torch.float64:
                slopes = _slopes(
                    *inputs, *rows, kind=kind, head=head, row_loss=row_loss, is_top=is_top
                )
            else:
                rows_to_slopes(
                    *inputs, *rows, is_total_variation=kind == "total_variation",
                    logit_scale=scale, softcap=softcap, row_loss=row_loss, is_top=is_top,
                )
                slopes = inputs[0]
            outputs.append([t.double().cpu() for t in (slopes, row_loss, is_top)])
        for expected, found in zip(*outputs, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
        assert outputs[0][2].tolist() == [0, 0, 1, 0, 0, 0]
"""


def test_the_kernel_gives_the_reference(run_script, device):
    run_script(KERNEL, device=device)


# The total variation of distributions that hardly overlap says little: it learns slowly at first.
@pytest.mark.parametrize(
    ("kind", "loss_fraction", "acceptance_length"),
    [("kl", 0.5, 2.0), ("total_variation", 0.95, 1.05)],
)
def test_a_drafter_learns_the_distribution(
    make_run, tiny_store, tmp_path, kind, loss_fraction, acceptance_length
):
    layers = {"1": "bf16", "2": "bf16", "lm_head_input": "fp8"}
    run = make_run(
        store_dir=tiny_store.fill_store(tmp_path / "store", layers=layers),
        train={
            "epochs": 16,
            "num_anchors": 32,
            "checkpoint_steps": 1000,
            "validation_steps": 1000,
            "optimizer": {"learning_rate": 2e-2},
            "loss": {"kind": kind},
        },
    )
    assert train_drafter(run) == EXIT_DONE
    lines = (run.drafter_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert records[-2]["loss"] < loss_fraction * records[0]["loss"]
    assert records[-1]["acceptance_length"] > acceptance_length


def test_a_store_without_predictions_is_refused(make_run):
    run = make_run(train={"loss": {"kind": "kl"}})
    with pytest.raises(ValueError, match=r"lacks the layer lm_head_input: extract with") as raised:
        train_drafter(run)
    assert "\n" not in str(raised.value)
