"""Submitting, trying again, cancelling and counting, against a fake Slurm."""

import json
import os
import stat
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dflash_offline import slurm
from dflash_offline.cli import main
from dflash_offline.config import load_run_file
from dflash_offline.slurm import Progress, read_progress, tasks_left
from storage.lock import only_process_in

RUN_FILE = """
[target]
model = "some/model"
[data]
conversations = ["data.jsonl"]
[[drafter]]
name = "small"
[[drafter]]
name = "large"
[slurm]
partition = "gpu"
[slurm.extract]
tasks = 4
tasks_at_once = 2
"""
# sbatch, squeue and scancel in one: the queue is a JSON list of [id, index, state, name].
FAKE = """\
#!{python} -S
import json, re, sys
from pathlib import Path
folder = Path({folder!r})
queue = json.loads((folder / "queue.json").read_text())
name, arguments = Path(sys.argv[0]).name, sys.argv[1:]
with (folder / "calls").open("a") as calls:
    calls.write(" ".join([name, *arguments]) + "\\n")
if name == "sbatch":
    text = Path(arguments[-1]).read_text()
    job_name = re.search(r"#SBATCH --job-name=(.*)", text)[1]
    array = [a.partition("=")[2] for a in arguments if a.startswith("--array=")]
    indices = [None]
    if array:
        indices = []
        for part in array[0].partition("%")[0].split(","):
            first, _, last = part.partition("-")
            indices += range(int(first), int(last or first) + 1)
    number = int((folder / "next").read_text())
    (folder / "next").write_text(str(number + 1))
    queue += [[str(number), index, "PENDING", job_name] for index in indices]
    print(number)
elif name == "squeue":
    names = next(a for a in arguments if a.startswith("--name=")).partition("=")[2].split(",")
    for number, index, state, job_name in queue:
        if job_name in names:
            print(number, "N/A" if index is None else index, state, job_name, sep="|")
else:
    queue = [task for task in queue if task[0] not in arguments]
(folder / "queue.json").write_text(json.dumps(queue))
"""


class FakeSlurm:
    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()
        (folder / "next").write_text("101")
        self.queue = []
        for name in ("sbatch", "squeue", "scancel"):
            (folder / name).write_text(FAKE.format(python=sys.executable, folder=str(folder)))
            (folder / name).chmod(stat.S_IRWXU)

    @property
    def queue(self):
        return json.loads((self.folder / "queue.json").read_text())

    @queue.setter
    def queue(self, tasks):
        (self.folder / "queue.json").write_text(json.dumps(tasks))

    def take_calls(self, *names):
        """Gives what was called since the last time, without folders."""
        path = self.folder / "calls"
        calls = path.read_text().splitlines() if path.exists() else []
        path.write_text("")
        words = [[os.path.basename(word) for word in call.split()] for call in calls]
        return [" ".join(each) for each in words if each[0] in names]


MIXED = RUN_FILE.replace('"large"', '"large"\ntrain = {gpus_per_drafter = 2}')


@pytest.mark.parametrize(
    ("text", "overrides", "fault"),
    [
        (MIXED, [], "differs between drafters"),
        (RUN_FILE, ["train.gpus_per_drafter=3", "slurm.train.nodes=2"], "cannot share"),
    ],
)
def test_one_array_has_one_shape(tmp_path, text, overrides, fault):
    (tmp_path / "run.toml").write_text(text)
    config = load_run_file(tmp_path / "run.toml", overrides=overrides)
    with pytest.raises(ValueError, match=fault):
        slurm.batch_run(config)


