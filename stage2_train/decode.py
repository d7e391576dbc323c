"""Turns stored hidden states back into numbers, in the layout the drafter's `fc` reads."""

import torch
from jaxtyping import Float, Float32, Shaped
from torch import Tensor


def decode_layer(
    encoding: str,
    data: Shaped[Tensor, "tokens width"],
    scales: Float32[Tensor, "tokens"] | None,
    *,
    out: Float[Tensor, "tokens hidden"],
) -> None:
    """Decodes one layer into `out`, a slice of the batch's features; tokens of zeros give zeros.

    Args:
        encoding: name of the encoding, as the layer's record says.
        data: stored bytes; unsigned integers as the store keeps them.
        scales: scale of each token, for encodings that have one.
        out: place of the decoded states, of the drafter's type.

    Raises:
        ValueError: stage 2 cannot decode this encoding.
    """
    if encoding == "bf16":
        out.copy_(data.view(torch.bfloat16))
    elif encoding == "fp8" and scales is not None:
        values = data.view(torch.float8_e4m3fn).to(torch.float32)
        out.copy_(values * scales[:, None])
    else:
        raise ValueError(f"stage 2 cannot decode the encoding {encoding!r}; expected bf16 or fp8")
