"""Plan of stage 2: a drafter's size, memory, pace and what it reads, from shapes alone."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stage1_extract.plan import TOKEN_BYTES, StoreShape
from stage2_train.config import DrafterRun

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from stage1_extract.plan_counts import TokenCount
    from stage2_train.architecture import DrafterArchitecture

TRAIN_SHARE, FP8_TRAIN_SHARE = 0.58, 0.85
"""Share of a GPU's published peak in half precision that a training step reaches, with its products
in half precision and in fp8: 0.58 to 0.60, and 0.87, were measured on an H200."""
HOPPER = ("GH200", "H200", "H100", "H800", "H20")
BATCH_FILL = 0.95
"""Real tokens in a packed batch."""
MASTER_BYTES = 16
"""fp32 master weight, two moments and gradient of a drafter's weight."""
_LIVE_HIDDEN = 4
"""Tensors of the hidden size that a draft layer keeps for its backward pass."""
_LIVE_MLP = 3
"""Tensors of the MLP's size that it keeps."""


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """One drafter of stage 2."""

    name: str
    num_parameters: int
    memory_bytes: int
    """Peak of each of its devices."""
    num_tokens: int
    """Trained on, all epochs together."""
    tokens_per_s: float | None
    """All its devices together."""
    read_token_bytes: int
    """Bytes read for one token."""

    @property
    def hours(self) -> float | None:
        """Of the whole training."""
        return None if self.tokens_per_s is None else self.num_tokens / self.tokens_per_s / 3600

    @property
    def read_bytes_per_s(self) -> float | None:
        """What the store has to give while this drafter trains."""
        return None if self.tokens_per_s is None else self.tokens_per_s * self.read_token_bytes


def plan_training(
    run: DrafterRun,
    target_config: "PretrainedConfig",
    shape: StoreShape,
    count: "TokenCount",
    *,
    held_out_fraction: float,
    gpu_name: str | None,
) -> TrainingPlan:
    """Plans one drafter's training.

    Args:
        run: Its settings.
        target_config: The target's text configuration.
        shape: The store it reads.
        count: Tokens of the data.
        held_out_fraction: Share of them that is not trained on.
        gpu_name: As CUDA names it; None is a CPU.

    Raises:
        ValueError: The drafter does not fit the target or the store.
    """
    from storage.encodings import encoded_bytes_per_token

    architecture = planned_architecture(run, target_config, shape)
    num_parameters = _num_parameters(architecture)
    batch_tokens, num_ranks = run.train.batch_tokens * BATCH_FILL, run.train.gpus_per_drafter
    trained_share = (1 - held_out_fraction) * run.train.data_fraction
    num_tokens = count.num_tokens * trained_share * run.train.epochs
    if run.train.max_steps is not None:
        step_tokens = batch_tokens * (run.train.batches_per_step or num_ranks)
        num_tokens = min(num_tokens, run.train.max_steps * step_tokens)
    speed = _flops_per_s(run, architecture, gpu_name)
    flops = _step_flops(run, architecture, count.mean_context_tokens)
    layer_bytes = encoded_bytes_per_token(shape.encoding, shape.hidden_size)
    return TrainingPlan(
        name=run.drafter.name,
        num_parameters=num_parameters,
        memory_bytes=_peak_memory(
            run, architecture, num_parameters, has_tied_head=target_config.tie_word_embeddings
        ),
        num_tokens=round(num_tokens),
        tokens_per_s=None if speed is None else num_ranks * batch_tokens / (flops / speed),
        read_token_bytes=len(architecture.target_layer_ids) * layer_bytes + TOKEN_BYTES,
    )


