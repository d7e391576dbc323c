"""A drafter has one training process at a time."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stage2_train.train import EXIT_DONE, train_drafter

# Takes the lock as a training does, and stays.
HOLDER = """
import signal, sys
from pathlib import Path
from storage.lock import only_process_in
with only_process_in(Path(sys.argv[1]), work="training"):
    print("held", flush=True)
    signal.pause()
"""


def test_a_second_training_of_a_drafter_is_refused_while_the_first_lives(make_run):
    run = make_run(train={"max_steps": 2})
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, run.drafter_dir],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        assert holder.stdout.readline() == "held\n"
        expected = f"another training of drafter tiny is running .process {holder.pid} on "
        with pytest.raises(ValueError, match=expected):
            train_drafter(run)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert train_drafter(run) == EXIT_DONE
