"""The count agrees with the one worked out by hand for Qwen3-8B's shape."""

import pytest

from stage2_train.architecture import FULL, DrafterArchitecture
from stage2_train.flops import step_flops


def test_a_step_at_the_shape_of_qwen3_8b():
    architecture = DrafterArchitecture(
        hidden_size=4096,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=12288,
        rms_norm_eps=1e-6,
        vocab_size=151_936,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        max_position_embeddings=40_960,
        block_size=16,
        mask_token_id=0,
        target_layer_ids=(1, 9, 17, 25, 33),
        num_target_layers=36,
        layer_types=(FULL,) * 5,
    )
    flops = step_flops(
        architecture,
        num_context_tokens=3072,
        num_blocks=512,
        num_rows=512 * 15,
        num_seen_pairs=512 * 16 * (3072 // 2 + 16),
    )
    assert flops == pytest.approx(7.2e13, rel=0.03)
