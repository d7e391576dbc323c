"""Useful arithmetic of a training step, so that a rate can be held against the hardware's."""

import statistics
import time

import torch

from stage2_train.architecture import DrafterArchitecture


def step_flops(
    architecture: DrafterArchitecture,
    *,
    num_context_tokens: int,
    num_blocks: int,
    num_rows: int,
    num_seen_pairs: int,
) -> int:
    """Counts the multiply-adds of forward and backward, two operations each.

    A trained matrix costs three products a token, the frozen LM head two; attention costs two
    products forward and five backward over the pairs that the mask lets see each other. Counted is
    the whole drafter: what the fast path need not compute, equal mask tokens in the first layer and
    anchors at the end of the last one, is 2% of a step at Qwen3-8B's shape.

    Args:
        architecture: the drafter's shape.
        num_context_tokens: context tokens of the batch.
        num_blocks: blocks of the batch.
        num_rows: rows of the loss.
        num_seen_pairs: pairs of a query and a key that it sees, in one layer.
    """
    hidden = architecture.hidden_size
    query = architecture.num_attention_heads * architecture.head_dim
    key_value = 2 * architecture.num_key_value_heads * architecture.head_dim
    block_tokens = num_blocks * architecture.block_size
    layer_weights = hidden * (2 * query + key_value + 3 * architecture.intermediate_size)
    context_weights = hidden * key_value
    layers = architecture.num_hidden_layers
    trained = layers * (layer_weights * block_tokens + context_weights * num_context_tokens)
    trained += len(architecture.target_layer_ids) * hidden * hidden * num_context_tokens
    # The states are given: `fc` needs no gradient of its input.
    trained_products = 3 * trained
    trained_products -= len(architecture.target_layer_ids) * hidden * hidden * num_context_tokens
    head = 2 * num_rows * hidden * architecture.vocab_size
    attention = 7 * layers * num_seen_pairs * query
    return 2 * (trained_products + head + attention)


def measured_peak_flops(device: torch.device) -> float:
    """Gives what bf16 matrix products reach on a device, in FLOP/s; takes some 50 ms."""
    size = 8192 if device.type == "cuda" else 512
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    times = []
    for _ in range(12):
        _wait(device)
        start_s = time.perf_counter()
        torch.mm(left, right)
        _wait(device)
        times.append(time.perf_counter() - start_s)
    return 2 * size**3 / statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