def test_one_node_takes_drafters_of_any_number_of_gpus(tmp_path):
    (tmp_path / "run.toml").write_text(MIXED)
    slurm.batch_run(load_run_file(tmp_path / "run.toml", overrides=["slurm.layout=one-node"]))


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A fake Slurm in front of the PATH."""
    fake = FakeSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{fake.folder}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo.toml").write_text(RUN_FILE)
    return fake


@pytest.fixture
def progress(monkeypatch):
    """Sets what is done; at first nothing is."""

    def set_progress(*, left=(0, 1, 2, 3), drafters_left=(0, 1), num_committed=0):
        found = Progress(
            num_units=10,
            num_committed=num_committed,
            tasks_left=left,
            steps=(0, 0),
            drafters_left=drafters_left,
        )
        monkeypatch.setattr(slurm, "read_progress", lambda config: found)

    set_progress()
    return set_progress


def call(*arguments, expect=0):
    result = CliRunner().invoke(main, ["slurm", *arguments], catch_exceptions=False)
    assert result.exit_code == expect, result.output
    return result.output


CHAIN = [
    "sbatch --parsable --array=0-3%2 extract.sbatch",
    "sbatch --parsable --array=0-1 --dependency=after:101_0 --kill-on-invalid-dep=yes train.sbatch",
    "sbatch --parsable --dependency=afterany:101:102 --kill-on-invalid-dep=yes finalize.sbatch",
]


def test_the_chain(fake, progress):
    output = call("demo.toml")
    assert fake.take_calls("sbatch") == CHAIN
    assert "extract: job 101 submitted" in output
    assert sorted(path.name for path in Path("runs/demo/slurm").iterdir()) == [
        *(".lock", "extract.sbatch", "finalize.sbatch", "logs", "run.toml", "train.sbatch")
    ]


def test_the_same_command_twice_submits_once(fake, progress):
    call("submit", "demo.toml")
    queue = fake.queue
    output = call("submit", "demo.toml")
    assert fake.queue == queue
    assert "extract: job 101 is alive, not submitted" in output


def test_a_submission_that_died_half_way_is_completed(fake, progress):
    call("demo.toml")
    fake.queue = [task for task in fake.queue if task[0] == "101"]
    fake.take_calls()
    call("demo.toml")
    finalize = CHAIN[2].replace("102", "104")
    assert fake.take_calls("sbatch") == [CHAIN[1], finalize]


def test_training_waits_for_no_extraction_that_has_begun(fake, progress):
    call("demo.toml")
    fake.queue = [[*task[:2], "RUNNING", task[3]] for task in fake.queue if task[0] == "101"]
    fake.take_calls()
    call("demo.toml")
    assert fake.take_calls("sbatch")[0] == "sbatch --parsable --array=0-1 train.sbatch"


def test_what_is_done_is_not_submitted(fake, progress):
    progress(left=(), drafters_left=(1,), num_committed=10)
    output = call("demo.toml")
    assert "extract: done, not submitted" in output
    assert fake.take_calls("sbatch")[0] == "sbatch --parsable --array=1 train.sbatch"


def test_nothing_left_submits_nothing_unless_asked_again(fake, progress):
    progress(left=(), drafters_left=(), num_committed=10)
    call("demo.toml")
    assert fake.take_calls("sbatch") == []
    call("demo.toml", "--again")
    assert [line.split()[2] for line in fake.take_calls("sbatch")[:2]] == [
        "--array=0-3%2",
        "--array=0-1",
    ]


def test_retry_submits_the_incomplete_tasks_that_are_not_alive(fake, progress):
    call("demo.toml")
    job_name = fake.queue[0][3]
    # Tasks 1 and 3 failed, 2 still runs, training still runs, finalize still waits.
    fake.queue = [
        ["101", 2, "RUNNING", job_name],
        *(task for task in fake.queue if task[0] in ("102", "103")),
    ]
    progress(left=(1, 2, 3), num_committed=4)
    fake.take_calls()
    call("retry", "demo.toml")
    assert fake.take_calls("sbatch", "scancel") == [
        "sbatch --parsable --array=1,3%2 extract.sbatch",
        "scancel 103",  # It waited for the first jobs only.
        "sbatch --parsable --dependency=afterany:101:102:104 --kill-on-invalid-dep=yes"
        " finalize.sbatch",
    ]


def test_live_jobs_keep_their_settings(fake, progress):
    call("demo.toml")
    before = Path("runs/demo/slurm/run.toml").read_bytes()
    output = call("demo.toml", "--set", "train.epochs=9", expect=2)
    assert "job 101, 102, 103 of this run is alive with other settings" in output
    assert Path("runs/demo/slurm/run.toml").read_bytes() == before
    call("cancel", "demo.toml")
    assert fake.queue == []
    call("demo.toml", "--set", "train.epochs=9")
    assert load_run_file(Path("runs/demo/slurm/run.toml")).train.epochs == 9


def test_settings_survive_writing_the_files_again(fake, progress):
    call("demo.toml", "--set", 'slurm.setup_lines=["module load cuda"]')
    files = {path.name: path.read_bytes() for path in Path("runs/demo/slurm").glob("*.*")}
    call("cancel", "demo.toml")
    # The recorded settings are a whole run file: they submit the same jobs under the same names.
    call("retry", "runs/demo/slurm/run.toml")
    assert {p.name: p.read_bytes() for p in Path("runs/demo/slurm").glob("*.*")} == files
    assert b"module load cuda" in files["train.sbatch"]
    assert b"--partition=gpu" in files["train.sbatch"]


def test_gpus_of_a_workstation_are_not_asked_for_in_an_allocation(fake, progress):
    call("demo.toml", "--set", "extract.gpus=[6]", "--set", "launch.gpus=[7]")
    config = load_run_file(Path("runs/demo/slurm/run.toml"))
    assert (config.extract.gpus, config.launch.gpus) == (None, None)


def test_dry_run_submits_nothing_and_prints_commands_for_a_shell(fake, progress):
    output = call("demo.toml", "--dry-run")
    assert fake.queue == []
    folder = Path("runs/demo/slurm").resolve()
    assert (
        "train=$(sbatch --parsable --array=0-1 --dependency=after:${extract}_0 "
        f"--kill-on-invalid-dep=yes {folder}/train.sbatch)" in output
    )


def test_without_slurm_only_a_dry_run_works(tmp_path, monkeypatch, progress):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    Path("demo.toml").write_text(RUN_FILE)
    call("demo.toml", "--dry-run")
    assert "squeue not found" in call("demo.toml", expect=2)


def test_a_refusal_of_slurm_is_one_line(fake, progress):
    (fake.folder / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: bad account' >&2; exit 1")
    assert "error: sbatch: sbatch: error: bad account" in call("demo.toml", expect=2)


def test_two_submissions_at_once_are_refused(fake, progress):
    with only_process_in(Path("runs/demo/slurm"), work="submission"):
        assert "another submission is running" in call("demo.toml", expect=2)


def test_a_signal_too_late_for_the_grace_time_is_refused(fake, progress):
    output = call(
        "demo.toml", "--set", "slurm.signal_s=100", "--set", "extract.stop_grace_s=60", expect=2
    )
    assert "slurm.signal_s 100: expected at least extract.stop_grace_s + 60 = 120" in output


def test_status_says_what_is_done_and_alive(fake, progress):
    call("demo.toml")
    progress(left=(3,), drafters_left=(1,), num_committed=7)
    output = call("status", "demo.toml")
    assert "extract: 7 of 10 units are committed" in output
    assert "train small: done" in output
    assert "job 101 (extract): 4 pending" in output


def test_finalize_prints_the_array_that_is_left(fake, progress):
    progress(left=(0, 1, 3), drafters_left=(1,), num_committed=7)
    output = call("finalize", "demo.toml", expect=75)
    assert "left of extract: sbatch --parsable --array=0-1,3 " in output
    assert "left of train: sbatch --parsable --array=1 " in output
    progress(left=(), drafters_left=(), num_committed=10)
    assert "all done" in call("finalize", "demo.toml")


def test_one_node_is_one_job(fake, progress):
    call("demo.toml", "--set", "slurm.layout=one-node")
    assert fake.take_calls("sbatch") == [
        "sbatch --parsable node.sbatch",
        "sbatch --parsable --dependency=afterany:101 --kill-on-invalid-dep=yes finalize.sbatch",
    ]


def test_two_runs_of_one_name_have_jobs_of_their_own(fake, progress):
    call("demo.toml")
    call("demo.toml", "--set", "run_dir=other/demo")
    assert len({task[3] for task in fake.queue}) == 6


def test_tasks_left_are_those_whose_share_is_incomplete():
    units = list(range(10))
    assert tasks_left(units, set(), num_workers=4) == [0, 1, 2, 3]
    assert tasks_left(units, set(units) - {1, 5, 7}, num_workers=4) == [1, 3]
    assert tasks_left(units, set(units), num_workers=4) == []


def test_progress_of_a_run_that_has_not_begun(fake):
    found = read_progress(load_run_file(Path("demo.toml")))
    assert (found.num_units, found.num_committed) == (None, 0)
    assert (found.tasks_left, found.drafters_left) == ((0, 1, 2, 3), (0, 1))


def test_progress_of_a_finished_run(tiny_run):
    found = read_progress(tiny_run)
    assert found.num_units == found.num_committed > 0
    assert (found.tasks_left, found.drafters_left, found.steps) == ((), (), (4,))
