"""Several processes train one drafter as one process does, and stop and resume together."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stage2_train.checkpoint import MODEL, OPTIMIZER, STATE, latest_checkpoint
from stage2_train.config import DrafterRun
from stage2_train.preparation import choose_batches_per_step
from stage2_train.ranks import ALONE, Ranks, find_ranks, first_host, joined_ranks, meeting_point
from stage2_train.train import EXIT_DONE, EXIT_STOPPED_EARLY, Training, train_drafter

# One rank of a training; it sends itself a signal before a given step.
RANK = """
import os, signal, sys
import stage2_train.train as page
from stage2_train.config import DrafterRun
run = DrafterRun.model_validate_json(sys.argv[1])
stop_rank, stop_step, number = map(int, sys.argv[2:5])
plain_step = page.Training.step
def step(self, batches, position, **arguments):
    if position.step == stop_step and self.ranks.rank == stop_rank:
        os.kill(os.getpid(), number)
    return plain_step(self, batches, position, **arguments)
page.Training.step = step
sys.exit(page.train_drafter(run))
"""
ROOT = Path(__file__).parents[2]
TWO = {"gpus_per_drafter": 2, "validation_sequences": 4}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def torchrun_environment(rank: int, *, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def srun_environment(rank: int, *, port: int) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "MASTER_PORT": str(port),
        "MASTER_ADDR": "127.0.0.1",
    }


def train_by_two(
    run: DrafterRun,
    *,
    environment=torchrun_environment,
    stop_rank: int = 0,
    stop_step: int = -1,
    number: int = signal.SIGTERM,
) -> list[int]:
    """Trains with two gloo processes; gives their exit codes."""
    port = free_port()
    script = [sys.executable, "-W", "ignore", "-c", RANK, run.model_dump_json()]
    processes = [
        subprocess.Popen(
            [*script, str(stop_rank), str(stop_step), str(int(number))],
            env=os.environ | {"PYTHONPATH": str(ROOT)} | environment(rank, port=port),
        )
        for rank in range(2)
    ]
    try:
        return [process.wait(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()


def final_tensors(run: DrafterRun) -> dict[str, torch.Tensor]:
    folder = latest_checkpoint(run.drafter_dir)
    assert folder is not None
    return load_file(folder / MODEL) | load_file(folder / OPTIMIZER)


def final_state(run: DrafterRun) -> dict:
    return json.loads((latest_checkpoint(run.drafter_dir) / STATE).read_text())


def records(run: DrafterRun) -> list[dict]:
    lines = (run.drafter_dir / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == "train"]


def losses(run: DrafterRun) -> list[float]:
    return [record["loss"] for record in records(run)]


def validations(run: DrafterRun) -> list[dict]:
    lines = (run.drafter_dir / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == "validation"]


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # By norm: where a gradient is nearly zero AdamW turns its rounding into a whole step.
        assert (found[name] - tensor).norm() <= 1e-3 * tensor.norm(), name


def test_two_ranks_train_as_one_process_with_the_same_batches(make_run):
    alone = make_run(name="alone", train={"batches_per_step": 2, "validation_sequences": 4})
    assert train_drafter(alone) == EXIT_DONE
    two = make_run(name="two", train=TWO)
    assert train_by_two(two) == [EXIT_DONE, EXIT_DONE]
    assert losses(two) == pytest.approx(losses(alone), rel=1e-4)
    for found, expected in zip(records(two), records(alone), strict=True):
        # Sums over the ranks' blocks, not means of their means.
        assert found["accuracy_by_offset"] == pytest.approx(expected["accuracy_by_offset"])
        assert found["num_tokens_seen"] == expected["num_tokens_seen"]
    assert_close(final_tensors(two), final_tensors(alone))
    position = final_state(alone)["position"]
    assert position == final_state(two)["position"]
    # An odd number of batches: the last step of an epoch has one, and it counts once.
    assert position["batch"] % 2 == 1
    found, expected = validations(two)[-1], validations(alone)[-1]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert found["num_walked"] == expected["num_walked"] == 4


def test_a_sharded_drafter_learns_the_same(make_run):
    alone = make_run(name="alone", train={"batches_per_step": 4, "validation_sequences": 4})
    assert train_drafter(alone) == EXIT_DONE
    sharded = make_run(name="sharded", train=TWO | {"batches_per_step": 4, "parallel": "fsdp"})
    assert train_by_two(sharded, environment=srun_environment) == [EXIT_DONE, EXIT_DONE]
    assert losses(sharded) == pytest.approx(losses(alone), rel=1e-4)
    assert_close(final_tensors(sharded), final_tensors(alone))
    assert validations(sharded)[-1]["loss"] == pytest.approx(validations(alone)[-1]["loss"], 1e-4)


def stopping_at(stop_step: int, plain_step: Callable[..., Any]) -> Callable[..., Any]:
    def step(self, batches, position, **arguments):
        if position.step == stop_step:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain_step(self, batches, position, **arguments)

    return step


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_signal_to_one_rank_stops_both_and_another_number_goes_on(
    make_run, monkeypatch, capsys, parallel
):
    settings = {"batches_per_step": 2}
    whole = make_run(name="whole", train=settings)
    assert train_drafter(whole) == EXIT_DONE
    by_two = make_run(train=settings | TWO | {"parallel": parallel})
    stopped = train_by_two(by_two, stop_rank=1, stop_step=2, number=signal.SIGUSR1)
    assert stopped == [EXIT_STOPPED_EARLY, EXIT_STOPPED_EARLY]
    assert final_state(by_two)["position"]["step"] == 3
    alone = make_run(train=settings)
    with monkeypatch.context() as patch:
        patch.setattr(Training, "step", stopping_at(4, Training.step))
        assert train_drafter(alone) == EXIT_STOPPED_EARLY
    said = capsys.readouterr().out
    assert "going on with 1 processes, before 2: the batches and their order stay the same" in said
    assert train_by_two(by_two) == [EXIT_DONE, EXIT_DONE]
    assert_close(final_tensors(by_two), final_tensors(whole))


def test_a_place_is_read_from_torchrun_or_srun():
    two = Ranks(rank=1, size=2, local_rank=1)
    assert find_ranks(torchrun_environment(1, port=5)) == two
    assert find_ranks(srun_environment(1, port=5)) == two
    assert find_ranks({}) == ALONE
    # A batch script, and a step of one task, are alone.
    assert find_ranks({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) == ALONE
    assert find_ranks({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == ALONE


def test_ranks_of_srun_meet_at_their_first_machine():
    nodes = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "gpu[03-05,9],a1"}
    assert meeting_point(nodes) == {"MASTER_ADDR": "gpu03", "MASTER_PORT": "20220"}
    assert meeting_point({"MASTER_ADDR": "here", "MASTER_PORT": "1"}) == {}
    for node_list, first in (("a1", "a1"), ("a[7]", "a7"), ("a1,b2", "a1"), ("c-[1,3]", "c-1")):
        assert first_host(node_list) == first
    with pytest.raises(ValueError, match="names no machine"):
        first_host("")


def test_another_number_of_processes_than_asked_for_is_refused():
    refused = pytest.raises(ValueError, match="gpus_per_drafter is 2, but 1 processes")
    with refused, joined_ranks(expected=2):
        pass


def test_batches_of_a_step_must_be_shared_out_evenly():
    two = Ranks(rank=0, size=2)
    assert choose_batches_per_step(None, two) == 2
    assert choose_batches_per_step(6, two) == 6
    with pytest.raises(ValueError, match="batches_per_step 3 is no multiple of the 2 processes"):
        choose_batches_per_step(3, two)
