"""Read batches ahead of their use, in order, with bounded memory."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from storage.encodings import encoded_bytes_per_token
from storage.errors import DamagedShardError
from storage.reader import SequenceStates, Snapshot

Item = int | np.integer | tuple[int, slice]
"""A sequence index, or one with the token range to read."""
Reading = list[Future[SequenceStates]]
"""A sequence being read, whole or layer by layer."""
SPLIT_BYTES = 8_000_000
"""Sequences of more bytes than this are read layer by layer."""
MAX_READINGS = 1024
"""Sequences read or being read at most, one batch apart: small ones would take long to hand out."""


def read_ahead(
    snapshot: Snapshot,
    batches: Iterable[Iterable[Item]],
    *,
    layers: Sequence[str],
    read_ahead_bytes: int = 1_000_000_000,
    num_threads: int = 4,
    on_damage: Callable[[DamagedShardError], None] | None = None,
) -> Iterator[list[SequenceStates]]:
    """Yields the sequences of each batch, in order, while later ones are being read.

    Memory: batches read or being read, and not yet yielded, hold `read_ahead_bytes` and
    `MAX_READINGS` sequences at most, but one batch always. An error of reading is raised when its
    batch's turn comes. Closing the iterator (or letting it go) waits for the reads under way and
    leaves no thread behind.

    Args:
        snapshot: where the sequences lie.
        batches: sequence indices, or (index, token slice) pairs; may be endless, pulled lazily.
        layers: names of the layers to read.
        read_ahead_bytes: memory that waiting batches may fill, in bytes.
        num_threads: reading threads; they release the GIL while they read and verify.
        on_damage: called for each damaged sequence, which its batch then lacks; None raises.
    """
    token_bytes = _token_bytes(snapshot, layers)
    waiting: deque[tuple[int, list[Reading]]] = deque()
    waiting_bytes = waiting_readings = 0
    source = (list(batch) for batch in batches)
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="read-ahead")

    def submit(item: Item) -> Reading:
        index, tokens = _index_and_tokens(item)
        # A long sequence's layers are read beside each other: else its batch, the first one above
        # all, would wait for one thread while the others read what is needed later.
        is_long = token_bytes * _num_tokens(snapshot, item) > SPLIT_BYTES
        groups = [[name] for name in layers] if is_long and layers else [layers]
        return [pool.submit(snapshot.read, index, layers=group, tokens=tokens) for group in groups]

    try:
        batch = next(source, None)
        while waiting or batch is not None:
            while batch is not None:
                batch_bytes = token_bytes * sum(_num_tokens(snapshot, item) for item in batch)
                is_full = (
                    waiting_bytes + batch_bytes > read_ahead_bytes
                    or waiting_readings + len(batch) > MAX_READINGS
                )
                if waiting and is_full:
                    break
                waiting.append((batch_bytes, [submit(item) for item in batch]))
                waiting_bytes += batch_bytes
                waiting_readings += len(batch)
                batch = next(source, None)
            batch_bytes, readings = waiting.popleft()
            sequences = list(_results(readings, on_damage))
            waiting_bytes -= batch_bytes
            waiting_readings -= len(readings)
            yield sequences
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _results(
    readings: Iterable[Reading], on_damage: Callable[[DamagedShardError], None] | None
) -> Iterator[SequenceStates]:
    for reading in readings:
        try:
            first, *others = [future.result() for future in reading]
        except DamagedShardError as error:
            if on_damage is None:
                raise
            on_damage(error)
        else:
            states = {name: part for some in (first, *others) for name, part in some.states.items()}
            yield replace(first, states=states)


def _token_bytes(snapshot: Snapshot, layers: Sequence[str]) -> int:
    records = snapshot.store.layers
    return 5 + sum(
        encoded_bytes_per_token(records[name].encoding, records[name].hidden_size)
        for name in layers
    )


def _index_and_tokens(item: Item) -> tuple[int, slice]:
    return item if isinstance(item, tuple) else (int(item), slice(None))


def _num_tokens(snapshot: Snapshot, item: Item) -> int:
    index, tokens = _index_and_tokens(item)
    return len(range(*tokens.indices(int(snapshot.num_tokens[index]))))
