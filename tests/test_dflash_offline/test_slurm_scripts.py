"""The sbatch files: their text, and what their shell does at signals."""

import os
import re
import signal
import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_offline.slurm_config import SlurmConfig
from dflash_offline.slurm_scripts import BatchRun, array_text, scripts

GOLDEN = Path(__file__).parent / "golden_slurm"
# Options of sbatch and srun in every release from 22.05 to 25.11.
KNOWN_OPTIONS = {
    *("account", "array", "cpus-per-task", "gres", "job-name", "mem", "nodes", "ntasks"),
    *("open-mode", "output", "partition", "requeue", "signal", "time", "exact", "wait"),
    "ntasks-per-node",
}
PLAIN = {"command": ("dflash-offline",)}
SITE = {
    "command": ("apptainer", "exec", "--nv", "my image.sif", "dflash-offline"),
    "partition": "gpu",
    "account": "lab",
    "gpu_type": "h200",
    "sbatch_lines": ("--qos=long",),
    "setup_lines": ("module load cuda/12.8",),
    "srun_options": ("--mpi=none",),
    "max_restarts": 3,
    "signal_s": 120,
    "extract": {"tasks": 16, "tasks_at_once": 4, "memory": "64G", "sbatch_lines": ("--nice=5",)},
    "node": {"memory": "0"},
}
CASES = {
    "plain": PLAIN,
    "site": SITE,
    "one-node": {**PLAIN, "layout": "one-node"},
    "two-nodes": {**PLAIN, "ranks": 8, "train": {"nodes": 2, "cpus": 4}},
}


def make_batch_run(
    folder: Path = Path("/runs/demo/slurm"), ranks=1, worker_gpus=1, **settings
) -> BatchRun:
    config = SlurmConfig(**settings)
    return BatchRun(
        name="demo-0123abcd",
        folder=folder,
        drafters=("small", "large"),
        ranks=ranks,
        worker_gpus=worker_gpus,
        command=config.command,
        config=config,
    )


@pytest.mark.parametrize("case", CASES)
def test_the_text_is_as_recorded(case):
    # After an intended change: UPDATE_GOLDEN=1 pytest, and read the difference.
    for stage, text in scripts(make_batch_run(**CASES[case])).items():
        path = GOLDEN / f"{case}-{stage}.sbatch"
        if os.environ.get("UPDATE_GOLDEN"):
            path.write_text(text)
        assert text == path.read_text()


@pytest.mark.parametrize("case", CASES)
def test_bash_can_read_every_file_and_slurm_knows_every_option(case):
    for text in scripts(make_batch_run(**CASES[case])).values():
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        ours = re.sub(r"--(qos|nice|mpi|nv|worker|num-workers|drafter|set)\b", "", text)
        options = re.findall(r"^#SBATCH --([a-z-]+)", ours, flags=re.M)
        for line in re.findall(r"^srun .*$", ours, flags=re.M):
            options += re.findall(r"--([a-z-]+)", line)
        assert set(options) <= KNOWN_OPTIONS


def test_the_sites_lines_stand_in_every_job():
    for text in scripts(make_batch_run(**SITE)).values():
        for line in ("--partition=gpu", "--account=lab", "--qos=long"):
            assert f"#SBATCH {line}\n" in text
        # Before `set -u`, which breaks the scripts behind `module`.
        assert text.index("module load cuda/12.8") < text.index("set -u")


def test_a_retried_array_still_knows_the_number_of_workers():
    text = scripts(make_batch_run(**PLAIN, extract={"tasks": 12}))["extract"]
    assert "num_workers=12\n" in text
    assert "$SLURM_ARRAY_TASK_COUNT" not in text


def test_a_drafter_of_many_ranks_has_a_gpu_for_each_on_every_node():
    text = scripts(make_batch_run(**CASES["two-nodes"]))["train"]
    for line in ("--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--gres=gpu:4"):
        assert f"#SBATCH {line}\n" in text
    (srun,) = re.findall(r"^srun .*$", text, flags=re.M)
    assert "--nodes=2 --ntasks=8 --cpus-per-task=4 --ntasks-per-node=4 --wait=600" in srun
    alone = scripts(make_batch_run(**PLAIN))["train"]
    assert "#SBATCH --gres=gpu:1\n" in alone
    assert "--wait" not in alone


def test_a_worker_of_many_gpus_is_one_task():
    text = scripts(make_batch_run(**PLAIN, worker_gpus=4))["extract"]
    assert "#SBATCH --gres=gpu:4\n" in text
    assert "#SBATCH --ntasks=1\n" in text
    text = scripts(make_batch_run(**PLAIN, extract={"gpus": 0}, worker_gpus=4))["extract"]
    assert "--gres" not in text


