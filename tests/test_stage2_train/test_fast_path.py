"""The fast path computes what the plain one does, and says itself whether it was compiled."""

import dataclasses

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from stage2_train import fast_path as module
from stage2_train import masks
from stage2_train.batches import Window
from stage2_train.blocks import offset_weights
from stage2_train.collate import PackedBatch, collate
from stage2_train.decode import LayerDecoder
from stage2_train.drafter import Drafter
from stage2_train.fast_path import make_fast_path
from stage2_train.sharding import plain_path
from stage2_train.step import batch_loss
from stage2_train.target_head import TargetHead, load_target_head
from storage.reader import open_store

DECODERS = (LayerDecoder(encoding="bf16"),) * 2


@pytest.fixture
def head(shared_store_dir) -> TargetHead:
    return load_target_head(open_store(shared_store_dir)).to("cpu", torch.float64)


@pytest.fixture
def batch(shared_store_dir) -> PackedBatch:
    snapshot = open_store(shared_store_dir).snapshot()
    sequences = [snapshot.read(index, layers=["1", "2"]) for index in (0, 1, 2)]
    return collate(
        sequences,
        [Window(sequence_index=0, start=0, stop=len(s.token_ids)) for s in sequences],
        layer_names=("1", "2"),
        batch_tokens=256,
        num_anchors=16,
        weight_of_offset=offset_weights(5),
        mask_token_id=63,
        seed=0,
        epoch=0,
    )


def plain_flex_attention(queries, keys, values, *, block_mask, enable_gqa):
    """What FlexAttention computes; its own kernels have no gradient on a CPU."""
    query = torch.arange(queries.shape[2])[:, None]
    key = torch.arange(keys.shape[2])[None, :]
    mask = block_mask.mask_mod(None, None, query, key)
    return scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, enable_gqa=enable_gqa
    )


@pytest.mark.parametrize(
    "changes",
    [{}, {"is_causal": True}, {"layer_types": ("sliding_attention", "full_attention")}],
    ids=["full", "causal", "sliding"],
)
def test_loss_and_gradients_are_the_plain_ones(architecture, batch, head, changes, monkeypatch):
    monkeypatch.setattr(module, "flex_attention", plain_flex_attention)
    drafter = Drafter(dataclasses.replace(architecture, sliding_window=6, **changes)).double()
    results = []
    for fast_path in (None, make_fast_path(is_compiled=False)):
        drafter.zero_grad()
        result = batch_loss(
            drafter, batch, head=head, decoders=DECODERS, chunk_rows=64, fast_path=fast_path
        )
        result.loss.backward()
        assert not result.is_compiled
        results.append([result.row_loss, *(p.grad.clone() for p in drafter.parameters())])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_plain_layers_of_a_sharded_drafter_get_masks_that_they_can_read(
    architecture, batch, head, monkeypatch
):
    # As on a GPU whose own kernels would take this shape.
    monkeypatch.setattr(masks, "has_room", lambda device: True)
    monkeypatch.setattr(masks, "suits", lambda **shape: True)
    drafter = Drafter(architecture).double()
    found, expected = (
        batch_loss(drafter, batch, head=head, decoders=DECODERS, chunk_rows=64, fast_path=path)
        for path in (plain_path(), None)
    )
    torch.testing.assert_close(found.row_loss, expected.row_loss)


