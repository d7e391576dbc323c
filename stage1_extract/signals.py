"""Signals: a request to stop is noted, so that the worker can end between two batches."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Whether and when this process was asked to stop."""

    def __init__(self) -> None:
        self._asked_at_s: float | None = None

    def __bool__(self) -> bool:
        return self._asked_at_s is not None

    def note(self) -> None:
        """Notes that a stop is wanted from now on."""
        if self._asked_at_s is None:
            self._asked_at_s = time.monotonic()

    def seconds_left(self, grace_s: float) -> float:
        """Seconds until the grace time after the request is over; all of it before one."""
        if self._asked_at_s is None:
            return grace_s
        return self._asked_at_s + grace_s - time.monotonic()


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Notes SIGTERM, SIGUSR1 and Ctrl-C inside the block; a second Ctrl-C stops at once."""
    request = StopRequest()

    def note(number: int, _: FrameType | None) -> None:
        if request and number == signal.SIGINT:
            raise KeyboardInterrupt
        print(f"{signal.Signals(number).name}: stopping soon", file=sys.stderr, flush=True)
        request.note()

    earlier = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        yield request
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
