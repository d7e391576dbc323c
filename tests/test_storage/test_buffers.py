import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from storage.buffers import BufferPool, size_class


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_returns_when_the_last_view_is_gone() -> None:
    pool = BufferPool()
    first = pool.take(100_000)
    place = address(first)
    view = first[10:20].view(np.uint16)
    del first
    assert address(pool.take(100_000)) != place
    del view
    assert address(pool.take(100_000)) == place


def test_a_larger_buffer_serves_a_smaller_request_of_like_size() -> None:
    pool = BufferPool()
    place = address(pool.take(1_400_000))
    small = pool.take(1_000_000)
    assert address(small) == place
    assert small.nbytes == 1_000_000
    del small
    assert address(pool.take(200_000)) != place


def test_kept_memory_is_bounded() -> None:
    pool = BufferPool(max_free_bytes=300_000)
    arrays = [pool.take(100_000) for _ in range(20)]
    del arrays
    assert pool._free_bytes <= 300_000
    assert sum(memory.nbytes for memory in pool._free) == pool._free_bytes


@given(st.integers(0, 2**40))
def test_size_classes_waste_little(num_bytes: int) -> None:
    size = size_class(num_bytes)
    assert num_bytes <= size <= max(num_bytes * 1.5, 2**16 + num_bytes)
    assert size_class(size) == size