@given(st.sets(st.integers(0, 1000), min_size=1))
def test_array_text_names_exactly_the_indices(indices):
    named = set()
    for part in array_text(sorted(indices)).split(","):
        first, _, last = part.partition("-")
        named |= set(range(int(first), int(last or first) + 1))
    assert named == indices


def test_array_text_joins_neighbours():
    assert array_text([5, 0, 1, 2, 7, 8]) == "0-2,5,7-8"


FAKE_SRUN = """\
#!/bin/bash
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""
FAKE_SCONTROL = """\
#!/bin/bash
echo "$*" >>"$CALLS"
[ "$1" != show ] || echo "PreemptEligibleTime=2026-01-01T00:00:00 PreemptTime=$PREEMPT_TIME"
"""
WORKER = """\
#!/bin/bash
case $MODE in
done) exit 0 ;;
fails) exit 1 ;;
stops-alone) exit 75 ;;
dies-of-TERM) kill -TERM $$ ;;
stops) trap 'exit 75' USR1 ;;
fails-at-signal) trap 'exit 1' USR1 ;;
deaf) ;;
esac
echo ready
while :; do sleep 0.02; done
"""


@pytest.fixture
def job(tmp_path):
    """Runs a stage's file in bash, with a fake srun, scontrol and worker."""
    for name, text in {"srun": FAKE_SRUN, "scontrol": FAKE_SCONTROL, "worker": WORKER}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(stat.S_IRWXU)
    calls = tmp_path / "calls"
    calls.touch()

    def run(mode, number=None, *, preempted=False, restarts=0, stage="train", array=True):
        settings = {
            "command": (str(tmp_path / "worker"),),
            "local_dir": str(tmp_path),
            "max_restarts": 3,
            "layout": "one-node" if stage == "node" else "arrays",
        }
        text = scripts(make_batch_run(tmp_path / "slurm", **settings))[stage]
        environment = {
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "CALLS": str(calls),
            "MODE": mode,
            "PREEMPT_TIME": "2026-01-01T00:01:00" if preempted else "None",
            "SLURM_JOB_NAME": "demo",
            "SLURM_JOB_ID": "7",
            "SLURM_RESTART_COUNT": str(restarts),
        }
        if array:
            environment |= {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "1"}
        (tmp_path / "job.sbatch").write_text(text)
        process = subprocess.Popen(
            ["bash", tmp_path / "job.sbatch"], env=environment, stdout=subprocess.PIPE, text=True
        )
        if number is not None:
            num_children = 2 if stage == "node" else 1
            while num_children:
                num_children -= process.stdout.readline() == "ready\n"
            process.send_signal(number)
        code = process.wait(timeout=20)
        requeued = [line for line in calls.read_text().splitlines() if "requeue" in line]
        return code, requeued

    return run


USR1, TERM = signal.SIGUSR1, signal.SIGTERM
AGAIN = ["requeue 5_1"]


@pytest.mark.parametrize(
    ("mode", "number", "preempted", "restarts", "expected"),
    [
        ("done", None, False, 0, (0, [])),
        ("fails", None, False, 0, (1, [])),
        # The time limit is near: stop and queue again, but not after a failure, nor for ever.
        ("stops", USR1, False, 0, (75, AGAIN)),
        ("stops", USR1, False, 2, (75, AGAIN)),
        ("stops", USR1, False, 3, (75, [])),
        ("deaf", USR1, False, 0, (75, AGAIN)),
        ("fails-at-signal", USR1, False, 0, (1, [])),
        # Cancelled: a cancelled job stays cancelled, even during a preemption.
        ("stops", TERM, False, 0, (75, [])),
        ("deaf", TERM, False, 0, (75, [])),
        ("stops", TERM, True, 0, (75, [])),
        # Preempted: Slurm told the job step alone.
        ("stops-alone", None, True, 0, (75, AGAIN)),
        ("dies-of-TERM", None, True, 0, (75, AGAIN)),
        ("fails", None, True, 0, (1, [])),
        ("stops-alone", None, False, 0, (75, [])),
        ("dies-of-TERM", None, False, 0, (143, [])),
    ],
)
def test_a_task_is_queued_again_exactly_when_it_should(
    job, mode, number, preempted, restarts, expected
):
    assert job(mode, number, preempted=preempted, restarts=restarts) == expected


@pytest.mark.parametrize("stage", ["extract", "train"])
def test_both_arrays_name_the_task_not_the_array(job, stage):
    assert job("stops", USR1, stage=stage) == (75, AGAIN)


def test_one_node_tells_both_steps_and_names_the_job(job):
    assert job("stops", USR1, stage="node", array=False) == (75, ["requeue 7"])
