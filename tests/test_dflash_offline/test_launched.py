"""A launcher that is killed leaves no worker behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
LAUNCHER = """
import os, subprocess, sys, time
from pathlib import Path
from dflash_offline.launched import child_environment
environment = os.environ | child_environment(Path(sys.argv[2]))
child = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1]],
    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
)
child.stdout.readline()
print("up", flush=True)
if sys.argv[3] == "stays":
    time.sleep(60)
"""
CHILD = """
import os, signal, sys, time
from dflash_offline.launched import stop_with_launcher
is_stopped = []
signal.signal(signal.SIGTERM, lambda *_: is_stopped.append(True))
EARLY = %r
if EARLY:
    print("up", flush=True)
    while os.getppid() == int(os.environ["DFLASH_OFFLINE_LAUNCHER"].partition(":")[0]):
        time.sleep(0.01)
stop_with_launcher()
assert "DFLASH_OFFLINE_LAUNCHER" not in os.environ
if not EARLY:
    print("up", flush=True)
while not is_stopped:
    time.sleep(0.01)
print("stopped behind a checkpoint", flush=True)
"""


@pytest.mark.parametrize("early", [False, True])
def test_a_killed_launchers_child_is_told_to_stop_and_can_still_write(tmp_path, early):
    log_path = tmp_path / "child.log"
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, CHILD % early, log_path, "stays"],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert launcher.stdout.readline() == "up\n"
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    end_s = time.monotonic() + 20
    while not log_path.exists() or not log_path.read_text():
        assert time.monotonic() < end_s
        time.sleep(0.02)
    assert log_path.read_text() == "stopped behind a checkpoint\n"


def test_a_process_of_its_own_is_left_alone(monkeypatch):
    monkeypatch.delenv("DFLASH_OFFLINE_LAUNCHER", raising=False)
    from dflash_offline.launched import stop_with_launcher

    before = signal.getsignal(signal.SIGHUP)
    stop_with_launcher()
    assert signal.getsignal(signal.SIGHUP) == before
