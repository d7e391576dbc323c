"""Copies to a device that wait for nothing."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: str | torch.device) -> Tensor:
    """The tensor on the device, copied without waiting for what the device still has to do."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
