"""Batches: which sequences of one unit share a forward pass."""

from collections.abc import Sequence

from stage1_extract.config import Batching


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


def packed_batches(lengths: Sequence[int], *, batch_tokens: int) -> list[list[int]]:
    """Parts sequences, in their order, into packs of at most the token budget.

    Args:
        lengths: Tokens of each sequence.
        batch_tokens: Token budget; a longer sequence gets a batch of its own.

    Returns:
        Indices into `lengths`, each exactly once and in order.
    """
    batches: list[list[int]] = []
    num_tokens = batch_tokens
    for index, length in enumerate(lengths):
        if num_tokens + length > batch_tokens:
            batches.append([])
            num_tokens = 0
        batches[-1].append(index)
        num_tokens += length
    return batches


def batches_for(
    batching: Batching, lengths: Sequence[int], *, batch_tokens: int
) -> list[list[int]]:
    """Batches for a way of sharing a forward pass; see `Batching`."""
    if batching == "packed":
        return packed_batches(lengths, batch_tokens=batch_tokens)
    if batching == "padded":
        return length_bucketed_batches(lengths, batch_tokens=batch_tokens)
    return [[index] for index in range(len(lengths))]
