"""Rates: costs follow from the configuration alone, and the table is near what was measured."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from stage1_extract.config import ExtractRun, TargetConfig
from stage1_extract.plan_counts import usable_sequences
from stage1_extract.plan_rates import estimated_rate, measured_rate, peak_flops, target_skeleton
from stage1_extract.preparation import open_conversations, run_sequence
from stage1_extract.target_files import load_tokenizer

QWEN3_8B = Qwen3Config(
    hidden_size=4096,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=12288,
    vocab_size=151936,
)


@pytest.fixture
def target_of(tmp_path: Path) -> Callable[[PretrainedConfig], TargetConfig]:
    """Gives a target that is a configuration and nothing else."""

    def save(config: PretrainedConfig) -> TargetConfig:
        config.save_pretrained(tmp_path)
        return TargetConfig(model=str(tmp_path))

    return save


def test_the_cost_of_a_dense_target_is_two_operations_a_weight(
    target_of: Callable[[PretrainedConfig], TargetConfig],
) -> None:
    skeleton = target_skeleton(target_of(QWEN3_8B), ["1", "33"])
    layer = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288
    assert skeleton.num_parameters == pytest.approx(8.19e9, rel=0.01)
    assert skeleton.flops_per_token == 2 * 34 * layer
    assert skeleton.forward_flops(100.0) - skeleton.flops_per_token == 4 * 4096 * 34 * 100


def test_the_last_norm_needs_all_layers(
    target_of: Callable[[PretrainedConfig], TargetConfig],
) -> None:
    target = target_of(QWEN3_8B)
    some, whole = (target_skeleton(target, layers) for layers in (["8"], ["8", "lm_head_input"]))
    assert whole.flops_per_token == pytest.approx(4 * some.flops_per_token)


def test_of_experts_only_the_chosen_count(
    target_of: Callable[[PretrainedConfig], TargetConfig],
) -> None:
    """Qwen3-30B-A3B: 30 B weights, of which a token passes 3 B."""
    config = Qwen3MoeConfig(
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
    )
    skeleton = target_skeleton(target_of(config), ["47"])
    assert skeleton.num_parameters == pytest.approx(30.5e9, rel=0.02)
    assert skeleton.flops_per_token / 2 == pytest.approx(2.75e9, rel=0.05)


def test_the_table_is_near_the_measured_rate(
    target_of: Callable[[PretrainedConfig], TargetConfig],
) -> None:
    """36.9 thousand tokens a second of 3,072-token sequences were measured on an H200."""
    rate = estimated_rate(
        target_skeleton(target_of(QWEN3_8B), ["33"]),
        mean_context_tokens=1536.0,
        gpu_name="NVIDIA H200",
        dtype="bfloat16",
        num_places=1,
    )
    assert rate == pytest.approx(36_900, rel=0.35)


def test_a_gpu_that_the_table_does_not_hold_has_no_rate(
    target_of: Callable[[PretrainedConfig], TargetConfig],
) -> None:
    skeleton = target_skeleton(target_of(QWEN3_8B), ["33"])
    settings = {"mean_context_tokens": 1.0, "dtype": "bfloat16", "num_places": 1}
    assert estimated_rate(skeleton, gpu_name="Abacus 9", **settings) is None  # type: ignore[arg-type]
    assert estimated_rate(skeleton, gpu_name=None, **settings) is not None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "half"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GH200 480GB", 989e12),
    ],
)
def test_names_are_read_as_cuda_gives_them(name: str, half: float) -> None:
    assert peak_flops(name, is_half=True) == half


def test_a_rate_is_measured_on_real_sequences(make_run: Callable[..., ExtractRun]) -> None:
    run = make_run()
    conversations, tokenizer = open_conversations(run), load_tokenizer(run.target)
    sequences = list(
        usable_sequences(
            conversations.ids,
            lambda name: run_sequence(run, conversations, name, tokenizer, vocab_size=288),
        )
    )
    assert measured_rate(run, sequences, ["0", "2"], seconds=0.1) > 0
