"""The pipeline of a GPU worker: encode, copy and write beside the next forward passes.

    reading thread  conversations of the next unit to tokens
    main thread     forward | encode | forward | encode | forward ...     (only handed over)
    copy stream               copy to pinned memory | copy ...
    writer threads                          append | append | seal (flush to disk) ...

A ring of pinned buffers bounds the memory: a batch takes a buffer before it is encoded and gives
it back when it is written. Several shards are open at once, so that one is filled while others
are flushed to disk. Nothing here waits for the GPU but the writer threads.
"""

import queue
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from stage1_extract.encode import EncodedBatch
from stage1_extract.open_shard import OpenShard
from stage1_extract.problems import UnusableConversationError
from stage1_extract.sequences import TokenSequence
from stage1_extract.worker_metrics import Part, WorkerMetrics

States = Mapping[str, Float[Tensor, "tokens _"]]


@runtime_checkable
class ShardInProgress(Protocol):
    """What a worker does with a unit: `OpenShard` at once, `PipelinedShard` in the background."""

    def forward_pass(self) -> AbstractContextManager[None]:
        """Around the forward pass of the batch that is added next."""

    def add(self, sequences: Sequence[TokenSequence], states: States) -> None:
        """Takes a batch's states."""

    def skip(self, unusable: Mapping[str, UnusableConversationError]) -> None:
        """Records sequences that hold no states."""

    def finish(self) -> None:
        """Seals the shard."""


@runtime_checkable
class Arrival(Protocol):
    """The encoded form of one batch on its way to the host."""

    def wait(self) -> EncodedBatch:
        """The batch, once it has arrived; valid until `release`."""

    def sample(self) -> States | None:
        """Some of its states as they were, on the host; asked after `wait`."""

    def seconds(self) -> Mapping[Part, float]:
        """Where the device's time went; asked after `wait`."""

    def release(self) -> None:
        """Gives its memory back."""


@runtime_checkable
class Transfer(Protocol):
    """Encodes batches on a device and brings them to the host: `CudaTransfer`."""

    def begin(self) -> None:
        """Notes that a forward pass is handed over next."""

    def start(self, states: States, *, with_sample: bool) -> Arrival:
        """Hands encoding and copy over; waits only where all buffers are in use."""


@dataclass(frozen=True)
class _Batch:
    sequences: Sequence[TokenSequence]
    arrival: Arrival


_FINISH, _DROP = "finish", "drop"
# Python's own 5 ms would let a writer thread keep the main one from feeding the GPU for so long:
# a small target's whole forward pass takes 20.
_SWITCH_INTERVAL_S = 0.0005
_Step = _Batch | Mapping[str, UnusableConversationError] | str


class Pipeline:
    """Writes shards in threads of its own; the first error there stops the worker."""

    def __init__(self, transfer: Transfer, metrics: WorkerMetrics, *, num_threads: int):
        self._transfer = transfer
        self._metrics = metrics
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="write")
        self._shards: list[PipelinedShard] = []

    def open(self, shard: OpenShard) -> "PipelinedShard":
        """Starts a shard; shards are written in the order in which they were opened."""
        self.check()
        # One that has failed since stays, for the next check to find.
        self._shards = [each for each in self._shards if not each.is_sealed_or_dropped()]
        opened = PipelinedShard(shard, self._transfer, self._metrics, self._threads, self.check)
        self._shards.append(opened)
        return opened

    def check(self) -> None:
        """Raises the first error of a writer thread."""
        for shard in self._shards:
            if shard.error is not None:
                raise shard.error

    def drain(self) -> None:
        """Waits until every shard is sealed or dropped; raises the first error."""
        for shard in self._shards:
            shard.result()
        self._shards = []

    def __enter__(self) -> "Pipeline":
        self._switch_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Drops what was not finished, and ends the threads."""
        for shard in self._shards:
            shard.abandon()
        self._threads.shutdown()
        sys.setswitchinterval(self._switch_interval_s)


class PipelinedShard:
    """A shard whose batches are taken now and written later; leaving it unfinished drops it."""

    def __init__(
        self,
        shard: OpenShard,
        transfer: Transfer,
        metrics: WorkerMetrics,
        threads: ThreadPoolExecutor,
        check: Callable[[], None],
    ):
        self._shard = shard
        self._transfer = transfer
        self._metrics = metrics
        self._check = check
        self._steps: queue.SimpleQueue[_Step] = queue.SimpleQueue()
        self._is_closed = False
        self._has_batches = False
        self.error: BaseException | None = None
        """What went wrong in the writer thread."""
        self._future: Future[None] = threads.submit(self._write)

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Around the forward pass of the batch that is added next."""
        self._check()
        self._transfer.begin()
        yield

    def add(self, sequences: Sequence[TokenSequence], states: States) -> None:
        """Hands a batch over to be encoded, copied and written."""
        # What encoding loses is measured on the shard's first batch.
        arrival = self._transfer.start(states, with_sample=not self._has_batches)
        self._has_batches = True
        self._steps.put(_Batch(sequences, arrival))
        self._check()

    def skip(self, unusable: Mapping[str, UnusableConversationError]) -> None:
        """Records sequences that hold no states."""
        self._steps.put(unusable)

    def finish(self) -> None:
        """Lets the shard be sealed when all its batches are written."""
        self._close(_FINISH)

    def abandon(self) -> None:
        """Lets the shard be dropped, unless `finish` was called."""
        self._close(_DROP)

    def _close(self, step: str) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._steps.put(step)

    def is_sealed_or_dropped(self) -> bool:
        """Whether nothing is left to do for it and nothing went wrong."""
        return self._future.done() and self.error is None

    def result(self) -> None:
        """Waits until it is sealed or dropped; raises its error."""
        self._future.result()

    def _write(self) -> None:
        """What a writer thread does, step by step."""
        step: _Step = ""
        try:
            with self._shard as shard:
                while step not in (_FINISH, _DROP):
                    step = self._steps.get()
                    if isinstance(step, _Batch):
                        self._append(shard, step)
                    elif isinstance(step, Mapping):
                        shard.skip(step)
                if step == _FINISH:
                    shard.finish()
        except BaseException as error:
            self.error = error
            raise
        finally:
            # After an error the main thread must still get its buffers back, to hear of it.
            while step not in (_FINISH, _DROP):
                step = self._steps.get()
                if isinstance(step, _Batch):
                    with suppress(Exception):  # The first error is the one to be heard.
                        step.arrival.wait()
                    step.arrival.release()

    def _append(self, shard: OpenShard, batch: _Batch) -> None:
        try:
            encoded = batch.arrival.wait()
            self._metrics.add_seconds(batch.arrival.seconds())
            shard.append(batch.sequences, encoded, sample=batch.arrival.sample())
        finally:
            batch.arrival.release()

    def __enter__(self) -> "PipelinedShard":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abandon()
