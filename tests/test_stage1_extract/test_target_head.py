"""The target's head: with the saved weights and facts anyone gets the target's own numbers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load

from stage1_extract.config import TargetConfig
from stage1_extract.target import load_target
from stage1_extract.target_head import head_files, mask_token_id

TOKENS = np.arange(40, 60, dtype=np.int32)
TargetFolder = Callable[..., Path]


def loaded(folder: Path, dtype: str = "float32") -> Any:
    return load_target(TargetConfig(model=str(folder), dtype=dtype))


def read_head(target: Any, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    files = head_files(target, folder=folder, token_ids=TOKENS)
    return load(files["target.safetensors"]), json.loads(files["target.json"])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma2"])
@torch.inference_mode()
def test_logits_follow_from_the_files(target_folder: TargetFolder, kind: str) -> None:
    folder = target_folder(kind)
    target = loaded(folder)
    weights, facts = read_head(target, folder)
    output = target.model(torch.from_numpy(TOKENS).long()[None], output_hidden_states=True)
    embeddings = weights["embed_tokens.weight"][TOKENS] * facts["embedding_scale"]
    torch.testing.assert_close(embeddings, output.hidden_states[0][0], rtol=1e-4, atol=1e-4)
    assert facts["tied"] == ("lm_head.weight" not in weights)
    lm_head = weights["embed_tokens.weight" if facts["tied"] else "lm_head.weight"]
    logits = output.hidden_states[-1][0] @ lm_head.T * facts["logit_scale"]
    softcap = facts["final_logit_softcapping"]
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    torch.testing.assert_close(logits, output.logits[0], rtol=1e-3, atol=1e-4)


def test_facts_of_each_family(target_folder: TargetFolder) -> None:
    def facts_of(kind: str) -> dict[str, Any]:
        return read_head(loaded(target_folder(kind)), target_folder(kind))[1]

    llama, qwen2, gemma2 = facts_of("llama"), facts_of("qwen2"), facts_of("gemma2")
    assert (llama["tied"], qwen2["tied"]) == (True, False)
    assert (llama["embedding_scale"], llama["norm_kind"]) == (1.0, "rms")
    assert gemma2["embedding_scale"] == pytest.approx(32**0.5)
    assert (gemma2["norm_kind"], gemma2["final_logit_softcapping"]) == ("rms_one_plus_weight", 5.0)
    assert (llama["vocab_size"], llama["tokenizer_size"]) == (288, 271)
    assert llama["mask_token_id"] == 271
    assert llama["eos_token_ids"] == [261]
    assert "_name_or_path" not in llama["config"]


def test_weights_keep_the_type_they_were_published_in(
    target_folder: TargetFolder, tmp_path: Path
) -> None:
    """bf16 weights computed in float32 are saved as bf16; float32 ones computed in bf16 as bf16."""
    target = loaded(target_folder("llama"))
    target.model.to(torch.bfloat16).save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    for dtype in ("float32", "bfloat16"):
        weights, _ = read_head(loaded(tmp_path, dtype), tmp_path)
        assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


def test_the_tokenizer_comes_along(target_folder: TargetFolder, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = target_folder("llama")
    target = loaded(folder)
    for name, data in head_files(target, folder=folder, token_ids=TOKENS).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert tokenizer.chat_template == target.tokenizer.chat_template
    assert tokenizer("hello all").input_ids == target.tokenizer("hello all").input_ids


def test_without_free_rows_the_mask_token_is_the_tokenizers(target_folder: TargetFolder) -> None:
    target = loaded(target_folder("llama"))
    size = len(target.tokenizer)
    assert mask_token_id(target, num_rows=size + 1) == size
    assert mask_token_id(target, num_rows=size) is None
    target.tokenizer.mask_token = "<eos>"
    assert mask_token_id(target, num_rows=size) == 268


def test_an_unknown_rule_is_refused(
    target_folder: TargetFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = loaded(target_folder("llama"))
    embed = target.model.get_input_embeddings()
    hook = embed.register_forward_hook(lambda module, inputs, output: output * 3.7)
    with pytest.raises(ValueError, match="llama cannot be used yet: its embeddings"):
        head_files(target, folder=target_folder("llama"), token_ids=TOKENS)
    hook.remove()
    head = target.model.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, output: output * 3.7)
    with pytest.raises(ValueError, match="its logits are not"):
        head_files(target, folder=target_folder("llama"), token_ids=TOKENS)
