"""Sizes of the targets and drafters that benchmarks pretend to have."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of target and drafter."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    num_target_layers: int
    num_layers: int = 5
    block_size: int = 16
    sequence_tokens: int = 3072


SHAPES = {
    "qwen3-8b": Shape(
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=12288,
        vocab_size=151_936,
        num_target_layers=36,
    ),
    "wide": Shape(
        hidden_size=5120,
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=17_408,
        vocab_size=248_320,
        num_target_layers=64,
    ),
    "small": Shape(
        hidden_size=512,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        intermediate_size=1024,
        vocab_size=8192,
        num_target_layers=12,
        num_layers=3,
    ),
    "tiny": Shape(
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=128,
        vocab_size=512,
        num_target_layers=8,
        num_layers=2,
        block_size=8,
        sequence_tokens=256,
    ),
}
