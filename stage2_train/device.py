"""Which device a drafter is trained on, and in which type it computes."""

from typing import Literal

import torch


def choose_device() -> torch.device:
    """Gives this process's GPU, or the CPU; the launcher shows a process one GPU only."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def choose_dtype(
    wanted: Literal["float32", "bfloat16"] | None, device: torch.device
) -> torch.dtype:
    """Gives the arithmetic type: the wanted one, or bf16 where its matrix products are fast."""
    if wanted is not None:
        return torch.bfloat16 if wanted == "bfloat16" else torch.float32
    if device.type == "cuda" or has_fast_bf16_cpu():
        return torch.bfloat16
    return torch.float32


def has_fast_bf16_cpu() -> bool:
    """Says whether this CPU multiplies bf16 matrices faster than fp32 ones."""
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(bool(getattr(torch.cpu, name, lambda: False)()) for name in probes)
