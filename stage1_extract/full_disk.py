"""Full disk: an extraction that runs out of space says how much the rest of the store needs."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from stage1_extract.config import ExtractRun
from stage1_extract.plan import TOKEN_BYTES
from stage1_extract.plan_room import in_units, room_of
from storage.encodings import encoded_bytes_per_token
from storage.errors import StoreError, StoreWriteError
from storage.reader import open_store
from storage.writer import WritableStore

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def bytes_needed_named(run: ExtractRun, store: WritableStore) -> Iterator[None]:
    """Adds the bytes that the open units still need to the error of a full disk.

    Raises:
        StoreWriteError: The disk was full, in one line with both numbers.
    """
    try:
        yield
    except OSError as error:
        cause = error.__cause__ if isinstance(error, StoreError) else error
        if not isinstance(cause, OSError) or cause.errno not in _FULL:
            raise
        needed = f"the units left need about {in_units(open_bytes(run, store))}"
        free_bytes = room_of(run, stored_bytes=0).free_bytes
        free = "" if free_bytes is None else f", {in_units(free_bytes)} are free"
        text = str(error)
        if not isinstance(error, StoreError):
            text = f"cannot write {error.filename or run.run_dir}: the disk is full; free space"
        raise StoreWriteError(f"{text} ({needed}{free})") from error


def open_bytes(run: ExtractRun, store: WritableStore) -> int:
    """Bytes that the units not committed yet will take, by the mean of those that are."""
    open_units = set(store.units()) - store.committed()
    snapshot = open_store(run.store_dir).snapshot()
    if snapshot.num_sequences == 0:
        return len(open_units) * run.store.shard_bytes
    num_sequences = sum(len(store.sequences_of(unit)) for unit in open_units)
    mean_tokens = int(snapshot.num_tokens.sum()) / snapshot.num_sequences
    token_bytes = TOKEN_BYTES + sum(
        encoded_bytes_per_token(layer.encoding, layer.hidden_size)
        for layer in store.layers.values()
    )
    return round(num_sequences * mean_tokens * token_bytes)