COMPILED = """
import torch
from torch._dynamo.utils import counters
from stage2_train.blocks import Supervision, make_blocks, offset_weights
from stage2_train.collate import batch_of
from stage2_train.compile import Evidence
from stage2_train.drafter import Drafter, DrafterArchitecture
from stage2_train.fast_path import FastPath, context_forward, layer_forward, make_fast_path
from stage2_train.target_head import TargetHead
import numpy as np

architecture = DrafterArchitecture(
    hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, intermediate_size=48, rms_norm_eps=1e-6, vocab_size=64,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    max_position_embeddings=512, block_size=8, mask_token_id=63, target_layer_ids=(1, 2),
    num_target_layers=6, layer_types=("full_attention", "sliding_attention") * 2,
    sliding_window=6,
)
weight = torch.randn(64, 32)
head = TargetHead(
    config={}, embed_weight=weight, lm_head_weight=weight, lm_head_bias=None,
    embedding_scale=1.0, logit_scale=1.0, final_logit_softcapping=None, tokenizer_size=64,
    mask_token_id=63, eos_token_ids=(),
)

def make_batch(seed):
    rng = np.random.default_rng(seed)
    sequence = Supervision(
        sequence_id=str(seed), token_ids=rng.integers(0, 60, 120), loss_mask=rng.random(120) < 0.9
    )
    blocks = make_blocks(
        [sequence], num_anchors=16, weight_of_offset=offset_weights(8), seed=seed, epoch=0
    )
    return batch_of(
        blocks, layers=(), positions=np.arange(128), num_real_tokens=120, mask_token_id=63
    )

def compiled(function):
    return torch.compile(function, fullgraph=True, dynamic=False, backend="eager")

drafter = Drafter(architecture)
fast = FastPath(context=compiled(context_forward), layer=compiled(layer_forward))
eager = make_fast_path(is_compiled=False)
evidence = Evidence(is_compiling_wanted=True)
with torch.no_grad():
    cases = [(make_batch(number), torch.randn(128, 64)) for number in range(3)]
    expected = [eager.draft(drafter, *case, head=head) for case in cases]
    assert not any(is_compiled for _, is_compiled in expected)
    evidence.take()
    for number, case in enumerate(cases):
        hidden, is_compiled = fast.draft(drafter, *case, head=head)
        torch.testing.assert_close(hidden, expected[number][0])
        evidence.add_step(is_compiled=is_compiled)
        found = evidence.take()
        assert found["execution"] == "compiled"
        # One graph each for the context and the first, middle and last layers, then no more.
        assert found["num_compiles"] == (4 if number == 0 else 0), found
        assert found["num_graph_breaks"] == 0
        torch.compiler.set_stance("fail_on_recompile")
"""


RAGGED = (
    COMPILED[: COMPILED.index("drafter = Drafter(architecture)")]
    + """
from stage2_train.batches import Window, pack

lengths = np.clip(np.random.default_rng(0).lognormal(np.log(40), 1.0, 400).astype(int), 2, 128)
windows = [Window(sequence_index=i, start=0, stop=int(n)) for i, n in enumerate(lengths)]

def ragged_batch(number, packed):
    sequences = [
        Supervision(
            sequence_id=str(window.sequence_index),
            token_ids=np.arange(window.num_tokens) % 60,
            loss_mask=np.arange(window.num_tokens) >= window.num_tokens // 8,
        )
        for window in packed
    ]
    blocks = make_blocks(
        sequences, num_anchors=16, weight_of_offset=offset_weights(8), seed=0, epoch=0
    )
    return batch_of(
        blocks, layers=(), positions=np.zeros(128, np.int64), num_real_tokens=1, mask_token_id=63
    )

fast = FastPath(context=compiled(context_forward), layer=compiled(layer_forward))
drafter, evidence = Drafter(architecture), Evidence(is_compiling_wanted=True)
features, num_rows, num_sequences = torch.randn(128, 64), set(), set()
with torch.no_grad():
    for number, packed in enumerate(pack(windows, batch_tokens=128)):
        batch = ragged_batch(number, packed)
        num_rows.add(len(batch.row_index))
        num_sequences.add(len(packed))
        _, is_compiled = fast.draft(drafter, batch, features, head=head)
        # Beyond the warm-up this forbids compiling.
        evidence.add_step(is_compiled=is_compiled)
assert len(num_rows) > 20 and len(num_sequences) > 3, (num_rows, num_sequences)
assert evidence.take() == {
    "execution": "compiled", "num_compiled_steps": number + 1, "num_compiles": 4,
    "num_compiles_cold": 0, "num_compiles_cached": 0, "num_graph_breaks": 0,
}
assert number > 100
"""
)


