"""Tensor parallel: one target spread over the processes of one worker, each with its own GPU.

The first process does all that a worker does; before it runs anything on the target it announces
the call, and the others, which hold the other parts of the weights, run the same call. They read
no data and write nothing. Weights are parted by transformers' own plan for the model.
"""

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int32
from numpy import ndarray
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, not in __all__
from torch.distributed.rendezvous import rendezvous

from stage1_extract.config import TargetConfig
from stage1_extract.signals import STOP_SIGNALS
from stage1_extract.target import load_target
from stage1_extract.target_transformers import TransformersTarget

_IDLE = timedelta(minutes=1)
_CONNECT = timedelta(minutes=30)
_AGREE = timedelta(seconds=20)


@dataclass(frozen=True)
class Group:
    """The place of this process among those of its worker."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Its place among those on this machine."""


def find_group(environment: Mapping[str, str], *, wanted_size: int) -> Group:
    """The place that torchrun's variables name.

    Args:
        environment: Of this process.
        wanted_size: `extract.gpus_per_worker`; with 1 the variables are somebody else's.

    Raises:
        ValueError: The group has another size than wanted.
    """
    if wanted_size == 1:
        return Group()
    size = int(environment.get("WORLD_SIZE", 1))
    if size != wanted_size:
        raise ValueError(
            f"extract.gpus_per_worker = {wanted_size}, but this worker was started as {size}"
            f" process{'es' * (size > 1)}; start it with `dflash-offline extract`, or with torchrun"
            f" --nproc-per-node {wanted_size}"
        )
    rank = int(environment["RANK"])
    return Group(rank, size, int(environment.get("LOCAL_RANK", rank)))


class Calls:
    """The calls that the first process announces to the others, in order, through a store."""

    def __init__(self, store: PrefixStore, group: Group):
        self.group = group
        self._store = store
        self._num_followers = group.size - 1
        self._number = 0

    def announce(self, call: object) -> None:
        """Tells all followers what comes next; None ends them."""
        self._number += 1
        # Bytes are as good as text to the store, whatever its annotations say.
        self._store.set(f"call {self._number}", pickle.dumps(call))  # type: ignore[arg-type]

    def next(self) -> Any:
        """Waits for the next call, however long."""
        self._number += 1
        key = f"call {self._number}"
        while True:
            try:
                self._store.wait([key], _IDLE)
            except dist.DistStoreError:
                continue
            call = pickle.loads(self._store.get(key))
            # The last to read it makes room.
            if self._store.add(f"read {self._number}", 1) == self._num_followers:
                self._store.delete_key(key)
                self._store.delete_key(f"read {self._number}")
            return call

    def note_failure(self) -> None:
        """Tells that the announced call failed in the first process, too."""
        self._store.set(f"failed {self._number}", "")

    def failed_everywhere(self) -> bool:
        """Whether the first process says that it failed likewise."""
        try:
            self._store.wait([f"failed {self._number}"], _AGREE)
        except dist.DistStoreError:
            return False
        return True

    def note_the_end(self) -> None:
        """Tells the first process, which keeps the store, that it is not needed any more."""
        self._store.add("ended", 1)

    def wait_for_the_end(self) -> None:
        """Waits until all followers have ended; one that died is the launcher's business."""
        deadline_s = time.monotonic() + _AGREE.total_seconds()
        while self._store.add("ended", 0) < self._num_followers:
            if time.monotonic() > deadline_s:
                return
            time.sleep(0.05)


@contextmanager
def calls_to_followers(group: Group) -> Iterator[Calls | None]:
    """In the first process of a group: its calls, and the followers' end when the block is left."""
    if group.size == 1:
        yield None
        return
    calls = _join(group)
    try:
        yield calls
    except BaseException:
        calls.announce(None)
        raise
    calls.announce(None)
    calls.wait_for_the_end()
    dist.destroy_process_group()


