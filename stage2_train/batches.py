"""Packs sequences into batches of a fixed token budget, so that every step has one shape.

Sequences of an epoch's order go into a few open batches, each into the fullest one that still has
room; a batch is done when no room is left or when too many are open. A sequence longer than the
budget is trained in a window, drawn anew each epoch.
"""

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from stage2_train.blocks import random_generator

# More open batches fill better and mix neighbours of the order further apart.
NUM_OPEN_BATCHES = 64


@dataclass(frozen=True, kw_only=True)
class Window:
    """Tokens `start` to `stop` of one sequence; the whole of it unless it is too long."""

    sequence_index: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the window."""
        return self.stop - self.start


@dataclass(order=True)
class _OpenBatch:
    room_tokens: int
    number: int
    windows: list[Window] = field(default_factory=list, compare=False)


def draw_window(
    sequence_index: int,
    num_tokens: int,
    *,
    window_tokens: int,
    seed: int,
    epoch: int,
    sequence_id: Callable[[int], str],
) -> Window:
    """Gives the part of a sequence that this epoch trains: all of it where it is no longer."""
    if num_tokens <= window_tokens:
        return Window(sequence_index=sequence_index, start=0, stop=num_tokens)
    generator = random_generator("window", seed, epoch, sequence_id(sequence_index))
    start = int(generator.integers(0, num_tokens - window_tokens + 1))
    return Window(sequence_index=sequence_index, start=start, stop=start + window_tokens)


def pack(
    windows: Iterable[Window], *, batch_tokens: int, num_open: int = NUM_OPEN_BATCHES
) -> Iterator[list[Window]]:
    """Packs windows into batches of at most `batch_tokens`, each window in exactly one batch.

    Pure and online: a batch depends on the windows before its end only. A whole epoch is packed
    like this, segment by segment, by `packing.pack_epoch`. With lengths of a
    log-normal of median 700 capped at the budget of 4,096, batches are more than 98% full.
    """
    # Sorted by room, so that the fullest batch with enough room is found by bisection.
    open_batches: list[_OpenBatch] = []
    num_opened = 0
    for window in windows:
        if window.num_tokens > batch_tokens:
            raise ValueError(f"a window of {window.num_tokens} tokens exceeds {batch_tokens}")
        place = bisect.bisect_left(open_batches, _OpenBatch(window.num_tokens, -1))
        if place < len(open_batches):
            batch = open_batches.pop(place)
        else:
            batch = _OpenBatch(batch_tokens, num_opened)
            num_opened += 1
        batch.windows.append(window)
        batch.room_tokens -= window.num_tokens
        if batch.room_tokens == 0:
            yield batch.windows
            continue
        bisect.insort(open_batches, batch)
        if len(open_batches) > num_open:
            yield open_batches.pop(0).windows
    # Oldest first: the order of the epoch is kept as far as packing allows.
    for batch in sorted(open_batches, key=lambda batch: batch.number):
        yield batch.windows


def fill_fraction(batches: Iterable[list[Window]], *, batch_tokens: int) -> float:
    """Gives the share of the batches' tokens that are real, not padding."""
    filled = [sum(window.num_tokens for window in batch) for batch in batches]
    return sum(filled) / (batch_tokens * len(filled)) if filled else 0.0


@dataclass(frozen=True, kw_only=True)
class Share:
    """One packed batch that one rank computes in one step."""

    windows: Sequence[Window]
    is_filler: bool
    """Whether another rank trains it: the last step of an epoch has too few, and all ranks must
    do the same work to meet. A filler's labels have no weight."""


def share_steps(
    planned: Sequence[Sequence[Window]], *, batches_per_step: int, rank: int = 0, num_ranks: int = 1
) -> Iterator[list[Share]]:
    """Yields what one rank computes in each step; over all ranks each batch is trained once.

    Step s takes the batches from `s * batches_per_step` on, whatever the number of ranks: it is
    the same step, up to the order in which floating-point numbers are summed.
    """
    for start in range(0, len(planned), batches_per_step):
        of_step = list(planned[start : start + batches_per_step])
        shares = [Share(windows=windows, is_filler=False) for windows in of_step[rank::num_ranks]]
        num_missing = -(-len(of_step) // num_ranks) - len(shares)
        yield shares + [Share(windows=of_step[0], is_filler=True)] * num_missing