def test_uneven_lengths_never_compile_again(run_script):
    run_script(RAGGED)


def test_layers_share_one_compilation_and_batches_cause_no_other(run_script):
    run_script(COMPILED)


TRAINED = (
    """
import copy
import sys
import torch
from stage2_train.config import OptimizerConfig
from stage2_train.decode import LayerDecoder
from stage2_train.collate import EncodedLayer
from stage2_train.fast_path import make_fast_path
from stage2_train.optimizer import MasterAdamW
from stage2_train.step import batch_loss

device = torch.device(sys.argv[1])
"""
    + COMPILED[: COMPILED.index("def compiled(function)")]
    + """
from dataclasses import replace

def batch_on_device(seed):
    states = torch.randn(2, 128, 32, generator=torch.Generator().manual_seed(seed)).bfloat16()
    layers = tuple(EncodedLayer(data=s.view(torch.uint16), scales=None) for s in states)
    return replace(make_batch(seed), layers=layers).to(device)

def train(fast_path, dtype):
    drafter = Drafter(architecture)
    optimizer = MasterAdamW(drafter, OptimizerConfig(), device=device, dtype=dtype)
    losses, witnesses = [], []
    for step in range(6):
        result = batch_loss(
            drafter, batch_on_device(step), head=head.to(device, dtype),
            decoders=(LayerDecoder(encoding="bf16"),) * 2, chunk_rows=64, fast_path=fast_path,
        )
        result.loss.backward()
        optimizer.step(1e-3)
        losses.append(result.loss.detach())
        witnesses.append(result.is_compiled)
    return torch.stack(losses), optimizer.weights(), witnesses

plain, weights, _ = train(None, torch.float32)
fast, fast_weights, witnesses = train(make_fast_path(is_compiled=True), torch.bfloat16)
again, weights_again, _ = train(make_fast_path(is_compiled=True), torch.bfloat16)
assert all(witnesses)
torch.testing.assert_close(fast.float(), plain, rtol=0.02, atol=0.0)
assert torch.equal(fast, again)
assert all(torch.equal(w, weights_again[name]) for name, w in fast_weights.items())
"""
)


@pytest.mark.gpu
def test_compiled_training_follows_the_plain_one_and_repeats_itself(run_script):
    run_script(TRAINED, device="cuda")


GRADIENTS = (
    TRAINED[: TRAINED.index("def train(fast_path, dtype)")]
    + """
from stage2_train.fp8 import use_fp8

def gradients(fast_path, dtype, place, fp8=False):
    drafter = Drafter(architecture).to(place, dtype)
    if fp8:
        use_fp8(drafter, weight_gradients=fp8 == "all")
    result = batch_loss(
        drafter, batch_on_device(0).to(place), head=head.to(place, dtype),
        decoders=(LayerDecoder(encoding="bf16"),) * 2, chunk_rows=64, fast_path=fast_path,
    )
    result.loss.backward()
    assert result.is_compiled == (fast_path is not None)
    return result.loss.detach().double().cpu(), {
        name: p.grad.double().cpu() for name, p in drafter.named_parameters()
    }

exact_loss, exact = gradients(None, torch.float64, torch.device("cpu"))
# Compiling takes most of the time: bf16 layers are those of the training above, from its cache, and
# of fp8's forms the one that has all of the other's products.
for fp8, loss_error, gradient_error in ((False, 5e-3, 5e-2), ("all", 2e-2, 0.35)):
    # First, middle and last layer of both together are more than torch's limit.
    torch._dynamo.reset()
    loss, found = gradients(make_fast_path(is_compiled=True), torch.bfloat16, device, fp8)
    assert abs(loss - exact_loss) <= loss_error * exact_loss, (fp8, loss, exact_loss)
    for name, gradient in exact.items():
        error = (found[name] - gradient).norm() / gradient.norm()
        assert error <= gradient_error, (fp8, name, float(error))
"""
)


@pytest.mark.gpu
def test_compiled_gradients_are_near_the_float64_reference(run_script):
    run_script(GRADIENTS, device="cuda")
