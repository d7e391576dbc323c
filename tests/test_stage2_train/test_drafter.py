"""Our drafter is the official one, weight by weight and logit by logit."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from stage2_train.architecture import (
    DrafterArchitecture,
    default_target_layer_ids,
    read_rope_parameters,
    resolve_architecture,
)
from stage2_train.attention import make_decoding_attend
from stage2_train.config import DrafterConfig
from stage2_train.drafter import Drafter, initialize

ROPES = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    },
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    },
    {
        "rope_type": "longrope",
        "factor": 4.0,
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    },
]
SHAPES = [
    {},
    {"num_hidden_layers": 1, "layer_types": ("full_attention",), "is_causal": True},
    {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 6},
    {
        "layer_types": ("sliding_attention", "sliding_attention"),
        "sliding_window": 5,
        "is_causal": False,
    },
    {"head_dim": 16, "num_key_value_heads": 4, "intermediate_size": 20},
    *({"rope_parameters": rope} for rope in ROPES[1:]),
]


def draft(drafter: Drafter, states: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    num_tokens, block_size = states.shape[1], block.shape[1]
    context = drafter.context_key_values(states, torch.arange(num_tokens)[None])
    return drafter(
        block,
        torch.arange(num_tokens, num_tokens + block_size)[None],
        context,
        make_decoding_attend(drafter.architecture.attention_rules),
    )


def random_drafter(architecture: DrafterArchitecture) -> Drafter:
    drafter = Drafter(architecture)
    initialize(drafter, seed=1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            # Large and uneven, so that every weight shows in the result.
            parameter.mul_(5.0).add_(0.01 * torch.randn(parameter.shape))
    return drafter


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_logits_are_the_official_drafters(architecture, tmp_path, changes):
    model = pytest.importorskip("dflash.model", reason="the official package is not installed")
    torch.manual_seed(0)
    architecture = dataclasses.replace(architecture, **changes)
    drafter = random_drafter(architecture)
    (tmp_path / "config.json").write_text(json.dumps(architecture.to_config()))
    save_file(drafter.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    official, report = model.DFlashDraftModel.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    states, block = torch.randn(1, 12, 64), torch.randn(1, 5, 32)
    with torch.no_grad():
        expected = official.eval()(
            position_ids=torch.arange(17)[None], noise_embedding=block, target_hidden=states
        )
        torch.testing.assert_close(draft(drafter, states, block), expected)
    assert official.target_layer_ids == list(architecture.target_layer_ids)
    assert official.block_size == architecture.block_size
    assert official.mask_token_id == architecture.mask_token_id


@pytest.mark.parametrize("changes", [*SHAPES, {"output_multiplier": 0.5}], ids=str)
def test_config_round_trip(architecture, changes):
    architecture = dataclasses.replace(architecture, **changes)
    written = json.loads(json.dumps(architecture.to_config()))
    assert DrafterArchitecture.from_config(written) == architecture


def test_configs_of_transformers_4_are_read(architecture):
    config = architecture.to_config()
    del config["rope_parameters"], config["layer_types"]
    assert DrafterArchitecture.from_config(config) == architecture


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"attention_bias": True}, "biases are not supported"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash 2"),
        ({"hidden_size": None}, "no 'hidden_size'"),
    ],
)
def test_other_drafters_are_refused(architecture, config, message):
    config = {k: v for k, v in (architecture.to_config() | config).items() if v is not None}
    with pytest.raises(ValueError, match=message):
        DrafterArchitecture.from_config(config)


def test_context_is_cacheable_token_by_token(architecture):
    drafter = random_drafter(architecture).double()
    states, positions = torch.randn(1, 9, 64).double(), torch.arange(9)[None]
    whole = drafter.context_key_values(states, positions)
    parts = [
        drafter.context_key_values(states[:, cut], positions[:, cut])
        for cut in (slice(0, 4), slice(4, 9))
    ]
    for layer, (keys, values) in enumerate(whole):
        torch.testing.assert_close(torch.cat([part[layer][0] for part in parts], 2), keys)
        torch.testing.assert_close(torch.cat([part[layer][1] for part in parts], 2), values)


def test_casting_leaves_rope_frequencies_alone(architecture):
    drafter = Drafter(architecture)
    positions = torch.arange(400)[None]
    before = drafter.rotation(positions, torch.float32)
    after = drafter.to(torch.bfloat16).rotation(positions, torch.float32)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


def test_initial_weights_depend_on_the_seed_alone(architecture):
    first, second = Drafter(architecture), Drafter(architecture)
    initialize(first, seed=3)
    initialize(second, seed=3)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stage2_train.drafter.os.cpu_count", lambda: 1)
        initialize(second, seed=3)
    assert torch.equal(first.fc.weight, second.fc.weight), "by one thread, too"
    layer, other = first.layers[0].mlp, first.layers[1].mlp
    assert not torch.equal(layer.up_proj.weight, other.up_proj.weight)
    initialize(second, seed=4)
    assert not torch.equal(first.fc.weight, second.fc.weight)
    assert first.fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert (first.norm.weight == 1).all()


def test_a_drafter_can_be_made_for_inference(architecture):
    with torch.inference_mode():
        made = Drafter(architecture)
        initialize(made, seed=3)
    expected = Drafter(architecture)
    initialize(expected, seed=3)
    assert torch.equal(made.fc.weight, expected.fc.weight)
    assert made.fc.weight.is_inference()
    assert not expected.fc.weight.is_inference()


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(1, (18,)), (2, (1, 33)), (5, (1, 9, 17, 25, 33))],
)
def test_default_layers_are_the_official_ones(num_layers, expected):
    assert default_target_layer_ids(num_layers, 36) == expected


def resolve(drafter: DrafterConfig, target_config: dict) -> DrafterArchitecture:
    return resolve_architecture(
        drafter,
        target_config=target_config,
        vocab_size=64,
        num_target_layers=6,
        stored_layer_ids=[4, 1, 2],
        mask_token_id=63,
        scales={
            "input_embedding_scale": 2.0,
            "output_multiplier": 1.0,
            "final_logit_softcapping": 30.0,
        },
    )


def test_what_the_run_file_leaves_open_is_the_targets():
    target = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    architecture = resolve(DrafterConfig(name="d", num_layers=3), target.to_dict())
    assert architecture.target_layer_ids == (1, 2, 4)
    assert architecture.head_dim == 16
    assert architecture.num_key_value_heads == 2
    assert architecture.intermediate_size == target.intermediate_size
    assert architecture.final_logit_softcapping == 30.0
    assert architecture.mask_token_id == 63
    subset = DrafterConfig(name="d", target_layer_ids=(4,), mask_token_id=0, sliding_layers=())
    assert resolve(subset, target.to_dict()).target_layer_ids == (4,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head_dim": 7}, "drafter d: head_dim 7 is odd"),
        ({"target_layer_ids": ()}, "drafter d: target_layer_ids is empty"),
        ({"target_layer_ids": (1, 1)}, "drafter d: target_layer_ids names a layer twice"),
        ({"target_layer_ids": (5,)}, r"drafter d: target_layer_ids \[5\] are not in the store"),
        ({"num_attention_heads": 3}, "drafter d: num_attention_heads 3 is no multiple"),
        ({"mask_token_id": 64}, "drafter d: mask_token_id 64 is outside"),
        ({"sliding_layers": (9,)}, r"drafter d: sliding_layers \[9\] lie outside"),
    ],
)
def test_shapes_that_cannot_be_are_refused_by_the_drafters_name(settings, message):
    target = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises(ValueError, match=message):
        resolve(DrafterConfig(name="d", **settings), target.to_dict())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_theta": 5.0}, {"rope_type": "default", "rope_theta": 5.0}),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 7.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1.0},
                }
            },
            {"rope_type": "default", "rope_theta": 7.0},
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 9.0,
                    "partial_rotary_factor": 0.25,
                    "mrope_section": [1, 2, 3],
                }
            },
            {"rope_type": "default", "rope_theta": 9.0},
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5.0},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0},
        ),
    ],
)
def test_rope_of_any_target(config, expected):
    assert read_rope_parameters(config) == expected
