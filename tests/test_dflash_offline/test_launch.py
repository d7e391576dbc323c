"""The launcher: one process a job, queueing, failures apart, signals passed on."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_offline import launch
from dflash_offline.launch import Job, Slot, combined_exit_code, default_gpus, run_jobs, slots


@pytest.fixture
def python_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], Job]:
    """Jobs that run `python -c code` instead of the command line."""
    real = launch.subprocess.Popen

    def popen(command: list[str], **kwargs: object) -> object:
        return real([sys.executable, "-c", command[3]], **kwargs)

    monkeypatch.setattr(launch.subprocess, "Popen", popen)
    return lambda name, code: Job(name=name, arguments=[code], log_path=tmp_path / f"{name}.log")


def test_a_failing_job_leaves_the_others_alone(
    python_jobs: Callable[[str, str], Job], tmp_path: Path
) -> None:
    lines: list[tuple[str, str]] = []
    exit_codes = run_jobs(
        [python_jobs("bad", "raise SystemExit(3)"), python_jobs("good", "print('hello')")],
        places=[Slot(environment={})],
        show_line=lambda name, line: lines.append((name, line)),
    )
    assert exit_codes == {"bad": 3, "good": 0}
    assert lines == [("good", "hello")]
    assert (tmp_path / "good.log").read_text() == "hello\n"


def test_each_job_gets_the_environment_of_its_place(python_jobs: Callable[[str, str], Job]) -> None:
    lines: list[str] = []
    run_jobs(
        [python_jobs("a", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")],
        places=[Slot(environment={"CUDA_VISIBLE_DEVICES": "5"})],
        show_line=lambda name, line: lines.append(line),
    )
    assert lines == ["5"]


def test_limits_on_threads_give_way_to_those_of_the_user(
    python_jobs: Callable[[str, str], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    names = "'OMP_NUM_THREADS', 'TORCHINDUCTOR_COMPILE_THREADS'"
    lines: list[str] = []
    run_jobs(
        [python_jobs("a", f"import os; print(*(os.environ[name] for name in ({names})))")],
        places=[Slot(environment={})] * 1000,
        show_line=lambda name, line: lines.append(line),
    )
    assert lines == ["3 1"]


def test_a_gpu_is_named_as_the_scheduler_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5c, GPU-77,2")
    found = slots([1, 2], available_gpus=3, cpu_processes=1, first=True)
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in found] == ["GPU-77", "2"]


def test_a_signal_reaches_running_jobs_and_starts_no_queued_one(
    python_jobs: Callable[[str, str], Job],
) -> None:
    code = (
        "import signal, sys, threading\n"
        "stop = threading.Event()\n"
        "signal.signal(signal.SIGTERM, lambda *_: stop.set())\n"
        "print('ready')\n"
        "stop.wait(60)\n"
        "sys.exit(75)"
    )

    def show(name: str, line: str) -> None:
        if line == "ready":
            threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGUSR1)).start()

    exit_codes = run_jobs(
        [python_jobs("running", code), python_jobs("queued", "print('never')")],
        places=[Slot(environment={})],
        show_line=show,
    )
    assert exit_codes == {"running": 75, "queued": 75}


@pytest.mark.parametrize(
    ("exit_codes", "combined"),
    [([0, 0], 0), ([0, 75], 75), ([2, 75], 2), ([0, -9], 1), ([1, 2], 1)],
)
def test_combined_exit_code(exit_codes: list[int], combined: int) -> None:
    assert combined_exit_code({str(i): code for i, code in enumerate(exit_codes)}) == combined


def test_eight_gpus_are_shared_five_and_three() -> None:
    assert default_gpus(8, first=True) == [0, 1, 2, 3, 4]
    assert default_gpus(8, first=False) == [5, 6, 7]
    assert default_gpus(2, first=True) == default_gpus(2, first=False) == [0, 1]


def test_an_absent_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"extract\.gpus = \[0, 2\]: .* has GPUs 0-1 only"):
        slots((0, 2), available_gpus=2, cpu_processes=1, first=True)
    with pytest.raises(ValueError, match=r"launch\.gpus = \[-1\]: .* has GPUs 0-1 only"):
        slots((-1,), available_gpus=2, cpu_processes=1, first=False)
    with pytest.raises(ValueError, match="name at least one GPU"):
        slots((), available_gpus=2, cpu_processes=1, first=True)
    with pytest.raises(ValueError, match="this machine shows no GPU"):
        slots((0,), available_gpus=0, cpu_processes=1, first=True)


def test_a_job_of_two_places_gets_both_their_gpus(python_jobs: Callable[[str, str], Job]) -> None:
    lines: list[tuple[str, str]] = []
    show_gpus = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    jobs = [
        python_jobs("one", show_gpus),
        replace(python_jobs("two", show_gpus), num_places=2),
        python_jobs("last", show_gpus),
    ]
    exit_codes = run_jobs(
        jobs,
        places=[Slot(environment={"CUDA_VISIBLE_DEVICES": gpu}) for gpu in "56"],
        show_line=lambda name, line: lines.append((name, line)),
    )
    assert exit_codes == {"one": 0, "two": 0, "last": 0}
    gpus = dict(lines)
    # It waits for both places, and those behind it wait for it.
    assert [name for name, _ in lines] == ["one", "two", "last"]
    assert sorted(gpus["two"].split(",")) == ["5", "6"]


def test_a_job_that_needs_more_places_than_there_are_is_refused(
    python_jobs: Callable[[str, str], Job],
) -> None:
    job = replace(python_jobs("wide", "print('never')"), num_places=4)
    with pytest.raises(ValueError, match="wide needs 4 places at once, of which there are 1"):
        run_jobs([job], places=[Slot(environment={})], show_line=lambda name, line: None)


def test_jobs_that_work_together_end_together(python_jobs: Callable[[str, str], Job]) -> None:
    waits = "import signal; signal.pause()"
    exit_codes = run_jobs(
        [python_jobs("waits", waits), python_jobs("fails", "raise SystemExit(3)")],
        places=[Slot(environment={})] * 2,
        show_line=lambda name, line: None,
        together=True,
    )
    assert exit_codes == {"waits": 3, "fails": 3}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_before_one_of_them_listens_ends_all_that_work_together(
    python_jobs: Callable[[str, str], Job], number: signal.Signals
) -> None:
    """Rank 0 may still prepare the store while the others ignore signals and wait for it."""
    names = "(signal.SIGTERM, signal.SIGUSR1)"
    deaf = (
        f"import signal; [signal.signal(each, signal.SIG_IGN) for each in {names}]\n"
        "print('ready')\nwhile True: signal.pause()"
    )
    # As srun does it: the signal reaches this process as well as its launcher.
    early = (
        "import os, signal, time; time.sleep(1); os.kill(os.getppid(), signal.SIGUSR1)\n"
        f"os.kill(os.getpid(), {int(number)}); time.sleep(60)"
    )
    exit_codes = run_jobs(
        [python_jobs("deaf", deaf), python_jobs("early", early)],
        places=[Slot(environment={})] * 2,
        show_line=lambda name, line: None,
        together=True,
    )
    assert exit_codes == {"deaf": 75, "early": 75}
