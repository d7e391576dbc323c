"""How long a device was kept waiting or copying, by its own clock and without waiting for it."""

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


class Moment:
    """A point in a device's work; on a CPU, which works as it is told, a point in time.

    A GPU's is a mark in a stream, which it passes when all that was given before is done.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """Marks what was handed over so far, in a stream; None is the current one."""
        self._mark: torch.cuda.Event | None = None
        self._host_s = 0.0
        if device.type == "cuda":
            self._mark = torch.cuda.Event(enable_timing=True)
            self._mark.record(stream)
        else:
            self._host_s = time.perf_counter()

    def is_past(self) -> bool:
        """Says whether the device has come to it."""
        return self._mark is None or bool(self._mark.query())

    def wait(self) -> None:
        """Waits until the device has come to it."""
        if self._mark is not None:
            self._mark.synchronize()

    def seconds_to(self, other: "Moment") -> float:
        """Gives the time from here to another moment of the device, negative when it was before.

        Both must be past.
        """
        if self._mark is None or other._mark is None:
            return other._host_s - self._host_s
        return float(self._mark.elapsed_time(other._mark)) / 1e3


class DeviceClock:
    """Sums up spans of a device's time; on a CPU those of the host.

    A GPU's span lies between two marks in a stream: what the host does meanwhile costs nothing as
    long as the GPU still has work.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spans: deque[tuple[Moment, Moment]] = deque()

    @contextmanager
    def span(self, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
        """Counts what passes inside the block, in a stream; None is the current one."""
        start = Moment(self.device, stream)
        yield
        self._spans.append((start, Moment(self.device, stream)))

    def take_s(self, *, until: Moment | None = None) -> float:
        """Gives the seconds of the spans that have ended, each of them once.

        Args:
            until: a past moment; spans that ended after it are left for a later call.
        """
        seconds = 0.0
        for _ in range(len(self._spans)):  # Another thread may add some meanwhile.
            start, stop = self._spans.popleft()
            if stop.is_past() and (until is None or stop.seconds_to(until) >= 0.0):
                seconds += start.seconds_to(stop)
            else:
                self._spans.append((start, stop))
        return seconds


def process_age_s() -> float | None:
    """Gives the seconds since this process was started; None where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return None
    # Field 22 of proc(5): clock ticks between the system's start and the process's.
    return uptime_s - int(fields[19]) / os.sysconf("SC_CLK_TCK")
