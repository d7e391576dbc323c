"""Cores next to a GPU: found by number or id, never beyond what the process may use."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_offline import near_gpu
from dflash_offline.near_gpu import cores_of, near_cores, on_cores, thread_limits, usable_cores

PLACES = ("0000:1b:00.0", "0000:9d:00.0")


@pytest.fixture
def two_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A GPU beside cores 0-3 and 8, another beside 4-7; the process may use cores 0-7."""
    for number, (place, cores) in enumerate(zip(PLACES, ("0-3,8\n", "4-7\n"), strict=True)):
        information = tmp_path / "gpus" / place / "information"
        information.parent.mkdir(parents=True)
        information.write_text(f"Model: \t\t NVIDIA\nGPU UUID: \t GPU-{number}abc-def\n")
        cpulist = tmp_path / "pci" / place / "local_cpulist"
        cpulist.parent.mkdir(parents=True)
        cpulist.write_text(cores)
    monkeypatch.setattr(near_gpu, "usable_cores", lambda: set(range(8)))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return {"gpus_dir": tmp_path / "gpus", "pci_dir": tmp_path / "pci"}


@pytest.mark.parametrize(
    ("devices", "cores"),
    [
        (["0"], {0, 1, 2, 3}),
        (["1"], {4, 5, 6, 7}),
        (["GPU-1abc-def"], {4, 5, 6, 7}),
        (["GPU-0abc"], {0, 1, 2, 3}),
        (["0", "1"], set(range(8))),
        (["2"], set(range(8))),
        (["MIG-5"], set(range(8))),
    ],
)
def test_near_cores_follow_the_gpu(two_sockets, devices, cores):
    assert near_cores(devices, **two_sockets) == cores


def test_a_process_kept_on_the_other_socket_stays_there(two_sockets, monkeypatch):
    monkeypatch.setattr(near_gpu, "usable_cores", lambda: {6, 7})
    assert near_cores(["0"], **two_sockets) == {6, 7}
    assert near_cores(["1"], **two_sockets) == {6, 7}


def test_in_a_slurm_job_a_number_tells_nothing_of_the_machine(two_sockets, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert near_cores(["1"], **two_sockets) == set(range(8))
    assert near_cores(["GPU-1abc"], **two_sockets) == {4, 5, 6, 7}


def test_nothing_changes_where_nothing_is_known(tmp_path):
    assert near_cores(["0"], gpus_dir=tmp_path / "none", pci_dir=tmp_path) == usable_cores()


@pytest.mark.parametrize(("text", "cores"), [("0-2,7\n", {0, 1, 2, 7}), ("5", {5}), ("\n", set())])
def test_core_lists_are_read_as_linux_writes_them(text, cores):
    assert cores_of(text) == cores


@pytest.mark.skipif(len(usable_cores()) < 2, reason="needs two cores to leave one out")
def test_a_process_started_meanwhile_keeps_the_cores_and_we_ours():
    before = usable_cores()
    one = {min(before)}
    with on_cores(one):
        code = "import os; print(os.sched_getaffinity(0))"
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout.strip() == str(one)
    assert os.sched_getaffinity(0) == before


def test_processes_share_the_cores_for_compiling(monkeypatch):
    monkeypatch.setattr(near_gpu, "usable_cores", lambda: set(range(16)))
    shares = [int(thread_limits(n)["TORCHINDUCTOR_COMPILE_THREADS"]) for n in (1, 2, 5, 8, 40)]
    assert shares == [8, 8, 3, 2, 1]
