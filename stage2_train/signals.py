"""Signals that end a training behind a checkpoint instead of killing it."""

import signal
from types import FrameType
from typing import Any


class StopSignals:
    """Notes SIGINT, SIGTERM and SIGUSR1 instead of dying: the current step ends in a checkpoint."""

    def __init__(self) -> None:
        self._is_set = False
        self._before: dict[int, Any] = {}

    def is_set(self) -> bool:
        """Says whether a signal came."""
        return self._is_set

    def __enter__(self) -> "StopSignals":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_set = True
