"""Parity: proof, at the start of each extraction, that stored states are the target's own."""

import sys
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int32
from numpy import ndarray
from torch import Tensor

from stage1_extract.batches import packed_batches, row_sizes
from stage1_extract.config import Batching, ExtractConfig
from stage1_extract.target_transformers import TransformersTarget

_TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 8e-2}
"""Largest relative difference, averaged over a sequence's tokens, that rounding in another order
explains. SmolLM2-135M shows 0.02 in bf16 (0.09 at its worst token); one forgotten boundary 0.14."""

_LONGEST_RECORDED_S = 0.1
"""A pass that takes longer keeps the GPU busy however it is launched."""
_WORTH_RECORDING = 0.95
"""Share of the time, at most, that a recorded pass may take to be worth its memory."""


class ParityError(ValueError):
    """States in a batch are not those of a plain forward pass."""


def choose_way(
    target: TransformersTarget,
    sequences: Sequence[Int32[ndarray, "_"]],
    *,
    layers: Sequence[str],
    settings: ExtractConfig,
    batch_tokens: int,
) -> None:
    """Sets the fastest way of running the target that proves exact and that a run's settings allow.

    Args:
        target: The loaded target; its `batching` and `compiled` are set.
        sequences: Token ids of a few real sequences, best of unequal length.
        layers: Layer names to compare.
        settings: Whether to compile (None: on a GPU), and the batching wanted.
        batch_tokens: Tokens of the largest forward pass.

    Raises:
        ValueError: No way is exact, or the settings contradict each other.
    """
    rows = row_sizes(batch_tokens) if is_compiling_wanted(settings, device=target.device) else ()
    choose_batching(
        target,
        sequences,
        layers=layers,
        wanted=settings.batching,
        compiled_rows=rows,
        must_compile=settings.compile is True,
    )


def is_compiling_wanted(settings: ExtractConfig, *, device: str) -> bool:
    """Whether decoder layers are to run compiled; those of a target on several GPUs are not."""
    if settings.gpus_per_worker > 1:
        if settings.compile:
            raise ValueError(
                "extract.compile = true: a target on several GPUs (extract.gpus_per_worker) runs"
                " eagerly; remove one of the two settings"
            )
        return False
    return device.startswith("cuda") if settings.compile is None else settings.compile


def choose_batching(
    target: TransformersTarget,
    sequences: Sequence[Int32[ndarray, "_"]],
    *,
    layers: Sequence[str],
    wanted: Batching | None = None,
    compiled_rows: Sequence[int] = (),
    must_compile: bool = False,
) -> Batching:
    """Sets the first way of sharing a forward pass that proves exact for this target.

    Args:
        target: The loaded target; its `batching` and `compiled` are set.
        sequences: Token ids of a few real sequences, best of unequal length.
        layers: Layer names to compare.
        wanted: Tries this one only.
        compiled_rows: Lengths of rows for compiled layers, which are tried first if there are any.
        must_compile: Whether to stop where compiled layers do not suit the target.

    Raises:
        ParityError: None is exact; nothing may be stored then.
    """
    if compiled_rows and wanted in (None, "packed"):
        target.batching = "packed"
        target.compile_layers(row_sizes=compiled_rows)
        try:
            check_parity(target, sequences, layers=layers)
            target.warm_up(layers)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # The compiler and each model fail in their own ways.
            target.compiled = None
            if must_compile:
                raise
            _say(f"compiled layers do not suit this target, it runs eagerly ({_first_line(error)})")
        else:
            record_if_faster(target, sequences, layers=layers)
            return target.batching
    ways: Sequence[Batching] = [wanted] if wanted else ["packed", "padded", "single"]
    for way in ways:
        target.batching = way
        try:
            check_parity(target, sequences, layers=layers)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # A model that knows no packing fails in its own way.
            if way == ways[-1]:
                raise
            _say(f"{way} batches do not suit this target ({_first_line(error)})")
        else:
            break
    return target.batching


def record_if_faster(
    target: TransformersTarget,
    sequences: Sequence[Int32[ndarray, "_"]],
    *,
    layers: Sequence[str],
) -> None:
    """Lets compiled passes be recorded and replayed where that proves exact and saves time.

    That is so for small targets, whose kernels end sooner than they can be launched one by one.
    """
    if not target.device.startswith("cuda"):
        return
    launched_s = target.seconds_a_pass(layers)
    if launched_s > _LONGEST_RECORDED_S:
        return
    try:
        target.record_passes(layers)
        if target.seconds_a_pass(layers) < _WORTH_RECORDING * launched_s:
            check_parity(target, sequences, layers=layers)
            return
    except Exception as error:  # Each model and each library fails in its own way.
        _say(f"forward passes are launched one kernel at a time ({_first_line(error)})")
    target.forget_recorded()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


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
    for batch in _proof_batches(target, sequences):
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


def _proof_batches(
    target: TransformersTarget, sequences: Sequence[Int32[ndarray, "_"]]
) -> list[list[Int32[ndarray, "_"]]]:
    """All sequences together where that can be, for what is to be proved shows only there."""
    if target.batching == "single":
        return [[each] for each in sequences]
    if target.longest_row is None:
        return [list(sequences)]
    lengths = [len(each) for each in sequences]
    packs = packed_batches(lengths, batch_tokens=target.longest_row)
    return [[sequences[index] for index in pack] for pack in packs]


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
