"""Rates: what a target's forward pass costs, how fast devices are, and a measurement of both.

The table gives an order of magnitude for targets that keep a device busy (about 1 B parameters and
more); `measured_rate` tells the truth for the machine it runs on.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from stage1_extract.batches import batches_for
from stage1_extract.config import ExtractRun, TargetConfig
from stage1_extract.decoder import find_decoder
from stage1_extract.parity import choose_way
from stage1_extract.sequences import TokenSequence
from stage1_extract.target import load_target, resolve_target
from stage1_extract.target_files import load_config
from storage.schema import LM_HEAD_INPUT

PEAK_FLOPS: dict[str, tuple[float, float]] = {
    "B300": (2250e12, 75e12),
    "B200": (2250e12, 75e12),
    "GH200": (989e12, 67e12),
    "H200": (989e12, 67e12),
    "H100 PCIe": (756e12, 51e12),
    "H100": (989e12, 67e12),
    "H800": (989e12, 67e12),
    "H20": (148e12, 44e12),
    "A100": (312e12, 19.5e12),
    "A800": (312e12, 19.5e12),
    "L40S": (362e12, 91e12),
    "L40": (181e12, 90e12),
    "L4": (121e12, 30e12),
    "A40": (150e12, 37e12),
    "A10": (125e12, 31e12),
    "RTX PRO 6000": (503e12, 125e12),
    "RTX 6000 Ada": (364e12, 91e12),
    "RTX A6000": (155e12, 39e12),
    "RTX 5090": (210e12, 105e12),
    "RTX 4090": (165e12, 83e12),
    "RTX 3090": (71e12, 36e12),
}
"""Part of a GPU's name to its dense peak in half and in single precision, in FLOP/s (makers' data
sheets); the first part that fits counts, so that longer names stand before shorter ones."""

FORWARD_SHARE = 0.6
"""Share of the peak that compiled forward passes reach, into the committed store: 0.60 and 0.63
were measured on an H200, for targets of 8 B and 27 B; uncompiled ones 0.46."""

CPU_THREAD_FLOPS = 7e10
"""One CPU thread with AVX-512 in float32, measured with a 135 M target."""


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """A target's size and cost, from its configuration alone."""

    num_parameters: int
    flops_per_token: float
    """Forward pass up to the highest captured layer, without attention's scores."""
    score_flops_per_pair: float
    """Attention's two products, of one query and one key it sees, over those layers."""

    def forward_flops(self, mean_context_tokens: float) -> float:
        """Operations of one token's forward pass."""
        return self.flops_per_token + self.score_flops_per_pair * mean_context_tokens


def target_skeleton(config: TargetConfig, layers: Sequence[str]) -> Skeleton:
    """Size and cost of a target, from a model without weights.

    Of a mixture of experts only the share of experts that a token passes through counts.

    Raises:
        ValueError: transformers does not know the architecture.
    """
    text_config = load_config(config)
    model = _empty_model(config, text_config)
    last = max((int(name) for name in layers if name != LM_HEAD_INPUT), default=0)
    if LM_HEAD_INPUT in layers:
        last = text_config.num_hidden_layers - 1
    passed = find_decoder(model).layers[: last + 1]
    heads = text_config.num_attention_heads
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    return Skeleton(
        num_parameters=sum(weight.numel() for weight in model.parameters()),
        flops_per_token=2 * sum(_active_weights(layer, text_config) for layer in passed),
        score_flops_per_pair=4.0 * heads * head_dim * len(passed),
    )


def _empty_model(config: TargetConfig, text_config: PretrainedConfig) -> PreTrainedModel:
    code = {"trust_remote_code": config.trust_remote_code}
    try:
        with torch.device("meta"):
            try:
                return AutoModelForCausalLM.from_config(text_config, **code)
            except ValueError:
                folder = resolve_target(config, weights=False)
                whole = AutoConfig.from_pretrained(folder, **code)
                return AutoModelForImageTextToText.from_config(whole, **code)
    except (ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ValueError(
            f"target.model: transformers cannot build {config.model!r} from its configuration"
            f" ({type(error).__name__}: {error}); its cost is unknown: use --measure"
        ) from error


def _active_weights(layer: nn.Module, config: PretrainedConfig) -> float:
    """Weights of the matrices that one token is multiplied with."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    num_experts = next((getattr(config, n) for n in names if getattr(config, n, None)), 1)
    chosen = getattr(config, "num_experts_per_tok", None) or num_experts
    share = chosen / num_experts
    return sum(
        weight.numel() * (share if ".experts." in f".{name}" else 1.0)
        for name, weight in layer.named_parameters()
        if weight.dim() > 1
    )


def peak_flops(device_name: str, *, is_half: bool) -> float | None:
    """Dense peak of a GPU by its name, in FLOP/s; None for one that the table does not hold."""
    for part, (half, single) in PEAK_FLOPS.items():
        if part.lower() in device_name.lower():
            return half if is_half else single
    return None


def estimated_rate(
    skeleton: Skeleton,
    *,
    mean_context_tokens: float,
    gpu_name: str | None,
    dtype: str,
    num_places: int,
) -> float | None:
    """Tokens a second of one worker by the table; None for a GPU it does not hold.

    Args:
        skeleton: The target's cost.
        mean_context_tokens: See `TokenCount`.
        gpu_name: As CUDA names it; None is a CPU.
        dtype: Arithmetic type of the target.
        num_places: GPUs of one worker, or threads on a CPU.
    """
    if gpu_name is None:
        flops: float | None = CPU_THREAD_FLOPS * num_places
    else:
        peak = peak_flops(gpu_name, is_half=dtype != "float32")
        flops = None if peak is None else FORWARD_SHARE * peak * num_places
    return None if flops is None else flops / skeleton.forward_flops(mean_context_tokens)


def measured_rate(
    run: ExtractRun,
    sequences: Sequence[TokenSequence],
    layers: Sequence[str],
    *,
    seconds: float,
) -> float:
    """Tokens a second of the target's forward pass here, over real sequences.

    Loads the target, proves its way of running as extraction does (compiled on a GPU), and repeats
    the sequences' batches until the time is over; the first batch warms up and does not count.

    Args:
        run: The run's settings.
        sequences: Some real sequences, at least one.
        layers: The captured layers.
        seconds: How long to measure, loading not counted.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(run.extract.torch_threads)
    target = load_target(run.target, device=device)
    proof = [each.token_ids[:256] for each in sequences[:3]]
    batch_tokens = max(run.extract.batch_tokens, run.data.max_sequence_tokens)
    lengths = [each.num_tokens for each in sequences]

    def forward(batch: Sequence[int]) -> int:
        target.hidden_states([sequences[i].token_ids for i in batch], layers=list(layers))
        if device == "cuda":
            torch.cuda.synchronize()
        return sum(lengths[i] for i in batch)

    # Once compiled, the proof forbids this process to compile: only as long as it is measured.
    with torch.compiler.set_stance("default"):
        choose_way(
            target, proof, layers=list(layers), settings=run.extract, batch_tokens=batch_tokens
        )
        batches = batches_for(target.batching, lengths, batch_tokens=batch_tokens)
        forward(batches[-1])
        num_tokens, start_s = 0, time.monotonic()
        while True:
            for batch in batches:
                num_tokens += forward(batch)
                elapsed_s = time.monotonic() - start_s
                if elapsed_s > seconds:
                    return num_tokens / elapsed_s
