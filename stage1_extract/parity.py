"""Parity: proof, at the start of each extraction, that stored states are the target's own."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int32
from numpy import ndarray
from torch import Tensor

from stage1_extract.target_transformers import TransformersTarget

_TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest relative difference of a layer that rounding in another order explains."""


def check_parity(
    target: TransformersTarget, sequences: Sequence[Int32[ndarray, "_"]], *, layers: Sequence[str]
) -> float:
    """Compares states of a batch with a plain forward pass of each sequence alone.

    Args:
        target: The loaded target.
        sequences: Token ids of a few real sequences, best of unequal length.
        layers: Layer names to compare.

    Returns:
        The largest relative difference of a layer of a sequence.

    Raises:
        ValueError: A layer differs by more than rounding; nothing may be stored then.
    """
    worst = 0.0
    together = target.hidden_states(sequences, layers=layers)
    for index, token_ids in enumerate(sequences):
        alone = target.plain_hidden_states(token_ids, layers=layers)
        for name in layers:
            if not torch.isfinite(alone[name]).all():
                continue  # Named and skipped where it is stored; nothing to compare with.
            difference = relative_difference(together[index][name], alone[name])
            tolerance = _TOLERANCES[alone[name].dtype]
            if not difference <= tolerance:
                raise ValueError(
                    f"target.model: states of layer {name} in a batch differ from a plain forward"
                    f" pass by {difference:.1e} of their size (at most {tolerance:.0e} is"
                    " rounding), so nothing was stored; try another target.attention"
                )
            worst = max(worst, difference)
    return worst


def relative_difference(
    states: Float[Tensor, "tokens hidden"], expected: Float[Tensor, "tokens hidden"]
) -> float:
    """Norm of the difference over the norm of what is expected, of the worst token."""
    difference = (states.float() - expected.float()).norm(dim=-1)
    size = expected.float().norm(dim=-1).clamp(min=1e-12)
    return float((difference / size).max())
