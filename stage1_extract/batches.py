"""Batches: which sequences of one unit share a forward pass."""

from bisect import bisect_left, insort
from collections.abc import Sequence

from stage1_extract.config import Batching

MAX_SEQUENCES = 512
"""Sequences of one packed row at most: the boundaries' shape is fixed, too."""


def length_bucketed_batches(
    lengths: Sequence[int], *, batch_tokens: int, max_padding_fraction: float = 0.05
) -> list[list[int]]:
    """Parts sequences into batches of similar length within a token budget.

    A batch is closed when its rectangle (longest x count) would pass the budget, or when more than
    `max_padding_fraction` of it would be padding. Padding is computed, at that small share, but
    never stored. The result depends on lengths and settings only, not on workers or other units.

    Args:
        lengths: Tokens of each sequence.
        batch_tokens: Token budget; a longer sequence gets a batch of its own.
        max_padding_fraction: Largest share of a batch that may be padding.

    Returns:
        Indices into `lengths`, each exactly once; shorter batches first.
    """
    batches: list[list[int]] = []
    batch: list[int] = []
    num_real = 0
    for index in sorted(range(len(lengths)), key=lambda each: (lengths[each], each)):
        rectangle = lengths[index] * (len(batch) + 1)
        num_padding = rectangle - num_real - lengths[index]
        if batch and (rectangle > batch_tokens or num_padding > max_padding_fraction * rectangle):
            batches.append(batch)
            batch, num_real = [], 0
        batch.append(index)
        num_real += lengths[index]
    return [*batches, batch] if batch else batches


def packed_batches(
    lengths: Sequence[int], *, batch_tokens: int, max_sequences: int = MAX_SEQUENCES
) -> list[list[int]]:
    """Parts sequences into packs of at most the token budget, as full as can be.

    Best fit, longest first: each sequence joins the fullest pack that still has room for it. The
    result depends on lengths and settings only.

    Args:
        lengths: Tokens of each sequence.
        batch_tokens: Token budget; a longer sequence gets a batch of its own.
        max_sequences: Sequences of a pack at most.

    Returns:
        Indices into `lengths`, each exactly once; fuller packs tend to come first.
    """
    batches: list[list[int]] = []
    # Room of each open pack and its number, sorted: the fullest that fits is found by bisection.
    open_packs: list[tuple[int, int]] = []
    for index in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        place = bisect_left(open_packs, (lengths[index], 0))
        if place < len(open_packs):
            room, pack = open_packs.pop(place)
        else:
            room, pack = batch_tokens, len(batches)
            batches.append([])
        batches[pack].append(index)
        if room > lengths[index] and len(batches[pack]) < max_sequences:
            insort(open_packs, (room - lengths[index], pack))
    return batches


def row_sizes(batch_tokens: int, *, smallest: int = 1024, count: int = 4) -> list[int]:
    """Row lengths for forward passes of fixed shapes: the budget, half of it and so on.

    A unit's last pack is rarely full; the shorter rows keep what is computed for nothing small.

    Args:
        batch_tokens: The longest row.
        smallest: Rows below this many tokens would not keep a GPU busy.
        count: Rows at most; each is compiled once.

    Returns:
        Increasing lengths; the last is the budget.
    """
    sizes = [batch_tokens]
    while len(sizes) < count and sizes[-1] % 2 == 0 and sizes[-1] // 2 >= smallest:
        sizes.append(sizes[-1] // 2)
    return sizes[::-1]


def batches_for(
    batching: Batching, lengths: Sequence[int], *, batch_tokens: int
) -> list[list[int]]:
    """Batches for a way of sharing a forward pass; see `Batching`."""
    if batching == "packed":
        return packed_batches(lengths, batch_tokens=batch_tokens)
    if batching == "padded":
        return length_bucketed_batches(lengths, batch_tokens=batch_tokens)
    return [[index] for index in range(len(lengths))]
