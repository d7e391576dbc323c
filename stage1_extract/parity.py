"""Parity: proof, at the start of each extraction, that stored states are the target's own."""

import sys
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int32
from numpy import ndarray
from torch import Tensor

from stage1_extract.config import Batching
from stage1_extract.target_transformers import TransformersTarget

_TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 8e-2}
"""Largest relative difference, averaged over a sequence's tokens, that rounding in another order
explains. SmolLM2-135M shows 0.02 in bf16 (0.09 at its worst token); one forgotten boundary 0.14."""


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
        The largest relative difference of a sequence in a layer, averaged over its tokens.

    Raises:
        ParityError: A layer differs by more than rounding.
    """
    worst = 0.0
    batches = [[each] for each in sequences] if target.batching == "single" else [sequences]
    for batch in batches:
        together = target.hidden_states(batch, layers=layers)
        alone = [target.plain_hidden_states(each, layers=layers) for each in batch]
        for name in layers:
            parts = together[name].split([len(each) for each in batch])
            for states, expected in zip(parts, alone, strict=True):
                if not torch.isfinite(expected[name]).all():
                    continue  # Named and skipped where it is stored; nothing to compare with.
                difference = float(relative_differences(states, expected[name]).mean())
                _check_tolerance(target.batching, name, difference, states.dtype)
                worst = max(worst, difference)
    return worst


def relative_differences(
    states: Float[Tensor, "tokens hidden"], expected: Float[Tensor, "tokens hidden"]
) -> Float[Tensor, "tokens"]:
    """Norm of each token's difference over the norm of what is expected."""
    difference: Tensor = (states.float() - expected.float()).norm(dim=-1)
    size: Tensor = expected.float().norm(dim=-1).clamp(min=1e-12)
    return difference / size


def _check_tolerance(batching: Batching, layer: str, difference: float, dtype: torch.dtype) -> None:
    if not difference <= _TOLERANCES[dtype]:
        raise ParityError(
            f"states of layer {layer} in {batching} batches differ from a plain forward pass by"
            f" {difference:.1e} of their size (at most {_TOLERANCES[dtype]:.0e} is rounding);"
            " try another target.attention or target.dtype"
        )
