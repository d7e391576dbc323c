"""Packs the sequences of a whole epoch with arrays: the batches of `batches.pack`, for any number.

Packing goes from window to window, so one epoch cannot be cut into array operations. It is cut into
segments instead, each packed by itself, and all segments take their next window at the same time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from jaxtyping import Bool, Int, Int64, Integer

from stage2_train.batches import NUM_OPEN_BATCHES, Window, pack

# Sequences of a segment. At its end up to 64 batches are closed as they are, which costs 0.04% of
# the fill.
SEGMENT_SEQUENCES = 16_384
# Segments packed at the same time; their open batches fit a processor's cache.
_SEGMENTS_AT_ONCE = 512
# Fewer segments than this are packed one by one, which is faster.
_MIN_SEGMENTS = 4
# An open batch as one integer: room, number, slot; sorted as the plain packing sorts them.
_SLOT_BITS, _NUMBER_BITS = 7, 24
_ROOM_SHIFT = _SLOT_BITS + _NUMBER_BITS
_NONE = np.iinfo(np.int64).max


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedEpoch(Sequence[list[Window]]):
    """The batches of an epoch; each is made a list of windows when it is asked for."""

    order: Int64[np.ndarray, "sequences"]
    """Sequence indices, batch after batch."""
    starts: Int64[np.ndarray, "bounds"]
    """Where each batch begins in `order`, and the end of the last one."""
    draw: Callable[[int], Window]
    """Gives the part of a sequence that is trained."""

    def __len__(self) -> int:
        """Number of batches."""
        return len(self.starts) - 1

    @overload
    def __getitem__(self, place: int) -> list[Window]: ...
    @overload
    def __getitem__(self, place: slice) -> "PackedEpoch": ...
    def __getitem__(self, place: int | slice) -> "list[Window] | PackedEpoch":
        """One batch, or some that follow each other; of those nothing is copied."""
        if isinstance(place, slice):
            start, stop, step = place.indices(len(self))
            if step != 1:
                raise ValueError(f"batches are taken with step 1, got {step}")
            starts = self.starts[start : max(start, stop) + 1]
            return PackedEpoch(order=self.order, starts=starts, draw=self.draw)
        number = range(len(self))[place]
        members = self.order[self.starts[number] : self.starts[number + 1]]
        return [self.draw(index) for index in members.tolist()]

    def __iter__(self) -> Iterator[list[Window]]:
        """All batches in order."""
        return (self[number] for number in range(len(self)))


def pack_epoch(
    order: Int64[np.ndarray, "sequences"],
    num_tokens: Int[np.ndarray, "sequences"],
    *,
    batch_tokens: int,
    draw: Callable[[int], Window],
    segment_sequences: int = SEGMENT_SEQUENCES,
    num_open: int = NUM_OPEN_BATCHES,
) -> PackedEpoch:
    """Packs an epoch: `batches.pack` of each segment, one after the other.

    Takes 0.2 us a sequence where there are millions, and 12 bytes beside what it is given.

    Args:
        order: sequence indices in the epoch's order; becomes the packed order, in place.
        num_tokens: tokens of each of them; longer ones are trained in a window of the budget.
        batch_tokens: token budget of a batch.
        draw: gives the part of a sequence that is trained.
        segment_sequences: sequences of a segment; the packing depends on it.
        num_open: batches that are filled at the same time.
    """
    lengths = np.minimum(num_tokens, batch_tokens).astype(np.int32)
    num_whole = len(order) // segment_sequences
    if num_whole < _MIN_SEGMENTS:
        num_whole = 0
    whole = lengths[: num_whole * segment_sequences].reshape(num_whole, segment_sequences)
    sizes = []
    for first in range(0, num_whole, _SEGMENTS_AT_ONCE):
        together = whole[first : first + _SEGMENTS_AT_ONCE]
        places = _places_together(together, batch_tokens=batch_tokens, num_open=num_open)
        for number, of_segment in enumerate(places, start=first):
            start = number * segment_sequences
            sizes.append(_arrange(order[start : start + segment_sequences], of_segment))
    for start in range(num_whole * segment_sequences, len(order), segment_sequences):
        piece = slice(start, min(start + segment_sequences, len(order)))
        places = _places_plainly(lengths[piece], batch_tokens=batch_tokens, num_open=num_open)
        sizes.append(_arrange(order[piece], places))
    return PackedEpoch(order=order, starts=_sums(sizes), draw=draw)


def _arrange(
    order: Int64[np.ndarray, "sequences"], places: Integer[np.ndarray, "sequences"]
) -> Int64[np.ndarray, "batches"]:
    """Brings sequences into the order of their batches, in place; gives each batch's size."""
    order[:] = order[np.argsort(places, kind="stable")]
    return np.bincount(places)


def _sums(sizes: list[Int64[np.ndarray, "_"]]) -> Int64[np.ndarray, "bounds"]:
    starts = np.zeros(sum(map(len, sizes)) + 1, np.int64)
    np.cumsum(np.concatenate(sizes or [starts[:0]]), out=starts[1:])
    return starts


