"""Calibration: channel scales of the captured layers, from a sample of the conversations.

Runs once, before workers start; the scales are kept in the layer records and never change. On a
GPU machine a process of its own does it, so that the launcher holds no GPU memory afterwards.
"""

import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import torch
from jaxtyping import Int32
from numpy import ndarray

from stage1_extract.config import ExtractRun
from stage1_extract.target import Target, load_target
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
        ValueError: There is no sequence, the target cannot be loaded, or all of them give NaN.
    """
    sample = list(_first_tokens(token_ids, run.store.calibration_tokens))
    if not sample:
        raise ValueError(
            f"store.encoding = {run.store.encoding} is calibrated on the conversations, and none of"
            " them can be used; give data.conversations, or choose bf16 or fp8"
        )
    if _device(run) == "cpu":
        return _scales_of(run, sample, tuple(layers))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(_scales_of, run, sample, tuple(layers)).result()


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
    run: ExtractRun, sample: Sequence[Int32[ndarray, "_"]], layers: Sequence[str]
) -> ChannelScalesByLayer:
    torch.set_num_threads(run.extract.torch_threads)
    target: Target = load_target(run.target, device=_device(run))
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


def _device(run: ExtractRun) -> str:
    """A GPU where there is any that holds the target alone."""
    fits = torch.cuda.is_available() and run.extract.gpus_per_worker == 1
    return "cuda" if fits else "cpu"
