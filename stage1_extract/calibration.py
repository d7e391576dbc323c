"""Calibration: channel scales of the captured layers, from a sample of the conversations.

Runs once, before workers start; the scales are kept in the layer records and never change. On a
GPU machine a process of its own does it, so that the launcher holds no GPU memory afterwards.
"""

import multiprocessing
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import torch
from jaxtyping import Int32
from numpy import ndarray

from stage1_extract.config import ExtractRun
from stage1_extract.target import SPREAD, Target, load_target
from storage.encodings import calibrate_channels

ChannelScalesByLayer = dict[str, tuple[float, ...]]


def calibrate(
    run: ExtractRun, token_ids: Iterable[Int32[ndarray, "_"]], *, layers: Sequence[str]
) -> ChannelScalesByLayer:
    """Channel scales by layer, from `store.calibration_tokens` tokens at most.

    Sequences with NaN or infinity in a state are left out.

    Args:
        run: The run's settings.
        token_ids: Sequences in the order in which they are taken; read no further than needed.
        layers: Names of the layers to capture.

    Raises:
        ValueError: There is no sequence, the target cannot be loaded or has no room, or all of them
            give NaN.
    """
    sample = list(_first_tokens(token_ids, run.store.calibration_tokens))
    if not sample:
        raise ValueError(
            f"store.encoding = {run.store.encoding} is calibrated on the conversations, and none of"
            " them can be used; give data.conversations, or choose bf16 or fp8"
        )
    print(
        f"channel scales of {len(layers)} layers are taken from"
        f" {sum(map(len, sample)):,} tokens of {len(sample):,} conversations, once",
        file=sys.stderr,
        flush=True,
    )
    device = device_of(run)
    if device == "cpu":
        return _scales_of(run, sample, tuple(layers), device=device)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        work = process.submit(_scales_of, run, sample, tuple(layers), device=device)
        try:
            return work.result()
        except torch.cuda.OutOfMemoryError as error:
            raise ValueError(
                f"store.encoding = {run.store.encoding} is calibrated first, and {device} has no"
                " room for the target; free it, name others in extract.gpus, raise"
                " extract.gpus_per_worker, or choose bf16 or fp8"
            ) from error


def _first_tokens(
    token_ids: Iterable[Int32[ndarray, "_"]], num_tokens: int
) -> Iterator[Int32[ndarray, "_"]]:
    """Whole sequences, the last one cut, until there are so many tokens."""
    left = num_tokens
    for each in token_ids:
        yield each[:left]
        left -= min(left, len(each))
        if left == 0:
            return


def _scales_of(
    run: ExtractRun, sample: Sequence[Int32[ndarray, "_"]], layers: Sequence[str], *, device: str
) -> ChannelScalesByLayer:
    torch.set_num_threads(run.extract.torch_threads)
    target: Target = load_target(run.target, device=device)
    parts: dict[str, list[ndarray]] = {name: [] for name in layers}
    for token_ids in sample:
        found = target.hidden_states([token_ids], layers=layers)
        states = {name: found[name].float().cpu().numpy() for name in layers}
        # What is not finite is named and skipped where it would be stored.
        if all(np.isfinite(each).all() for each in states.values()):
            for name in layers:
                parts[name].append(states[name])
    if not parts[layers[0]]:
        raise ValueError(
            f"target.model: {run.target.model} gives NaN or infinity for all {len(sample)}"
            f" conversations it is calibrated on; check its weights, and target.dtype ="
            f" {run.target.dtype} (float16 overflows where bfloat16 does not)"
        )
    return {
        name: tuple(calibrate_channels(np.concatenate(parts[name])).tolist()) for name in layers
    }


def device_of(run: ExtractRun) -> str:
    """The first of the run's GPUs; all there are for a target that one of them cannot hold."""
    if not torch.cuda.is_available():
        return "cpu"
    if run.extract.gpus_per_worker > 1:
        return SPREAD
    first = run.extract.gpus[0] if run.extract.gpus else 0
    # A worker that was given a GPU sees no other.
    return f"cuda:{first if first < torch.cuda.device_count() else 0}"
