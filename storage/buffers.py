"""Memory that is reused once nobody looks at it: fresh pages cost more than the read itself."""

import threading
from typing import Any

import numpy as np
from jaxtyping import UInt8

MAX_FREE_BYTES = 512 * 2**20
"""Unused memory a pool keeps for later reads, in bytes."""

SEARCHED_BUFFERS = 32
"""Kept buffers looked at for a request; the newest are likely still in the processor's caches."""

_GRAIN_BYTES = 2**16


class _Lease:
    """Owner of a borrowed buffer: numpy views keep it alive, its end gives the memory back."""

    def __init__(self, pool: "BufferPool", memory: UInt8[np.ndarray, " bytes"], num_bytes: int):
        self._pool, self._memory = pool, memory
        self.__array_interface__: dict[str, Any] = {
            **memory.__array_interface__,
            "shape": (num_bytes,),
        }

    def __del__(self) -> None:
        self._pool.give_back(self._memory)


class BufferPool:
    """Hands out uint8 arrays; each returns by itself when its last view is gone. Thread-safe."""

    def __init__(self, *, max_free_bytes: int = MAX_FREE_BYTES):
        self._max_free_bytes = max_free_bytes
        # Re-entrant, for a lease can end at any allocation, also of a thread holding the lock.
        self._lock = threading.RLock()
        self._free: list[UInt8[np.ndarray, " bytes"]] = []
        self._free_bytes = 0

    def take(self, num_bytes: int) -> UInt8[np.ndarray, " bytes"]:
        """An array of `num_bytes` with unspecified contents."""
        memory = self._take_free(num_bytes)
        if memory is None:
            memory = np.empty(size_class(num_bytes), dtype=np.uint8)
        return np.asarray(_Lease(self, memory, num_bytes))

    def _take_free(self, num_bytes: int) -> UInt8[np.ndarray, " bytes"] | None:
        """The kept buffer given back last that fits and is at most twice as large."""
        largest = 2 * size_class(num_bytes)
        with self._lock:
            newest = len(self._free) - 1
            for place in range(newest, max(-1, newest - SEARCHED_BUFFERS), -1):
                if num_bytes <= self._free[place].nbytes <= largest:
                    memory = self._free.pop(place)
                    self._free_bytes -= memory.nbytes
                    return memory
        return None

    def give_back(self, memory: UInt8[np.ndarray, " bytes"]) -> None:
        """Keeps a buffer for later; beyond `max_free_bytes` those kept longest are let go."""
        with self._lock:
            self._free.append(memory)
            self._free_bytes += memory.nbytes
            while self._free_bytes > self._max_free_bytes:
                self._free_bytes -= self._free.pop(0).nbytes


def size_class(num_bytes: int) -> int:
    """The buffer size that serves a request: two sizes per doubling, at least 64 KiB.

    Coarse, so that sequences of all lengths use few buffers again and again; what a sequence does
    not reach of its buffer is never touched and takes no memory.
    """
    step = max(_GRAIN_BYTES, 1 << max(0, num_bytes.bit_length() - 2))
    return max(1, -(-num_bytes // step)) * step
