"""The transformers backend: layer i is `hidden_states[i + 1]`, and loading fails clearly."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from stage1_extract.config import TargetConfig
from stage1_extract.target import SPREAD, load_target
from stage1_extract.target_files import load_config, stop_token_ids
from storage.schema import LM_HEAD_INPUT

TargetFolder = Callable[..., Path]
KINDS = ["llama", "qwen2", "qwen3", "gemma2"]
LENGTHS = (5, 17, 30)


def load(folder: Path, **settings: Any) -> Any:
    return load_target(TargetConfig(model=str(folder), **({"dtype": "float32"} | settings)))


def token_ids(*lengths: int) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, length, dtype=np.int32) for length in lengths]


@torch.inference_mode()
def plain_forward(target: Any, sequence: np.ndarray) -> Any:
    """One sequence through the whole model, as anyone would run it."""
    batch = torch.from_numpy(sequence).long()[None]
    return target.model(input_ids=batch, output_hidden_states=True, use_cache=False)


def test_a_spread_target_gives_the_same_states(target_folder: TargetFolder) -> None:
    """With its layers wherever there is room: here, as far as can be from where they run."""
    config = TargetConfig(model=str(target_folder("llama")), dtype="float32")
    spread, sequences = load_target(config, device=SPREAD), token_ids(*LENGTHS)
    assert spread.device == ("cuda" if torch.cuda.is_available() else "cpu")
    cpu_offload(spread.model, execution_device=torch.device(spread.device))
    assert all(each.is_meta for each in spread.model.parameters())
    whole = load_target(config, device=spread.device)
    for layers in (["0", "2"], ["1", LM_HEAD_INPUT]):
        expected = whole.hidden_states(sequences, layers=layers)
        for name, states in spread.hidden_states(sequences, layers=layers).items():
            torch.testing.assert_close(states, expected[name])


@pytest.mark.parametrize("batching", ["packed", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_layer_i_is_hidden_state_i_plus_1(
    target_folder: TargetFolder, kind: str, batching: str
) -> None:
    target = load(target_folder(kind))
    target.batching = batching
    sequences = token_ids(*LENGTHS)
    states = target.hidden_states(sequences, layers=["0", "1", "2", LM_HEAD_INPUT])
    start = 0
    for sequence in sequences:
        tokens = slice(start, start + len(sequence))
        start = tokens.stop
        expected = plain_forward(target, sequence).hidden_states
        # Hugging Face's last entry is after the final norm.
        for name, entry in (("0", 1), ("1", 2), ("2", 3), (LM_HEAD_INPUT, 4)):
            torch.testing.assert_close(
                states[name][tokens], expected[entry][0], rtol=1e-4, atol=1e-5
            )
    assert all(len(each) == sum(LENGTHS) for each in states.values())


@pytest.mark.parametrize("shift", [-1, 1])
def test_layers_off_by_one_would_be_noticed(target_folder: TargetFolder, shift: int) -> None:
    target = load(target_folder("llama"))
    (sequence,) = token_ids(20)
    states = target.hidden_states([sequence], layers=["1"])
    shifted = plain_forward(target, sequence).hidden_states[1 + 1 + shift][0]
    difference = (states["1"] - shifted).norm() / shifted.norm()
    assert difference > 0.1


def test_the_last_decoder_layer_is_before_the_norm(target_folder: TargetFolder) -> None:
    target = load(target_folder("llama"))
    states = target.hidden_states(token_ids(9), layers=["3", LM_HEAD_INPUT])
    torch.testing.assert_close(target.decoder.norm(states["3"]), states[LM_HEAD_INPUT])
    assert not torch.allclose(states["3"], states[LM_HEAD_INPUT], rtol=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_slow_path_agrees(target_folder: TargetFolder, kind: str) -> None:
    target = load(target_folder(kind))
    (sequence,) = token_ids(20)
    layers = ["0", "3", LM_HEAD_INPUT]
    states = target.hidden_states([sequence], layers=layers)
    expected = target.plain_hidden_states(sequence, layers=layers)
    for name in layers:
        torch.testing.assert_close(states[name], expected[name], rtol=1e-4, atol=1e-5)


def test_layers_above_the_highest_captured_do_not_run(
    target_folder: TargetFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load(target_folder("llama"))

    def must_not_run(*_: Any, **__: Any) -> None:
        raise AssertionError("computed for nothing")

    monkeypatch.setattr(target.decoder.layers[2], "forward", must_not_run)
    monkeypatch.setattr(target.decoder.norm, "forward", must_not_run)
    states = target.hidden_states(token_ids(6), layers=["0", "1"])
    assert set(states) == {"0", "1"}


def test_no_hook_stays_behind(target_folder: TargetFolder) -> None:
    target = load(target_folder("llama"))
    target.hidden_states(token_ids(6), layers=["1"])
    assert not any(module._forward_hooks for module in target.model.modules())
    assert plain_forward(target, token_ids(6)[0]).logits.shape[1] == 6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_arithmetic_type_is_the_settings(target_folder: TargetFolder, dtype: str) -> None:
    target = load(target_folder("llama"), dtype=dtype)
    states = target.hidden_states(token_ids(6), layers=["1"])
    assert states["1"].dtype == getattr(torch, dtype)
    assert target.published_dtype == torch.float32


def test_the_configuration_needs_no_weights(target_folder: TargetFolder, tmp_path: Path) -> None:
    shutil.copy(target_folder("llama") / "config.json", tmp_path)
    assert load_config(TargetConfig(model=str(tmp_path))).num_hidden_layers == 4


def test_stop_tokens_come_from_the_generation_settings(
    target_folder: TargetFolder, tmp_path: Path
) -> None:
    config = load_config(TargetConfig(model=str(target_folder("llama"))))
    assert stop_token_ids(tmp_path, config) == [261]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 3]}))
    assert stop_token_ids(tmp_path, config) == [3, 7]


def copied(folder: Path, tmp_path: Path, **changes: bytes | None) -> Path:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for name, content in changes.items():
        path = copy / name.replace("__", ".")
        path.unlink()
        if content is not None:
            path.write_bytes(content)
    return copy


def test_missing_weights_are_never_made_up(target_folder: TargetFolder, tmp_path: Path) -> None:
    folder = copied(target_folder("llama"), tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks weights.*model\.layers\.2\.mlp\.up_proj"):
        load(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"config__json": b"{"},
        {"config__json": b'{"model_type": "no-such-model"}'},
        {"model__safetensors": b"short"},
        {"model__safetensors": None},
        {"tokenizer__json": b"{}", "tokenizer_config__json": b"{}"},
    ],
)
def test_a_broken_folder_is_one_clear_line(
    target_folder: TargetFolder, tmp_path: Path, changes: dict[str, bytes | None]
) -> None:
    folder = copied(target_folder("llama"), tmp_path, **changes)
    with pytest.raises(ValueError, match=r"target\.model") as raised:
        load(folder)
    assert "\n" not in str(raised.value)


def test_an_unknown_attention_is_one_clear_line(target_folder: TargetFolder) -> None:
    with pytest.raises(ValueError, match="cannot load"):
        load(target_folder("llama"), attention="no-such-attention")


def test_a_soft_cap_is_never_left_out(target_folder: TargetFolder) -> None:
    assert load(target_folder("gemma2")).config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="'sdpa' leaves out the soft cap of gemma2"):
        load(target_folder("gemma2"), attention="sdpa")


def test_code_of_a_model_runs_only_when_asked(target_folder: TargetFolder, tmp_path: Path) -> None:
    folder = copied(target_folder("llama"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own_code.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own_code.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load(folder)


def test_an_fp8_checkpoint_is_loaded_as_it_is(target_folder: TargetFolder, tmp_path: Path) -> None:
    """Weights in e4m3 with a scale for each 128 x 128 block, as DeepSeek and Qwen publish them."""
    folder = tmp_path / "random"
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for path in target_folder("llama").glob("tokenizer*"):
        shutil.copy(path, folder / path.name)
    plain, quantised = copied(folder, tmp_path / "plain"), copied(folder, tmp_path / "fp8")
    weights = load_file(folder / "model.safetensors")
    stored = dict(weights)
    for name in [name for name in weights if "_proj" in name]:
        rows, columns = weights[name].shape
        blocks = weights[name].float().view(rows // 128, 128, columns // 128, 128)
        scales = blocks.abs().amax((1, 3), keepdim=True) / 448.0
        codes = (blocks / scales).to(torch.float8_e4m3fn)
        stored[name] = codes.view(rows, columns)
        stored[name.replace("weight", "weight_scale_inv")] = scales[:, 0, :, 0].contiguous()
        weights[name] = (codes.float() * scales).view(rows, columns).to(torch.bfloat16)
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, quantised / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((quantised / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (quantised / "config.json").write_text(json.dumps(settings))
    (sequence,) = token_ids(40)
    states = [
        load(each, dtype="bfloat16").plain_hidden_states(sequence, layers=["1"])["1"]
        for each in (plain, quantised)
    ]
    assert torch.equal(*states)