def _places_plainly(
    lengths: Int[np.ndarray, "sequences"], *, batch_tokens: int, num_open: int
) -> Integer[np.ndarray, "sequences"]:
    """Gives the batch that the plain packing puts each sequence into: the reference."""
    windows = (
        Window(sequence_index=place, start=0, stop=length)
        for place, length in enumerate(lengths.tolist())
    )
    places = np.zeros(len(lengths), np.uint16 if len(lengths) <= 2**16 else np.int64)
    for number, batch in enumerate(pack(windows, batch_tokens=batch_tokens, num_open=num_open)):
        places[[window.sequence_index for window in batch]] = number
    return places


def _places_together(
    lengths: Int[np.ndarray, "segments sequences"], *, batch_tokens: int, num_open: int
) -> Integer[np.ndarray, "segments sequences"]:
    """Gives the same for segments of one length, all of which take each step at the same time."""
    num_segments, num_sequences = lengths.shape
    packer = _Packer(num_segments, num_sequences, batch_tokens=batch_tokens, num_open=num_open)
    numbers = np.empty((num_segments, num_sequences), packer.place_of_number.dtype)
    # Columns are taken together, for a row of its own each would be a cache miss.
    for first in range(0, num_sequences, 256):
        columns = np.ascontiguousarray(lengths[:, first : first + 256].T).astype(np.int64)
        found = np.stack([packer.add(column) for column in columns])
        numbers[:, first : first + 256] = found.T
    packer.close_all()
    # In place, segment by segment: from the order in which batches were opened to that in which
    # they were closed.
    for places, place_of_number in zip(numbers, packer.place_of_number, strict=True):
        places[:] = place_of_number[places]
    return numbers


class _Packer:
    """The open batches of several segments, each in a slot of its segment."""

    def __init__(
        self, num_segments: int, num_sequences: int, *, batch_tokens: int, num_open: int
    ) -> None:
        if num_open >= 2**_SLOT_BITS:
            raise ValueError(f"at most {2**_SLOT_BITS - 1} batches can be open, got {num_open}")
        self.batch_tokens = batch_tokens
        # An empty slot is a negative integer that tells its place like any other.
        slots = np.arange(num_open, dtype=np.int64)[:, None] - 2**_SLOT_BITS
        self.batches = np.repeat(slots, num_segments, axis=1)
        self.num_opened = np.zeros(num_segments, np.int64)
        self.num_closed = np.zeros(num_segments, np.int64)
        dtype = np.uint16 if num_sequences <= 2**16 else np.int64
        self.place_of_number = np.zeros((num_segments, num_sequences), dtype)
        self._segments = np.arange(num_segments)
        self._differences = np.empty_like(self.batches)

    def add(self, lengths: Int64[np.ndarray, "segments"]) -> Int64[np.ndarray, "segments"]:
        """Puts one window of each segment into a batch; gives the batch's number."""
        # The fullest batch with enough room, among equal ones the oldest: without their sign,
        # differences to those with too little room are the largest.
        wanted = lengths << _ROOM_SHIFT
        np.subtract(self.batches, wanted, out=self._differences)
        best = self._differences.view(np.uint64).min(axis=0).view(np.int64)
        is_new = best < 0
        best += wanted
        lowest = self.batches.min(axis=0)
        number = np.where(is_new, self.num_opened, _number(best))
        room = np.where(is_new, self.batch_tokens, best >> _ROOM_SHIFT) - lengths
        self.num_opened += is_new
        is_full = room == 0
        # A new batch takes an empty slot, or that of the fullest one, which is closed; if it is
        # the fullest itself it is closed at once.
        slot = np.where(is_new, lowest, best) & (2**_SLOT_BITS - 1)
        batch = (room << _ROOM_SHIFT) | (number << _SLOT_BITS) | slot
        is_crowded = is_new & ~is_full & (lowest >= 0)
        is_itself = is_crowded & (_without_slot(batch) < _without_slot(lowest))
        closed = np.where(is_crowded & ~is_itself, _number(lowest), number)
        self._close(closed, is_full | is_crowded)
        batch[is_full] = slot[is_full] - 2**_SLOT_BITS
        kept = ~(is_itself | (is_new & is_full))
        self.batches[slot[kept], self._segments[kept]] = batch[kept]
        return number

    def close_all(self) -> None:
        """Closes what is still open, oldest first."""
        numbers = np.where(self.batches >= 0, _number(self.batches), _NONE)
        numbers.sort(axis=0)
        for oldest in numbers:
            self._close(oldest, oldest != _NONE)

    def _close(
        self, numbers: Int64[np.ndarray, "segments"], is_closed: Bool[np.ndarray, "segments"]
    ) -> None:
        segments = self._segments[is_closed]
        self.place_of_number[segments, numbers[is_closed]] = self.num_closed[segments]
        self.num_closed += is_closed


def _number(batch: Int64[np.ndarray, "*shape"]) -> Int64[np.ndarray, "*shape"]:
    number: Int64[np.ndarray, "*shape"] = _without_slot(batch) & (2**_NUMBER_BITS - 1)
    return number


def _without_slot(batch: Int64[np.ndarray, "*shape"]) -> Int64[np.ndarray, "*shape"]:
    shifted: Int64[np.ndarray, "*shape"] = batch >> _SLOT_BITS
    return shifted
