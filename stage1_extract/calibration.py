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

    Args:
        run: The run's settings.
        token_ids: Sequences in the order in which they are taken; read no further than needed.
        layers: Names of the layers to capture.

    Raises:
        ValueError: There is no sequence, or the target cannot be loaded, or a state is not finite.
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
        states = target.hidden_states([token_ids], layers=layers)
        for name in layers:
            parts[name].append(states[name].float().cpu().numpy())
    return {name: _layer_scales(name, np.concatenate(parts[name])) for name in layers}


def _device(run: ExtractRun) -> str:
    """A GPU where there is any that holds the target alone."""
    fits = torch.cuda.is_available() and run.extract.gpus_per_worker == 1
    return "cuda" if fits else "cpu"


def _layer_scales(name: str, samples: ndarray) -> tuple[float, ...]:
    if not np.isfinite(samples).all():
        raise ValueError(
            f"layer {name} has NaN or infinity in the conversations it is calibrated on; try"
            ' target.dtype = "bfloat16" or "float32"'
        )
    return tuple(calibrate_channels(samples).tolist())