def follow(group: Group, config: TargetConfig, *, device: str) -> None:
    """What a process but the first does: loads its part and runs each announced call.

    Raises:
        Exception: A call failed here and not in the first process; the group must end.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # The first process decides, and ends the others.
    calls = _join(group)
    target: TransformersTarget | None = None
    while (call := calls.next()) is not None:
        try:
            if target is None:
                target = TransformersTarget.load(config, device=device, is_parted=True)
            else:
                function, batching, arguments = call
                target.batching = batching
                function(target, **arguments)
        except Exception:
            # A way of batching that does not suit the target fails everywhere, and another is
            # tried; what fails here alone would leave the others waiting for ever.
            if not calls.failed_everywhere():
                print(
                    f"process {group.rank} of this worker's {group.size} fails alone and ends it",
                    file=sys.stderr,
                    flush=True,
                )
                raise
    dist.destroy_process_group()
    calls.note_the_end()


def _join(group: Group) -> Calls:
    """Connects the group, for torch.distributed and for the calls."""
    if torch.cuda.device_count() == 1:
        # Each process sees its own GPU only, which is the first one there.
        os.environ["LOCAL_RANK"] = "0"
    try:
        store, rank, size = next(rendezvous("env://", timeout=_CONNECT))
    except (dist.DistError, KeyError, ValueError) as error:
        raise ValueError(
            f"extract.gpus_per_worker: the {group.size} processes of this worker cannot connect"
            f" ({error}); check MASTER_ADDR and MASTER_PORT"
        ) from error
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend, store=PrefixStore("tensors", store), rank=rank, world_size=size
    )
    return Calls(PrefixStore("calls", store), group)


def worker_device(worker_index: int, group: Group) -> str:
    """The device of this process: a GPU where there is any, which becomes the current one.

    Triton's kernels and CUDA graphs run on the current device, wherever their tensors are.
    """
    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        return "cpu"
    number = (worker_index if group.size == 1 else group.local_rank) % num_gpus
    torch.cuda.set_device(number)
    return f"cuda:{number}"


def load_workers_target(
    config: TargetConfig, calls: Calls | None, *, worker_index: int
) -> TransformersTarget:
    """The target on this worker's device, or spread over those of its processes.

    Raises:
        ValueError: The target cannot be loaded or has no plan for tensor parallelism.
    """
    if calls is not None:
        device = worker_device(worker_index, calls.group)
        return LeadingTarget.lead(config, calls, device=device)
    target: TransformersTarget = load_target(config, device=worker_device(worker_index, Group()))
    return target


class LeadingTarget(TransformersTarget):
    """The target as the first process of a group holds it: what it runs, the others run, too."""

    calls: Calls

    @classmethod
    def lead(cls, config: TargetConfig, calls: Calls, *, device: str) -> "LeadingTarget":
        """Loads the target's parts in all processes of the group.

        Raises:
            ValueError: The target cannot be loaded or has no plan for tensor parallelism.
        """
        calls.announce("load")
        try:
            target = cls.load(config, device=device, is_parted=True)
        except Exception:
            calls.note_failure()
            raise
        assert isinstance(target, cls)
        target.calls = calls
        return target

    def together(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Runs a function of the target in all processes of the group; gives the first's result."""
        self.calls.announce((function, self.batching, arguments))
        try:
            return function(self, **arguments)
        except Exception:
            self.calls.note_failure()
            raise

    def hidden_states(
        self, token_ids: Sequence[Int32[ndarray, "_"]], *, layers: Sequence[str]
    ) -> dict[str, Float[Tensor, "tokens hidden"]]:
        """As `TransformersTarget.hidden_states`, by all processes."""
        function = TransformersTarget.hidden_states
        states: dict[str, Tensor] = self.together(function, token_ids=token_ids, layers=layers)
        return states

    def plain_hidden_states(
        self, token_ids: Int32[ndarray, "tokens"], *, layers: Sequence[str]
    ) -> dict[str, Float[Tensor, "tokens hidden"]]:
        """As `TransformersTarget.plain_hidden_states`, by all processes."""
        function = TransformersTarget.plain_hidden_states
        states: dict[str, Tensor] = self.together(function, token_ids=token_ids, layers=layers)
        return states
