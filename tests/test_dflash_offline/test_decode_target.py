"""Targets of many architectures decode losslessly with any drafter, or are refused: with why."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dflash_offline.decode_target import TargetDecoder, check_cached_passes
from dflash_offline.speculate import DecodingSettings, decode

VOCAB_SIZE = 12
BASE = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "head_dim": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
ARCHITECTURES = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "qwen3_next": {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": LINEAR,
    "gemma2": {"sliding_window": 6, "query_pre_attn_scalar": 8},
    "gemma3_text": {
        "sliding_window": 6,
        "layer_types": SLIDING,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 8,
    },
    "mistral": {"sliding_window": 6},
    "phi3": {"sliding_window": 6},
    "gpt_oss": {
        "sliding_window": 6,
        "layer_types": SLIDING,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "glm4": {},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "deepseek_v3": LATENT,
    "olmo2": {},
    "granite": {"logits_scaling": 2.0, "embedding_multiplier": 3.0},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"sliding_window": 6, "layer_types": SLIDING, "logit_scale": 0.5},
}


def make(model_type, **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**BASE, **changes})
    # The grouped expert kernels know no fp64.
    config._experts_implementation = "eager"
    return AutoModelForCausalLM.from_config(config).double().eval()


def uncached_greedy(model, prompt, *, max_new_tokens):
    token_ids = list(prompt)
    with torch.inference_mode():
        for _ in range(max_new_tokens):
            logits = model(torch.tensor([token_ids]), use_cache=False).logits[0, -1]
            token_ids.append(int(logits.argmax()))
    return token_ids[len(prompt) :]


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_matrix_of_targets_is_lossless(model_type, make_drafter, make_head):
    target = make(model_type, **ARCHITECTURES[model_type])
    decoder = TargetDecoder(target, layer_ids=(0, 1))
    check_cached_passes(decoder)
    torch.manual_seed(1)
    prompts = [torch.randint(0, VOCAB_SIZE - 1, (length,)).tolist() for length in (2, 11, 5)]
    drafted = decode(
        decoder,
        prompts,
        settings=DecodingSettings(max_new_tokens=14),
        batch_size=3,
        drafter=make_drafter(target),
        head=make_head(target),
    )
    for prompt, generation in zip(prompts, drafted.generations, strict=True):
        assert generation.token_ids == uncached_greedy(target, prompt, max_new_tokens=14)


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "conv layers"),
        ("falcon_h1", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}, "hybrid"),
    ],
)
def test_targets_that_cannot_roll_back_are_refused_with_the_reason(model_type, changes, reason):
    with pytest.raises(ValueError, match=reason):
        TargetDecoder(make(model_type, **changes))


def test_a_mask_that_shows_rejected_tokens_is_noticed(monkeypatch):
    decoder = TargetDecoder(make("llama"))
    monkeypatch.setattr(
        "dflash_offline.caches.visible_slots",
        lambda kind, positions, *, num_visible, config: torch.ones(
            positions.shape[0], 1, positions.shape[1], num_visible, dtype=torch.bool
        ),
    )
    with pytest.raises(ValueError, match="differ from a plain pass"):
        check_cached_passes(decoder)


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text"])
def test_linear_states_that_are_not_rolled_back_are_noticed(model_type):
    decoder = TargetDecoder(make(model_type, **ARCHITECTURES[model_type]))
    assert decoder.must_replay
    decoder.must_replay = False
    with pytest.raises(ValueError, match="differ from a plain pass"):
        check_cached_passes(decoder)
