"""How long a device was kept waiting or copying, by its own clock and without waiting for it."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


class DeviceClock:
    """Sums up spans of a device's time; on a CPU those of the host.

    A GPU's span lies between two marks in a stream: what the host does meanwhile costs nothing as
    long as the GPU still has work.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._host_s = 0.0
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def span(self, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
        """Counts what passes inside the block, in a stream; None is the current one."""
        if self.device.type != "cuda":
            start_s = time.perf_counter()
            yield
            self._host_s += time.perf_counter() - start_s
            return
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        yield
        stop.record(stream)
        self._spans.append((start, stop))

    def take_s(self) -> float:
        """Gives the seconds of the spans that have ended since the last call."""
        is_over = [stop.query() for _, stop in self._spans]
        ended = [span for span, over in zip(self._spans, is_over, strict=True) if over]
        self._spans = [s for s, over in zip(self._spans, is_over, strict=True) if not over]
        ended_ms = [float(start.elapsed_time(stop)) for start, stop in ended]
        seconds = self._host_s + sum(ended_ms) / 1e3
        self._host_s = 0.0
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