def planned_architecture(
    run: DrafterRun, target_config: "PretrainedConfig", shape: StoreShape
) -> "DrafterArchitecture":
    """The drafter's shape, up to the token that masks.

    Raises:
        ValueError: The drafter does not fit the target or the store.
    """
    from stage2_train.architecture import resolve_architecture

    return resolve_architecture(
        run.drafter,
        target_config=target_config.to_dict(),
        vocab_size=target_config.vocab_size,
        num_target_layers=target_config.num_hidden_layers,
        stored_layer_ids=[int(name) for name in shape.layers if name.isdigit()],
        # Which token it is changes no size; the target's spare one is known to stage 1 only.
        mask_token_id=0,
        scales={},
    )


def _num_parameters(architecture: "DrafterArchitecture") -> int:
    import torch

    from stage2_train.drafter import Drafter

    with torch.device("meta"):
        return sum(weight.numel() for weight in Drafter(architecture).parameters())


def _step_flops(
    run: DrafterRun, architecture: "DrafterArchitecture", mean_context_tokens: float
) -> int:
    """Arithmetic of one full batch."""
    from stage2_train.blocks import offset_weights
    from stage2_train.flops import step_flops

    loss, block_size = run.train.loss, architecture.block_size
    weights = offset_weights(block_size, gamma=loss.gamma, min_weight=loss.min_weight)
    block_tokens = run.train.num_anchors * block_size
    return step_flops(
        architecture,
        num_context_tokens=run.train.batch_tokens,
        num_blocks=run.train.num_anchors,
        num_rows=run.train.num_anchors * int((weights > 0).sum()),
        num_seen_pairs=round(block_tokens * (mean_context_tokens + block_size)),
    )


def _flops_per_s(
    run: DrafterRun, architecture: "DrafterArchitecture", gpu_name: str | None
) -> float | None:
    from stage1_extract.plan_rates import CPU_THREAD_FLOPS, peak_flops

    if gpu_name is None:
        return CPU_THREAD_FLOPS * run.train.torch_threads
    peak = peak_flops(gpu_name, is_half=True)
    if peak is None:
        return None
    return peak * (FP8_TRAIN_SHARE if _has_fp8(run, architecture, gpu_name) else TRAIN_SHARE)


def _has_fp8(run: DrafterRun, architecture: "DrafterArchitecture", gpu_name: str) -> bool:
    """Whether training chooses fp8 products by itself, or is told to."""
    from stage2_train.preparation import MIN_FP8_HIDDEN_SIZE

    if run.train.fp8 is not None:
        return run.train.fp8 == "all"
    is_measured = run.train.may_choose_fp8 and any(name in gpu_name for name in HOPPER)
    return is_measured and architecture.hidden_size >= MIN_FP8_HIDDEN_SIZE


def _peak_memory(
    run: DrafterRun,
    architecture: "DrafterArchitecture",
    num_parameters: int,
    *,
    has_tied_head: bool,
) -> int:
    """Bytes that a training step in half precision takes on each GPU: weights, head, kept
    activations, states, loss.

    For the drafter of an 8 B target at 512 anchors of 16 it is within 5% of the 25.1 GB that were
    measured on an H200.
    """
    hidden = architecture.hidden_size
    queries = architecture.num_attention_heads * architecture.head_dim
    key_values = 2 * architecture.num_key_value_heads * architecture.head_dim
    kept = _LIVE_HIDDEN * hidden + _LIVE_MLP * architecture.intermediate_size + queries + key_values
    block_tokens = run.train.num_anchors * architecture.block_size
    layer_elements = block_tokens * kept + run.train.batch_tokens * 2 * key_values
    state_elements = 2 * run.train.batch_tokens * len(architecture.target_layer_ids) * hidden
    num_parts = run.train.gpus_per_drafter if run.train.parallel == "fsdp" else 1
    return math.ceil(
        MASTER_BYTES * num_parameters / num_parts
        + 2 * (1 if has_tied_head else 2) * architecture.vocab_size * hidden
        + 2 * (architecture.num_hidden_layers * layer_elements + state_elements)
        + 4 * run.train.loss.chunk_rows * architecture.vocab_size
    )
