"""Any target: tiny random models of many architectures pass the proof, each in its best way.

What is stored must be the target's own whatever it is made of: sliding windows, soft caps, partial
rotary, sinks, mixtures of experts, latent attention, linear attention, multimodal wrappers.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from stage1_extract.parity import choose_batching
from stage1_extract.target_head import head_files
from stage1_extract.target_transformers import TransformersTarget
from storage.schema import LM_HEAD_INPUT

SIZES: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR_ATTENTION = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
LATENT_ATTENTION = {
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
WINDOW = {"sliding_window": 8}

# Architecture, what is special about it, the way that must be found, facts of the head.
TARGETS: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("llama", {}, "packed", {"norm_kind": "rms", "embedding_scale": 1.0, "logit_scale": 1.0}),
    ("qwen2", {}, "packed", {}),
    ("qwen3", {}, "packed", {}),
    ("qwen3_moe", EXPERTS, "packed", {}),
    ("qwen3_next", EXPERTS | LINEAR_ATTENTION, "padded", {"norm_kind": "rms_one_plus_weight"}),
    ("qwen3_5_text", LINEAR_ATTENTION, "padded", {}),
    (
        "gemma2",
        WINDOW | {"query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0},
        "packed",
        {"norm_kind": "rms_one_plus_weight", "final_logit_softcapping": 5.0},
    ),
    ("gemma3_text", WINDOW, "packed", {"embedding_scale": 32**0.5}),
    ("mistral", WINDOW, "packed", {}),
    ("mixtral", {"num_local_experts": 4}, "packed", {}),
    ("phi3", {"partial_rotary_factor": 0.5}, "packed", {}),
    ("gpt_oss", WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2}, "packed", {}),
    ("glm4", {"partial_rotary_factor": 0.5}, "packed", {}),
    ("deepseek_v3", LATENT_ATTENTION, "packed", {}),
    ("olmo2", {}, "packed", {}),
    ("olmo3", WINDOW, "packed", {}),
    (
        "granite",
        {"embedding_multiplier": 6.0, "logits_scaling": 4.0, "residual_multiplier": 0.5},
        "packed",
        {"embedding_scale": 6.0, "logit_scale": 0.25},
    ),
    ("cohere", {"logit_scale": 0.3}, "packed", {"logit_scale": 0.3, "norm_kind": "layer"}),
    ("cohere2", WINDOW | {"logit_scale": 0.3}, "packed", {}),
    ("smollm3", {}, "packed", {}),
    ("lfm2", {}, "packed", {}),
    ("gpt_neox", {}, "packed", {"norm_kind": "layer"}),
    ("stablelm", {}, "padded", {}),
    ("nemotron", {}, "padded", {"norm_kind": "other"}),
    ("falcon_h1", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}, "padded", {}),
]


def sequences() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(3, 280, length, dtype=np.int32) for length in (7, 20, 33)]


@pytest.fixture
def random_target(make_tokenizer: Callable[..., Any]) -> Callable[..., TransformersTarget]:
    """Gives a target with random weights."""

    def make(config: Any, *, is_multimodal: bool = False) -> TransformersTarget:
        torch.manual_seed(0)
        auto = AutoModelForImageTextToText if is_multimodal else AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.float32).eval()
        return TransformersTarget(model, make_tokenizer("chatml"))

    return make


@pytest.mark.parametrize(
    ("kind", "changes", "batching", "facts"), TARGETS, ids=[target[0] for target in TARGETS]
)
def test_text_targets(
    random_target: Callable[..., TransformersTarget],
    tmp_path: Path,
    kind: str,
    changes: dict[str, Any],
    batching: str,
    facts: dict[str, Any],
) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers version has no {kind}")
    target = random_target(CONFIG_MAPPING[kind](**(SIZES | changes)))
    layers = ["0", "1", "2", "3", LM_HEAD_INPUT]
    assert choose_batching(target, sequences(), layers=layers) == batching
    files = head_files(target, folder=tmp_path, token_ids=sequences()[1])
    found = json.loads(files["target.json"])
    assert {name: found[name] for name in facts} == pytest.approx(facts)


def vision() -> dict[str, Any]:
    return {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }


QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
}


def wrapped(kind: str, text_kind: str, **other: Any) -> Any:
    special = LINEAR_ATTENTION if text_kind == "qwen3_5_text" else {}
    text = CONFIG_MAPPING[text_kind](**SIZES, **special)
    return CONFIG_MAPPING[kind](text_config=text.to_dict(), **other)


@pytest.mark.parametrize(
    ("kind", "text_kind", "other"),
    [
        ("llava", "llama", {"vision_config": {"model_type": "clip_vision_model", **vision()}}),
        ("gemma3", "gemma3_text", {"vision_config": vision(), "mm_tokens_per_image": 4}),
        ("mistral3", "mistral", {"vision_config": {"model_type": "pixtral", **vision()}}),
        ("qwen3_5", "qwen3_5_text", {"vision_config": QWEN_VISION}),
        (
            "qwen3_vl",
            "qwen3_vl_text",
            {"vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0]}},
        ),
    ],
)
def test_multimodal_targets(
    random_target: Callable[..., TransformersTarget],
    tmp_path: Path,
    kind: str,
    text_kind: str,
    other: dict[str, Any],
) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers version has no {kind}")
    target = random_target(wrapped(kind, text_kind, **other), is_multimodal=True)
    assert target.config.num_hidden_layers == 4
    batching = choose_batching(target, sequences(), layers=["0", "2", LM_HEAD_INPUT])
    assert batching in ("packed", "padded")
    head_files(target, folder=tmp_path, token_ids=sequences()[1])
