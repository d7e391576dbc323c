"""Layers of the target that drafters may start from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load
from transformers import AutoModel, Phi3Config

from stage1_extract.config import TargetConfig
from stage1_extract.extract import prepare_store, run_worker
from stage1_extract.head_needs import lacking_head_files
from stage1_extract.last_layers import PROJECTIONS, last_layers_file, layer_weights
from stage1_extract.target import load_target
from stage1_extract.target_head import head_files
from storage.head import LAST_LAYERS_FILE
from storage.reader import open_store
from storage.writer import open_for_writing

TOKENS = np.arange(40, 60, dtype=np.int32)


def kept(target: Any, folder: Path, num_layers: int) -> dict[str, torch.Tensor]:
    files = head_files(target, folder=folder, token_ids=TOKENS, num_last_layers=num_layers)
    return load(files[LAST_LAYERS_FILE])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_the_last_layers_are_the_targets_own(target_folder: Callable[..., Path], kind: str) -> None:
    folder = target_folder(kind)
    target = load_target(TargetConfig(model=str(folder), dtype="float32"))
    weights = kept(target, folder, 1)
    last = len(target.decoder.layers) - 1
    own = {
        name.removeprefix("model."): weight
        for name, weight in target.model.named_parameters()
        if name.startswith((f"model.layers.{last}.", "model.norm.")) and name.endswith(".weight")
    }
    assert weights.keys() == own.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight.float(), own[name].detach(), rtol=0, atol=0)


def test_layers_that_share_their_weights_are_kept_each(target_folder: Callable[..., Path]) -> None:
    folder = target_folder("llama")
    target = load_target(TargetConfig(model=str(folder), dtype="float32"))
    first, second = target.decoder.layers[-2:]
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    weights = kept(target, folder, 2)
    found = [weight for name, weight in weights.items() if name.endswith("mlp.up_proj.weight")]
    assert len(found) == 2
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_are_kept_as_they_multiply(target_folder: Callable[..., Path], dtype: Any) -> None:
    folder = target_folder("gemma2")
    target = load_target(TargetConfig(model=str(folder), dtype=dtype))
    weights = kept(target, folder, 99)
    layers: Any = target.decoder.layers
    for number, layer in enumerate(layers):
        for name, own in (
            ("input_layernorm", layer.input_layernorm),
            ("post_attention_layernorm", layer.pre_feedforward_layernorm),
        ):
            states = torch.randn(3, target.config.hidden_size)
            scale = torch.rsqrt(states.square().mean(-1, keepdim=True) + own.eps)
            mine = states * scale * weights[f"layers.{number}.{name}.weight"].float()
            torch.testing.assert_close(mine, own(states).detach())


def test_fused_projections_are_kept_as_their_parts() -> None:
    config = Phi3Config(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=1, vocab_size=64, pad_token_id=0,
    )  # fmt: skip
    layer: Any = AutoModel.from_config(config).layers[0]
    weights = layer_weights(layer, norm_offset=0.0)
    assert set(PROJECTIONS) <= weights.keys()
    states = torch.randn(3, 32)

    def product(name: str) -> torch.Tensor:
        return states @ weights[name].T

    attended = [product(f"self_attn.{each}_proj") for each in "qkv"]
    torch.testing.assert_close(torch.cat(attended, -1), layer.self_attn.qkv_proj(states))
    inner = torch.nn.functional.silu(product("mlp.gate_proj")) * product("mlp.up_proj")
    torch.testing.assert_close(inner @ weights["mlp.down_proj"].T, layer.mlp(states))


def test_what_is_no_plain_weight_is_left_out(target_folder: Callable[..., Path]) -> None:
    folder = target_folder("llama")
    target = load_target(TargetConfig(model=str(folder), dtype="float32"))
    layer: Any = target.decoder.layers[-1]
    layer.mlp.down_proj.weight = torch.nn.Parameter(
        layer.mlp.down_proj.weight.detach().to(torch.int8), requires_grad=False
    )
    del layer.self_attn.q_proj
    weights = load(last_layers_file(target, num_layers=1, norm_offset=0.0))
    names = {name.split(".", 2)[2] for name in weights if name.startswith("layers.")}
    assert "mlp.up_proj.weight" in names
    assert not names & {"mlp.down_proj.weight", "self_attn.q_proj.weight"}


def test_a_store_made_without_them_gets_them(
    make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    without = run.model_copy(update={"store": run.store.model_copy(update={"last_layers": 0})})
    prepare_store(without)
    with monkeypatch.context() as earlier:
        earlier.setattr("transformers.__version__", "5.0.0")
        assert run_worker(without, worker_index=0, num_workers=1) == 0
    assert LAST_LAYERS_FILE not in open_store(run.store_dir).head_names()
    store = open_for_writing(run.store_dir)
    assert lacking_head_files(store, without) == []
    assert lacking_head_files(store, run) == [LAST_LAYERS_FILE]
    assert run_worker(run, worker_index=0, num_workers=1) == 0
    before = open_store(run.store_dir).head_bytes(LAST_LAYERS_FILE)
    # As many as the first run wanted: another number changes nothing.
    other = run.model_copy(update={"store": run.store.model_copy(update={"last_layers": 1})})
    assert run_worker(other, worker_index=0, num_workers=1) == 0
    assert open_store(run.store_dir).head_bytes(LAST_LAYERS_FILE) == before
