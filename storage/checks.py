"""Verify what was read beside the next read: checksums cost half of what copying does."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from types import TracebackType

BESIDE_BYTES = 2**20
"""Smaller reads are verified at once: handing them over would cost more."""


@cache
def _threads(process_id: int) -> ThreadPoolExecutor:
    """The verifying threads of a process; a forked one gets its own."""
    num_threads = min(4, (os.cpu_count() or 1) // 2)
    return ThreadPoolExecutor(num_threads, thread_name_prefix="verify")


class Checks:
    """The checks of one read: leaving the block waits for all, and raises the first that failed."""

    def __init__(self) -> None:
        self._running: list[Future[None]] = []

    def add(self, check: Callable[[], None], num_bytes: int) -> None:
        """Runs a check, beside the caller if it is worth it."""
        if num_bytes < BESIDE_BYTES or (os.cpu_count() or 1) < 2:
            check()
        else:
            self._running.append(_threads(os.getpid()).submit(check))

    def __enter__(self) -> "Checks":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # In order, so that of several damaged layers the same one is named every time.
        failures = [failure for each in self._running if (failure := each.exception()) is not None]
        if failures and error is None:
            raise failures[0]
