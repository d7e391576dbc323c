"""The head from the store: ties, scales and soft caps as the target has them."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from stage2_train.target_head import cap_logits, load_target_head
from storage.reader import open_store


@pytest.fixture
def head(shared_store_dir):
    return load_target_head(open_store(shared_store_dir))


def test_the_stored_head_is_read(head):
    assert head.hidden_size == 32
    assert head.vocab_size == 64
    assert head.mask_token_id == 63
    assert head.eos_token_ids == (0,)
    assert head.lm_head_weight is head.embed_weight


def test_ties_survive_a_cast(head):
    cast = head.to("cpu", torch.bfloat16)
    assert cast.lm_head_weight is cast.embed_weight
    assert cast.embed_weight.dtype == torch.bfloat16
    untied = dataclasses.replace(
        head, lm_head_weight=head.embed_weight + 1, lm_head_bias=torch.ones(64)
    )
    cast = untied.to("cpu", torch.float64)
    assert torch.equal(cast.lm_head_weight, (head.embed_weight + 1).double())
    assert cast.lm_head_bias.dtype == torch.float64


def test_scales_are_applied(head):
    scaled = dataclasses.replace(
        head, embedding_scale=3.0, logit_scale=0.5, final_logit_softcapping=2.0
    )
    token_ids = torch.tensor([1, 5])
    assert torch.equal(scaled.embed(token_ids), head.embed_weight[token_ids] * 3)
    hidden = torch.randn(4, 32)
    raw = hidden @ head.lm_head_weight.T
    torch.testing.assert_close(head.logits(hidden), raw)
    torch.testing.assert_close(scaled.logits(hidden), 2 * torch.tanh(raw * 0.5 / 2))
    assert cap_logits(raw, None) is raw


def test_a_head_that_lacks_weights_is_refused(tmp_path, shared_store_dir):
    store = open_store(shared_store_dir)
    for name in ("target.json", "target.safetensors"):
        shutil.copy(store.head_path(name), tmp_path / name)
    facts = json.loads((tmp_path / "target.json").read_text())
    (tmp_path / "target.json").write_text(json.dumps(facts | {"tied": False}))
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight"):
        load_target_head(SimpleNamespace(head_path=lambda name: tmp_path / name))
