"""What acceptance lengths say: how many drafted tokens stand, their mean, its interval.

An acceptance length is the number of tokens that one target pass gains: the drafted tokens that
stand plus the target's own token after them, clipped where the answer ends.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor


def accept_greedy(
    drafted: Int[Tensor, "batch drafted"],
    chosen: Int[Tensor, "batch queries"],
    num_drafted: Int[Tensor, "batch"],
) -> Int[Tensor, "batch"]:
    """Counts the drafted tokens that equal the target's own choices, up to the first that differs.

    `chosen[:, k]` is the target's choice after offset k of the block: it judges the token drafted
    for offset k + 1. Only the first `num_drafted` tokens of a row count.
    """
    offsets = torch.arange(drafted.shape[1], device=drafted.device)
    matches = (drafted == chosen[:, : drafted.shape[1]]) & (offsets < num_drafted[:, None])
    return matches.long().cumprod(dim=1).sum(dim=1)


def mean_acceptance_length(lengths: Sequence[Sequence[int]]) -> float:
    """Gives the mean over requests of each request's mean, as the official package averages.

    Args:
        lengths: acceptance lengths of each request; requests without a block do not count.
    """
    means = request_means(lengths)
    return float(np.mean(means)) if means else float("nan")


def bootstrap_interval(
    lengths: Sequence[Sequence[int]], *, seed: int, num_resamples: int = 10_000
) -> tuple[float, float]:
    """Gives the 95% interval of the mean acceptance length, by resampling whole requests."""
    means = np.array(request_means(lengths))
    if len(means) == 0:
        return float("nan"), float("nan")
    generator = np.random.default_rng(seed)
    picks = generator.integers(0, len(means), size=(num_resamples, len(means)))
    low, high = np.quantile(means[picks].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def accepted_by_offset(lengths: Sequence[Sequence[int]], *, block_size: int) -> list[float]:
    """Gives, for offsets 1 to `block_size - 1`, the share of blocks that gained a token more.

    The entry of offset k is the share of blocks whose acceptance length is above k; their sum
    plus one is the mean over blocks.
    """
    flat = np.array([length for request in lengths for length in request])
    if len(flat) == 0:
        return [float("nan")] * (block_size - 1)
    return [float((flat > offset).mean()) for offset in range(1, block_size)]


def request_means(lengths: Sequence[Sequence[int]]) -> list[float]:
    """Gives the mean acceptance length of each request that has a block."""
    return [float(np.mean(request)) for request in lengths if len(request) > 0]
