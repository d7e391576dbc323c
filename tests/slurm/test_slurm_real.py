"""Whole runs as jobs of a real Slurm on this machine: signalled, preempted, cancelled, killed."""

import os
import re
import runpy
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tomli_w

from storage.errors import StoreNotFoundError
from storage.reader import open_store
from storage.writer import open_for_writing

HERE = Path(__file__).parent
TINY_RUN = runpy.run_path(str(HERE.parent / "tiny_run.py"))
PORT_BASE = "17300"
LIMIT_S = 240.0
"""Longest wait for anything; several times what an idle machine needs."""

# One after another (`--dist loadfile`): they share a cluster.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a client of a throw-away Slurm."""
    missing = [name for name in ("slurmctld", "slurmd", "munge") if not shutil.which(name)]
    if missing:
        pytest.skip(f"no {', '.join(missing)}: apt-get install slurm-wlm munge")
    if os.geteuid() != 0:
        pytest.skip("a Slurm of one's own needs root, for device nodes and job users")
    sandbox = tmp_path_factory.mktemp("slurm")
    try:
        os.mknod(sandbox / "device", stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("no device nodes may be made here, which stand for GPUs")
    environment = {
        **os.environ,
        "SLURM_SANDBOX": str(sandbox),
        "PORT_BASE": PORT_BASE,
        "NODES": "2",
        "SLURM_CONF": str(sandbox / "etc" / "slurm.conf"),
        "OMP_NUM_THREADS": "1",
    }
    start = [str(HERE / "start_slurm.sh"), "start"]
    stop = [str(HERE / "start_slurm.sh"), "stop"]
    try:
        started = subprocess.run(start, env=environment, capture_output=True, text=True)
        assert started.returncode == 0, started.stdout + started.stderr
        yield environment
    finally:
        subprocess.run(stop, env=environment, check=True)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer target, and conversations for four units of its states."""
    return TINY_RUN["make_inputs"](tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def plain_digest(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Content of the store that a plain `extract` makes."""
    run = Run(tmp_path_factory.mktemp("plain"), inputs, environment=dict(os.environ))
    run.dflash("extract")
    return run.digest()


class Run:
    """A run file, its commands, and what became of its jobs."""

    def __init__(
        self,
        folder: Path,
        inputs: Path,
        *,
        environment: dict[str, str],
        num_drafters: int = 1,
        ranks: int = 1,
        parallel: str = "ddp",
        store_dir: str | None = None,
        **slurm: object,
    ):
        self.folder = folder
        self.store_dir = store_dir or str(folder / "run" / "store")
        self.environment = {**environment, "NAPS": str(folder)}
        self.nap(extract=0.0, train=0.0)
        self.waiting_since_s: dict[str, float] = {}
        cheap = {"cpus": 2, "time": "10"}
        tables = TINY_RUN["run_tables"](folder / "run", inputs, num_drafters=num_drafters)
        tables["store"]["dir"] = self.store_dir
        tables["train"] |= {"gpus_per_drafter": ranks, "parallel": parallel}
        tables["slurm"] = {
            "command": [sys.executable, str(TINY_RUN["SLOW_CLI"])],
            "local_dir": str(folder),
            "extract": {"tasks": 2, **cheap},
            "train": cheap,
            "node": {"time": "10"},
        }
        for key, value in slurm.items():
            table = tables["slurm"]
            table[key] = {**table[key], **value} if isinstance(value, dict) else value
        self.path = folder / "run.toml"
        self.path.write_text(tomli_w.dumps(tables))

    def dflash(self, *arguments: str, expect: int = 0) -> str:
        """Runs `dflash-offline ARGUMENTS RUN.toml` and gives what it printed."""
        command = [sys.executable, "-m", "dflash_offline.cli", *arguments, str(self.path)]
        result = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        assert result.returncode == expect, result.stdout + result.stderr
        return result.stdout

    def slurm(self, command: str, *arguments: str) -> str:
        """Runs one of Slurm's commands."""
        call = [command, *arguments]
        return subprocess.run(
            call, env=self.environment, check=True, capture_output=True, text=True
        ).stdout

    def nap(self, **seconds: float) -> None:
        """Sets how long each batch or step of a stage takes from now on."""
        for stage, value in seconds.items():
            scratch = self.folder / f"{stage}.new"
            scratch.write_text(str(value))
            scratch.rename(self.folder / stage)

    def log(self, name: str) -> str:
        """A job's output so far."""
        path = self.folder / "run" / "slurm" / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def digest(self) -> str:
        return open_store(self.store_dir).content_digest()

    def weights(self) -> bytes:
        """The last checkpoint of the first drafter."""
        checkpoint = self.folder / "run" / "drafters" / "one" / "checkpoints" / "step-00000020"
        return (checkpoint / "model.safetensors").read_bytes()

    def num_committed(self) -> int:
        try:
            return len(open_for_writing(self.store_dir).committed())
        except StoreNotFoundError:
            return 0

    def queue(self) -> list[list[str]]:
        """Live tasks of all jobs: id, state, reason."""
        lines = self.slurm("squeue", "--array", "--noheader", "--format=%i|%T|%r").splitlines()
        return [line.split("|") for line in lines]

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        end_s = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end_s, f"{what}; queue {self.queue()}\n{self.all_logs()}"
            self.hurry()
            time.sleep(0.5)

    def hurry(self) -> None:
        """Starts jobs that were queued again, which would sit out two minutes.

        Not at once: a start in the second of the requeue fails, its credential being revoked.
        """
        waiting = {job_id for job_id, state, reason in self.queue() if reason == "BeginTime"}
        self.waiting_since_s = {
            job_id: self.waiting_since_s.get(job_id, time.monotonic()) for job_id in waiting
        }
        for job_id, since_s in self.waiting_since_s.items():
            if time.monotonic() > since_s + 3:
                arguments = ["scontrol", "update", f"jobid={job_id}", "StartTime=now"]
                subprocess.run(arguments, env=self.environment, capture_output=True)

    def wait_for_end(self) -> None:
        self.wait_for(lambda: not self.queue(), "jobs have not ended")

    def all_logs(self) -> str:
        logs = sorted((self.folder / "run" / "slurm" / "logs").glob("*.log"))
        return "".join(f"== {path.name}\n{path.read_text()}" for path in logs)

    def state_of(self, job_id: str) -> str:
        found = re.search(r"JobState=(\w+)", self.slurm("scontrol", "show", "job", job_id))
        assert found is not None
        return found[1]

    def assert_whole(self, digest: str) -> None:
        """Everything is done, and the store is what a plain extraction makes."""
        assert "all done" in self.dflash("slurm", "finalize"), self.all_logs()
        assert self.digest() == digest


@pytest.fixture
def make_run(cluster: dict[str, str], inputs: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Makes a run in a cluster that is empty before and after."""
    runs = []

    def make(**slurm: object) -> Run:
        runs.append(Run(tmp_path, inputs, environment=cluster, **slurm))
        return runs[-1]

    yield make
    for run in runs:
        run.slurm("scancel", "--user=root")
        run.nap(extract=0.0, train=0.0)
        run.wait_for(lambda run=run: not run.queue(), "cancelled jobs have not ended")


def test_the_chain_submitted_twice_runs_once(make_run, plain_digest):
    run = make_run(num_drafters=2)
    first, second = run.dflash("slurm"), run.dflash("slurm")
    assert len(re.findall(r"job \d+ submitted", first)) == 3
    assert "submitted:" not in second
    assert "is alive, not submitted" in second
    run.wait_for_end()
    run.assert_whole(plain_digest)
    # No task was started twice, and finalize came last.
    for name in ("extract-0", "extract-1", "train-0", "train-1"):
        assert run.log(name).count("restart 0") == 1, name
    assert "all done" in run.log("finalize")
    assert "submitted:" not in run.dflash("slurm", "retry")


def test_the_time_limit_stops_and_queues_again(make_run, plain_digest):
    # The signal comes 70 s or more before the end of two minutes, while everything is slow.
    limit = {"time": "2"}
    run = make_run(signal_s=70, extract={**limit, "tasks": 1}, train=limit)
    run.nap(extract=3.0, train=4.0)
    run.dflash("slurm")
    run.wait_for(lambda: "stopping soon" in run.log("extract-0"), "no worker was told to stop")
    run.nap(extract=0.0)
    run.wait_for(lambda: "stopped after step" in run.log("train-0"), "no drafter stopped")
    run.nap(train=0.0)
    run.wait_for_end()
    run.assert_whole(plain_digest)
    assert "restart 1" in run.log("extract-0")
    assert "restart 1" in run.log("train-0")
    assert "resuming" in run.log("train-0")


def test_preempted_jobs_go_on(make_run, plain_digest):
    run = make_run(partition="scav", extract={"tasks": 1})
    run.nap(extract=1.0, train=1.5)
    run.dflash("slurm")
    run.wait_for(lambda: "from step 0" in run.log("train-0"), "training has not begun")
    arguments = ["--partition=gpu", "--nodes=2", "--exclusive", "--wrap=true"]
    run.slurm("sbatch", *arguments, "--output=/dev/null")
    run.wait_for(lambda: "stopped after step" in run.log("train-0"), "not preempted")
    run.nap(extract=0.0, train=0.0)
    run.wait_for_end()
    run.assert_whole(plain_digest)
    assert "restart 1" in run.log("extract-0")
    assert "restart 1" in run.log("train-0")
    assert "resuming" in run.log("train-0")


def test_cancelled_stays_cancelled_and_retry_goes_on(make_run, plain_digest):
    run = make_run(extract={"tasks": 1})
    run.nap(extract=1.0, train=1.0)
    submitted = run.dflash("slurm")
    run.wait_for(lambda: run.num_committed() > 0, "nothing was committed")
    assert "units are committed" in run.dflash("slurm", "status")
    run.dflash("slurm", "cancel")
    run.wait_for(lambda: not run.queue(), "cancelled jobs have not ended")
    job_ids = re.findall(r"job (\d+) submitted", submitted)
    assert run.state_of(f"{job_ids[0]}_0") == "CANCELLED"
    assert run.state_of(f"{job_ids[1]}_0") == "CANCELLED"
    num_committed = run.num_committed()
    run.dflash("slurm", "finalize", expect=75)
    run.nap(extract=0.0, train=0.0)
    run.dflash("slurm", "retry")
    run.wait_for_end()
    assert num_committed <= run.num_committed()
    run.assert_whole(plain_digest)
    assert "restart 1" not in run.all_logs()


def test_a_killed_task_is_what_retry_submits(make_run, plain_digest):
    # One at a time and the other held, so that no living task takes over the killed one's units.
    run = make_run(extract={"tasks": 2, "tasks_at_once": 1})
    run.nap(extract=1.0)
    job_id = re.search(r"extract: job (\d+)", run.dflash("slurm"))[1]
    run.slurm("scontrol", "hold", f"{job_id}_1")
    run.wait_for(lambda: run.num_committed() == 1, "nothing was committed")
    _kill_worker(run.folder)
    run.wait_for(lambda: run.state_of(f"{job_id}_0") == "FAILED", "the task has not failed")
    run.dflash("slurm", "cancel")
    run.wait_for(lambda: not run.queue(), "cancelled jobs have not ended")
    report = run.dflash("slurm", "finalize", expect=75)
    left = re.search(r"left of extract: sbatch --parsable --array=(\S+)", report)
    assert left is not None, report
    run.nap(extract=0.0)
    assert f"--array={left[1]}%1 " in run.dflash("slurm", "retry")
    run.wait_for_end()
    run.assert_whole(plain_digest)


def test_one_node_runs_both_stages_on_disjoint_gpus(make_run, plain_digest):
    run = make_run(layout="one-node", signal_s=90)
    run.dflash("slurm")
    run.wait_for_end()
    run.assert_whole(plain_digest)
    gpus = {
        stage: set(re.search(r"GPUs of \w+: ([\d,]+)", run.log(stage))[1].split(","))
        for stage in ("extract", "train")
    }
    assert (len(gpus["extract"]), len(gpus["train"])) == (5, 3)
    assert not gpus["extract"] & gpus["train"]


def test_the_chain_fills_a_bucket(make_run, plain_digest, s3_server):
    run = make_run(store_dir=s3_server.make_bucket())
    run.environment |= s3_server.environment  # Jobs inherit that of the shell that submits.
    run.nap(extract=0.5)
    run.dflash("slurm")
    run.wait_for(lambda: run.num_committed() > 0, "nothing was committed")
    _kill_worker(run.folder)
    run.nap(extract=0.0)
    run.wait_for_end()
    # Both workers may be gone; what is left is what retry does.
    if "all done" not in run.log("finalize"):
        run.dflash("slurm", "retry")
        run.wait_for_end()
    run.assert_whole(plain_digest)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_drafter_on_two_nodes_is_signalled_and_resumed(
    make_run, inputs, tmp_path_factory, parallel
):
    # Nodes on one machine: their names are no addresses.
    meet = "export MASTER_ADDR=127.0.0.1 MASTER_PORT=17390"
    run = make_run(ranks=2, parallel=parallel, train={"nodes": 2, "cpus": 1}, setup_lines=[meet])
    run.nap(train=1.0)
    run.dflash("extract")
    job_id = re.search(r"train: job (\d+)", run.dflash("slurm"))[1]
    run.wait_for(lambda: "step 1/" in run.log("train-0"), "training has not begun")
    nodes = run.slurm("scontrol", "show", "job", f"{job_id}_0")
    assert "NodeList=n[0-1]" in nodes
    run.slurm("scancel", "--signal=USR1", "--batch", f"{job_id}_0")
    run.wait_for(lambda: "stopped after step" in run.log("train-0"), "the ranks did not stop")
    run.nap(train=0.0)
    run.wait_for_end()
    assert "restart 1" in run.log("train-0")
    assert "resuming" in run.log("train-0")
    assert "all done" in run.dflash("slurm", "finalize")

    plain = Run(
        tmp_path_factory.mktemp("two-ranks"),
        inputs,
        environment=dict(os.environ),
        ranks=2,
        parallel=parallel,
    )
    plain.dflash("extract")
    plain.dflash("train")
    assert run.weights() == plain.weights()


def _kill_worker(folder: Path) -> None:
    """SIGKILLs the extraction worker of a run, as running out of memory does."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        is_ours = any(word.startswith(bytes(folder)) for word in words)
        if is_ours and b"extract" in words and b"python" in words[0]:
            os.kill(int(process.name), signal.SIGKILL)
