"""Checks beside the reads are all done before anything is given out."""

import multiprocessing
import threading

import pytest

from storage.checks import BESIDE_BYTES, Checks


def test_all_checks_are_done_when_the_block_ends() -> None:
    done: list[int] = []
    with Checks() as checks:
        for number in range(20):
            checks.add(lambda number=number: done.append(number), BESIDE_BYTES)  # type: ignore[misc]
    assert sorted(done) == list(range(20))


@pytest.mark.parametrize("num_bytes", [1, BESIDE_BYTES])
def test_the_first_failure_is_raised(num_bytes: int) -> None:
    def fail(name: str) -> None:
        raise OSError(name)

    def read() -> None:
        with Checks() as checks:
            checks.add(lambda: None, num_bytes)
            checks.add(lambda: fail("one"), num_bytes)
            checks.add(lambda: fail("two"), num_bytes)

    with pytest.raises(OSError, match="one"):
        read()


def test_an_error_of_the_caller_waits_for_the_checks_and_passes() -> None:
    release, done = threading.Event(), []

    def slow() -> None:
        release.wait(5)
        done.append(1)

    def caller() -> None:
        with Checks() as checks:
            checks.add(slow, BESIDE_BYTES)
            release.set()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        caller()
    assert done == [1]


def check_in_child() -> None:
    with Checks() as checks:
        checks.add(lambda: None, BESIDE_BYTES)


def test_a_forked_process_checks_in_threads_of_its_own() -> None:
    check_in_child()
    child = multiprocessing.get_context("fork").Process(target=check_in_child)
    child.start()
    child.join(20)
    assert child.exitcode == 0
