"""Processes that the launcher started: they stop when it is gone, however it went."""

import ctypes
import os
import signal
import sys
from pathlib import Path
from types import FrameType

_VARIABLE = "DFLASH_OFFLINE_LAUNCHER"
_PR_SET_PDEATHSIG = 1


def child_environment(log_path: Path) -> dict[str, str]:
    """What the launcher tells a child: which process to stop with, and where its log is."""
    return {_VARIABLE: f"{os.getpid()}:{log_path}"}


def stop_with_launcher() -> None:
    """In a child of the launcher, turns the launcher's death into a SIGTERM; else does nothing.

    A launcher that is killed can tell nobody. Without this its workers would go on unseen beside
    those of the next start. Linux tells them; elsewhere they end when they next print.
    """
    launcher = os.environ.pop(_VARIABLE, None)  # Children of ours are not the launcher's.
    if launcher is None or sys.platform != "linux":
        return
    pid, _, log_path = launcher.partition(":")

    def stop(number: int, frame: FrameType | None) -> None:
        # The pipe to the launcher is broken: the first line printed would raise.
        log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGHUP, stop)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
    if os.getppid() != int(pid):  # It died before it could be watched.
        os.kill(os.getpid(), signal.SIGHUP)
