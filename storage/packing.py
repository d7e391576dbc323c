"""Lossless packing of chunks, as the Zarr codecs `blosc` and `crc32c` do it.

A packed chunk carries its own checksum, looked at before anything is unpacked: no unpacker is ever
fed damaged bytes.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
from crc32c import crc32c
from jaxtyping import Shaped
from numcodecs import blosc

from storage.errors import DamagedShardError

PACKINGS = ("zstd",)
"""How chunks may be packed; each is a compressor that blosc knows."""

LEVEL = 1
"""More effort makes hidden states 1% smaller and takes several times as long."""
BLOCK_BYTES = 512 * 1024
"""Bytes compressed together: blosc's own choice, a few KiB, makes bf16 states a seventh larger."""
CHECKSUM_BYTES = 4


@cache
def _threads(process_id: int) -> ThreadPoolExecutor:
    """The packing threads of a process; a forked one gets its own."""
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="pack")


def side_by_side(actions: Sequence[Callable[[], None]]) -> None:
    """Does some packing at once; waits for all, then raises the first error."""
    running = [_threads(os.getpid()).submit(action) for action in actions]
    for failure in [each.exception() for each in running]:
        if failure is not None:
            raise failure


def packing_codecs(packing: str, dtype: str) -> list[dict[str, Any]]:
    """The Zarr codecs that follow `bytes` in the metadata of an array whose chunks are packed."""
    itemsize = np.dtype(dtype).itemsize
    configuration = {
        "cname": packing,
        "clevel": LEVEL,
        "shuffle": "shuffle" if itemsize > 1 else "noshuffle",
        "typesize": itemsize,
        "blocksize": BLOCK_BYTES,
    }
    return [{"name": "blosc", "configuration": configuration}, {"name": "crc32c"}]


def pack(packing: str, chunk: Shaped[np.ndarray, "tokens width"]) -> bytes:
    """A chunk as it is stored; the GIL is free meanwhile."""
    shuffle = blosc.SHUFFLE if chunk.itemsize > 1 else blosc.NOSHUFFLE
    packed: bytes = blosc.compress(chunk, packing.encode(), LEVEL, shuffle, BLOCK_BYTES)
    checksum: int = crc32c(packed)
    return packed + checksum.to_bytes(CHECKSUM_BYTES, "little")


def unpack(stored: memoryview, out: memoryview) -> None:
    """Fills `out` with a chunk's bytes.

    Raises:
        DamagedShardError: the stored bytes do not match their checksum.
    """
    packed, checksum = stored[:-CHECKSUM_BYTES], stored[-CHECKSUM_BYTES:]
    if crc32c(packed).to_bytes(CHECKSUM_BYTES, "little") != checksum:
        raise DamagedShardError("a packed chunk does not match its checksum")
    blosc.decompress(packed, out)
