"""Start the ranks of one drafter or worker on its GPUs: one process each, as torchrun would.

The ranks get torchrun's variables, so they cannot tell the difference. It is not used itself
because it turns exit code 75 into 1, ignores SIGUSR1 and kills ranks that take 30 s to checkpoint.
"""

import socket
from collections.abc import Sequence
from pathlib import Path

from dflash_offline.launch import Job, Slot, count_gpus, run_jobs, visible_device


def run_ranks(
    arguments: Sequence[str],
    *,
    num_ranks: int,
    log_dir: Path,
    setting: str = "train.gpus_per_drafter",
) -> int:
    """Runs one command on every rank until all have ended; gives their common exit code.

    Signals reach every rank. When one fails the others are killed: they wait for it in vain, and
    the last checkpoint stands. What rank 0 prints is shown as it is, the others with their name.

    Args:
        arguments: of `dflash-offline`, the same for every rank.
        num_ranks: how many to start.
        log_dir: where each keeps its output.
        setting: which one named their number, for messages.

    Raises:
        ValueError: this process sees too few GPUs.
    """
    places = rank_places(num_ranks, available_gpus=count_gpus(), port=_free_port(), setting=setting)
    jobs = [
        Job(name=f"rank {rank}", arguments=arguments, log_path=log_dir / f"rank-{rank:05d}.log")
        for rank in range(num_ranks)
    ]
    exit_codes = run_jobs(jobs, places=places, show_line=_show, together=True)
    return max(exit_codes.values(), key=lambda code: (code not in (0, 75), code))


def rank_places(
    num_ranks: int, *, available_gpus: int, port: int, setting: str = "train.gpus_per_drafter"
) -> list[Slot]:
    """The place of each rank: its GPU, and the variables by which ranks find each other."""
    if 0 < available_gpus < num_ranks:
        raise ValueError(f"{setting} = {num_ranks}, but this process sees {available_gpus} GPUs")
    return [
        Slot(
            environment={
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            | ({"CUDA_VISIBLE_DEVICES": visible_device(rank)} if available_gpus else {})
        )
        for rank in range(num_ranks)
    ]


def _show(name: str, line: str) -> None:
    print(line if name == "rank 0" else f"{name} | {line}", flush=True)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
