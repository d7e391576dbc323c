"""Parity: proof, at the start of each extraction, that stored states are the target's own."""

import sys
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int32
from numpy import ndarray
from torch import Tensor

from stage1_extract.config import Batching
from stage1_extract.target_transformers import TransformersTarget

_TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest relative difference of a layer that rounding in another order explains."""


class ParityError(ValueError):
    """States in a batch are not those of a plain forward pass."""


def choose_batching(
    target: TransformersTarget,
    sequences: Sequence[Int32[ndarray, "_"]],
    *,
    layers: Sequence[str],
    wanted: Batching | None = None,
) -> Batching:
    """Sets the first way of sharing a forward pass that proves exact for this target.

    Args:
        target: The loaded target; its `batching` is set.
        sequences: Token ids of a few real sequences, best of unequal length.
        layers: Layer names to compare.
        wanted: Tries this one only.

    Raises:
        ParityError: None is exact; nothing may be stored then.
    """
    ways: Sequence[Batching] = [wanted] if wanted else ["packed", "padded", "single"]
    for way in ways:
        target.batching = way
        try:
            check_parity(target, sequences, layers=layers)
        except Exception as error:  # A model that knows no packing fails in its own way.
            if way == ways[-1]:
                raise
            print(
                f"{way} batches do not suit this target ({' '.join(str(error).split())})",
                file=sys.stderr,
                flush=True,
            )
        else:
            break
    return target.batching


def check_parity(
    target: TransformersTarget, sequences: Sequence[Int32[ndarray, "_"]], *, layers: Sequence[str]
) -> float:
    """Compares states of a batch with a plain forward pass of each sequence alone.

    Args:
        target: The loaded target, batching as its `batching` says.
        sequences: Token ids of a few real sequences, best of unequal length.
        layers: Layer names to compare.

    Returns:
        The largest relative difference of a token's states in a layer.

    Raises:
        ParityError: A layer differs by more than rounding.
    """
    worst = 0.0
    batches = [[each] for each in sequences] if target.batching == "single" else [sequences]
    for batch in batches:
        together = target.hidden_states(batch, layers=layers)
        alone = [target.plain_hidden_states(each, layers=layers) for each in batch]
        for name in layers:
            expected = torch.cat([each[name] for each in alone])
            if not torch.isfinite(expected).all():
                continue  # Named and skipped where it is stored; nothing to compare with.
            difference = relative_difference(together[name], expected)
            tolerance = _TOLERANCES[expected.dtype]
            if not difference <= tolerance:
                raise ParityError(
                    f"states of layer {name} in {target.batching} batches differ from a plain"
                    f" forward pass by {difference:.1e} of their size (at most {tolerance:.0e} is"
                    " rounding); try another target.attention or target.dtype"
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
