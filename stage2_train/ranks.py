"""The processes that train one drafter together: who they are and what they tell each other.

A rank is found from the environment that torchrun (or our launcher) or srun gives. Numbers and
words go between the hosts over gloo, gradients between GPUs over NCCL.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

# Rank 0 may wait hours for a store; a rank that died is noticed by its closed connection.
TIMEOUT = timedelta(days=7)
# Ports of srun-launched groups: below Linux's ephemeral ones.
FIRST_PORT, NUM_PORTS = 20_000, 10_000


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """One process among those of its drafter."""

    rank: int = 0
    """This process, 0-based; the first one writes logs and checkpoints."""
    size: int = 1
    """Processes of the drafter."""
    local_rank: int = 0
    """This process among those on its machine."""

    @property
    def is_first(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Gives each value summed over the ranks, the same on all; waits for the slowest host."""
        if self.size == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        return [float(value) for value in sums]

    def from_first(self, value: T) -> T:
        """Gives what the first rank passed."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Gives what every rank passed, by rank; values must lie on the host."""
        if self.size == 1:
            return [value]
        gathered: list[T | None] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return [part for part in gathered if part is not None]

    def sum_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Sums tensors over the ranks, in place; the device, not the host, waits for it."""
        if self.size == 1:
            return
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()


ALONE = Ranks()


def find_ranks(environment: Mapping[str, str]) -> Ranks:
    """Reads this process's place from the variables of torchrun or srun; alone without them."""
    if int(environment.get("WORLD_SIZE", "1")) > 1:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    # Set by srun for the tasks of a step, not by sbatch for a batch script.
    elif int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    else:
        return ALONE
    rank, size, local_rank = (int(environment[name]) for name in names)
    return Ranks(rank=rank, size=size, local_rank=local_rank)


def meeting_point(environment: Mapping[str, str]) -> dict[str, str]:
    """Gives address and port where ranks find each other, where the environment lacks them."""
    if "MASTER_ADDR" in environment and "MASTER_PORT" in environment:
        return {}
    job, step = int(environment["SLURM_JOB_ID"]), int(environment["SLURM_STEP_ID"])
    return {
        "MASTER_ADDR": first_host(environment["SLURM_STEP_NODELIST"]),
        # Steps of one job, and neighbouring jobs, may share a node.
        "MASTER_PORT": str(FIRST_PORT + (job * 31 + step) % NUM_PORTS),
    }


def first_host(node_list: str) -> str:
    """Gives the first machine of Slurm's compressed list: `gpu[03-05,9],cpu1` is gpu03."""
    found = re.match(r"([^\[,]+)(?:\[([^\-,\]]+))?", node_list)
    if found is None:
        raise ValueError(f"SLURM_STEP_NODELIST = {node_list!r} names no machine")
    return found.group(1) + (found.group(2) or "")


def claim_gpu(ranks: Ranks) -> None:
    """Leaves this process one GPU in sight, so that compile caches fit all ranks.

    The device's index is part of their keys. Must run before CUDA is first used.
    """
    if ranks.size == 1:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
    if len(devices) > 1:
        if ranks.local_rank >= len(devices):
            raise ValueError(
                f"rank {ranks.rank} is number {ranks.local_rank} on its machine, which shows "
                f"{len(devices)} GPUs; start one process a GPU"
            )
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[ranks.local_rank]


@contextmanager
def joined_ranks(*, expected: int) -> Iterator[Ranks]:
    """Joins the other processes of this drafter for as long as the block runs.

    Args:
        expected: processes that the settings ask for.

    Raises:
        ValueError: so many were not started.
    """
    ranks = find_ranks(os.environ)
    if ranks.size != expected:
        raise ValueError(
            f"train.gpus_per_drafter is {expected}, but {ranks.size} processes were started for "
            "this drafter; start as many (torchrun --nproc-per-node, srun --ntasks), or set it so"
        )
    if ranks.size == 1:
        yield ranks
        return
    os.environ |= {"RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.size)}
    os.environ |= meeting_point(os.environ)
    claim_gpu(ranks)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method="env://", timeout=TIMEOUT)
    yield ranks
    # Not after an error: the others may be gone, and leaving together would wait for them.
    dist.destroy_process_group()
