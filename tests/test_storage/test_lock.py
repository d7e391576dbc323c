import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from storage.lock import LOCK_FILE, held_since_s, is_holder_gone, only_process_in

HOLDER = """
import signal, sys
from pathlib import Path
from storage.lock import only_process_in
with only_process_in(Path(sys.argv[1]), work="work"):
    print("held", flush=True)
    signal.pause()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of `tmp_path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_process_is_refused_with_the_name_of_the_first(tmp_path, holder):
    for _ in range(2):  # A refusal leaves the holder's name as it was.
        with (
            pytest.raises(ValueError, match=rf"another work is running \(process {holder.pid} on"),
            only_process_in(tmp_path, work="work"),
        ):
            pytest.fail("entered")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_dead_process_holds_nothing(tmp_path, holder, number):
    holder.send_signal(number)
    holder.wait()
    with only_process_in(tmp_path, work="work"):
        assert (tmp_path / LOCK_FILE).read_text().startswith(f"process {os.getpid()} on ")


def test_whether_the_holder_is_gone_is_told_by_its_name(tmp_path, holder):
    assert not is_holder_gone(tmp_path)
    holder.kill()
    holder.wait()
    assert is_holder_gone(tmp_path)
    text = f"process {holder.pid} on another-{socket.gethostname()}\n"
    (tmp_path / LOCK_FILE).write_text(text)
    assert not is_holder_gone(tmp_path), "nothing is known of another machine's processes"
    assert not is_holder_gone(tmp_path / "none")


def test_a_lock_is_held_since_its_holder_took_it(tmp_path, holder):
    assert held_since_s(tmp_path / "none") is None
    os.utime(tmp_path / LOCK_FILE, (1000.0, 1000.0))
    with pytest.raises(ValueError, match="another work"), only_process_in(tmp_path, work="work"):
        pass
    assert held_since_s(tmp_path) == 1000.0
    holder.kill()
    holder.wait()
    with only_process_in(tmp_path, work="work"):
        pass
    assert held_since_s(tmp_path) > 1000.0


def test_the_folder_is_made_and_free_again_afterwards(tmp_path):
    for _ in range(2):
        with only_process_in(tmp_path / "new" / "folder", work="work"):
            pass


def test_a_file_system_without_locks_says_so_and_goes_on(tmp_path, monkeypatch, capsys):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with only_process_in(tmp_path, work="training"):
        pass
    assert "start one training only" in capsys.readouterr().err
