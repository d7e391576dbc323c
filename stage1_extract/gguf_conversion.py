"""From a GGUF file to an ordinary Hugging Face folder: weights, tokenizer, configuration.

Only what the embedded target needs is known here: the `llama` architecture with tied embeddings
and the `smollm` pre-tokenizer. Anything else is refused rather than guessed.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from jaxtyping import Float
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from storage.errors import explain_os_errors

_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_CONTROL_TOKEN = 3


def convert_gguf(gguf_path: str | Path, folder: str | Path) -> None:
    """Writes config, weights (dequantised, bf16) and tokenizer of a GGUF file into a folder.

    The same GGUF gives the same bytes on every machine, so a store's identity does not depend on
    where the conversion ran. Not atomic: the caller renames the finished folder.

    Raises:
        ValueError: The file is not of the one kind this conversion knows.
    """
    reader = GGUFReader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _require(gguf_path, fields, "general.architecture", "llama")
    _require(gguf_path, fields, "tokenizer.ggml.model", "gpt2")
    _require(gguf_path, fields, "tokenizer.ggml.pre", "smollm")
    folder = Path(folder)
    with explain_os_errors("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            read_weights(reader, fields), folder / "model.safetensors", metadata={"format": "pt"}
        )
        build_tokenizer(fields).save(str(folder / "tokenizer.json"))
        _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields))
        _write_json(folder / "config.json", _model_config(fields))
        _write_json(folder / "generation_config.json", _generation_config(fields))


def read_weights(reader: GGUFReader, fields: Mapping[str, Any]) -> dict[str, Tensor]:
    """The dequantised weights under their Hugging Face names, bf16."""
    weights = {}
    for tensor in reader.tensors:
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        name, weight = _hugging_face_name(tensor.name), torch.from_numpy(values)
        if ".q_proj." in name:
            weight = restore_rotary_halves(weight, num_heads=fields["llama.attention.head_count"])
        elif ".k_proj." in name:
            weight = restore_rotary_halves(
                weight, num_heads=fields["llama.attention.head_count_kv"]
            )
        weights[name] = weight.to(torch.bfloat16).contiguous()
    return weights


def restore_rotary_halves(
    weight: Float[Tensor, "rows hidden"], *, num_heads: int
) -> Float[Tensor, "rows hidden"]:
    """Undoes llama.cpp's row order of q and k, where rotated pairs lie side by side.

    Hugging Face keeps a head's first halves of all pairs, then the second halves.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return pairs.transpose(1, 2).reshape(rows, hidden)


def build_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """Byte-level BPE that splits numbers into single digits, as SmolLM2 was trained with."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    token_types: list[int] = fields["tokenizer.ggml.token_type"]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, token_type in zip(tokens, token_types, strict=True)
            if token_type == _CONTROL_TOKEN
        ]
    )
    return tokenizer


def _hugging_face_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise ValueError(f"GGUF tensor {name} has no place in a Llama model with tied embeddings")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"


def _model_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    num_heads = fields["llama.attention.head_count"]
    hidden_size = fields["llama.embedding_length"]
    rope_theta = fields["llama.rope.freq_base"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "dtype": "bfloat16",
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": num_heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        # GGUF keeps 1e-5 as a float32; nine digits give back the number that was meant.
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "rope_theta": rope_theta,
        "tie_word_embeddings": True,
        # Without a version transformers warns, wrongly, about a Mistral tokenizer pattern.
        "transformers_version": "5.0.0",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    }


def _tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        # The generic class loads tokenizer.json as it is; model classes rebuild it without digits.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
    }


def _generation_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": [fields["tokenizer.ggml.eos_token_id"]],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _require(gguf_path: str | Path, fields: Mapping[str, Any], name: str, expected: str) -> None:
    if fields.get(name) != expected:
        raise ValueError(f"{gguf_path}: {name} is {fields.get(name)!r}, expected {expected!r}")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
