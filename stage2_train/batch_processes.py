"""Makes batches in processes of their own, so that reading and packing do not hold the trainer up.

Threads of one process take turns at running Python. Where sequences are short a batch costs tens of
milliseconds of it, and a trainer that launches hundreds of kernels a step waits for its turn at
each. Here other processes read and pack; a batch comes over in shared memory. What is made, and in
which order, is the same.
"""

import pickle
import signal
import threading
import traceback
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from io import BytesIO
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from stage2_train.batches import Window
from stage2_train.collate import EncodedLayer, PackedBatch
from storage.encodings import encoded_bytes_per_token
from storage.errors import DamagedShardError
from storage.reader import Store
from storage.schema import LayerRecord

if TYPE_CHECKING:
    from stage2_train.data import BatchMaker

# Batches that one process may have made and that have not been taken yet.
NUM_SLOTS = 3
# Arrays in a slot start at multiples of this.
_ALIGNMENT = 64
_STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """What a process is asked for; the windows of its batches follow, and None."""

    snapshot_id: str
    epoch: int


@dataclass(frozen=True, kw_only=True)
class Made:
    """A batch in a slot: its pickle without the arrays, and their sizes in bytes."""

    head: bytes
    sizes: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Failed:
    """What went wrong, in the place of what it kept from being made."""

    error: Exception


class BatchProcesses:
    """Processes that make the batches of an epoch by turns; started when first needed.

    Signals that stop a training do not reach them: they end with it, however it ends.
    """

    def __init__(
        self, open_store: Callable[[], Store], *, num_processes: int, slot_bytes: int
    ) -> None:
        """Says how; starts nothing.

        Args:
            open_store: opens the store; can be pickled.
            num_processes: processes.
            slot_bytes: what the largest batch takes (see `bytes_of_batch`).
        """
        self._open_store = open_store
        self._num_processes = num_processes
        self._slot_bytes = slot_bytes
        self._running: list[_Process] = []

    def batches(
        self,
        maker: "BatchMaker",
        snapshot_id: str,
        planned: Iterable[Sequence[Window]],
        *,
        epoch: int,
    ) -> Generator[PackedBatch, None, None]:
        """Yields the planned batches in order, on the host, pinned for a GPU.

        One epoch at a time. Left before its end, the processes end, too.

        Raises:
            Exception: what planning raised, or a process while it made the batch whose turn it is.
        """
        if not self._running:
            self._running = [
                _Process.start(maker, self._open_store, slot_bytes=self._slot_bytes)
                for _ in range(self._num_processes)
            ]
        running, on_damage = self._running, maker.on_damage or _raise
        pin_memory = maker.device.type == "cuda"
        feeder = threading.Thread(
            target=_feed,
            args=(running, Epoch(snapshot_id=snapshot_id, epoch=epoch), planned),
            name="batch-windows",
            daemon=True,
        )
        feeder.start()
        is_whole, turn = False, 0
        try:
            while True:
                process = running[turn % len(running)]
                batch = process.take(pin_memory=pin_memory, on_damage=on_damage)
                if batch is None:
                    break
                yield batch
                turn += 1
            # Who comes next in turn has come to its end, too.
            for other in range(turn + 1, turn + len(running)):
                assert running[other % len(running)].take(on_damage=on_damage) is None
            is_whole = True
        finally:
            if not is_whole:
                self.close()
            feeder.join()

    def close(self) -> None:
        """Ends the processes; the next epoch starts others."""
        for process in self._running:
            process.end()
        self._running = []


@dataclass(kw_only=True)
class _Process:
    """One process: what it is told, what it says, and the memory that it writes to."""

    windows: Connection
    freed: Connection
    made: Connection
    memory: np.ndarray
    process_id: int
    end: Callable[[], None]
    num_taken: int = 0

    @classmethod
    def start(
        cls, maker: "BatchMaker", open_store: Callable[[], Store], *, slot_bytes: int
    ) -> "_Process":
        """Starts a process that waits for an epoch."""
        context = get_context("spawn")
        memory = context.RawArray("b", NUM_SLOTS * slot_bytes)
        (windows_out, windows), (freed_out, freed) = (context.Pipe(duplex=False) for _ in range(2))
        made, made_in = context.Pipe(duplex=False)
        theirs = (windows_out, freed_out, made_in)
        process = context.Process(
            target=_serve,
            args=(maker.for_host(), maker.on_damage is not None, open_store, memory, *theirs),
            name="batches",
            daemon=True,
        )
        with _signals_blocked():
            process.start()
        for connection in theirs:
            connection.close()
        for slot in range(NUM_SLOTS):
            freed.send(slot)
        started = cls(
            windows=windows,
            freed=freed,
            made=made,
            memory=np.frombuffer(memory, np.uint8).reshape(NUM_SLOTS, slot_bytes),
            process_id=process.pid or 0,
            end=_ignore,
        )
        # Also called when the interpreter ends, which would wait for the process otherwise.
        started.end = weakref.finalize(started, _end, process, (windows, freed, made))
        return started

    def take(
        self, *, on_damage: Callable[[DamagedShardError], None], pin_memory: bool = False
    ) -> PackedBatch | None:
        """Gives the next batch, copied out of its slot; None behind the last one of the epoch."""
        while True:
            try:
                message = self.made.recv()
            except (EOFError, OSError) as error:
                raise RuntimeError(
                    "a process that makes batches has died: it was killed, or had no memory left"
                ) from error
            if isinstance(message, DamagedShardError):
                on_damage(message)
            elif isinstance(message, Failed):
                raise message.error
            else:
                break
        if message is None:
            return None
        slot = self.num_taken % NUM_SLOTS
        batch = copied(read_slot(message, self.memory[slot]), pin_memory=pin_memory)
        self.num_taken += 1
        self.freed.send(slot)
        return batch


def _feed(running: Sequence[_Process], epoch: Epoch, planned: Iterable[Sequence[Window]]) -> None:
    """Tells each process its windows; waits while they have enough, ends when they do."""
    with suppress(OSError):  # A process that has ended is told nothing more.
        for process in running:
            process.windows.send(epoch)
        for number, of_batch in enumerate(_as_told(planned)):
            running[number % len(running)].windows.send(of_batch)
        for process in running:
            process.windows.send(None)


def _as_told(planned: Iterable[Sequence[Window]]) -> Iterator[list[Window] | Failed]:
    """Gives each batch's windows; an error of planning is told to whose turn it is."""
    try:
        for of_batch in planned:
            yield list(of_batch)
    except Exception as error:
        yield Failed(error=picklable(error))


def _as_planned(windows: Connection) -> Iterator[list[Window]]:
    """Gives the windows of each batch of an epoch that a process is told."""
    while (message := windows.recv()) is not None:
        if isinstance(message, Failed):
            raise message.error
        yield message


def _serve(
    maker: "BatchMaker",
    is_skipping: bool,
    open_store: Callable[[], Store],
    memory: Any,
    windows: Connection,
    freed: Connection,
    made: Connection,
) -> None:
    """Makes the batches of one epoch after the other, until the trainer is gone."""
    torch.set_num_threads(1)
    slots = np.frombuffer(memory, np.uint8).reshape(NUM_SLOTS, -1)
    if is_skipping:
        maker = replace(maker, on_damage=made.send)
    store: Store | None = None
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            wanted = windows.recv()
            try:
                store = store or open_store()
                snapshot = store.snapshot(wanted.snapshot_id)
                for batch in maker.on_host(snapshot, _as_planned(windows), epoch=wanted.epoch):
                    made.send(write_slot(batch, slots[freed.recv()]))
                made.send(None)
            except Exception as error:
                # Of a trainer that is gone, too: telling it fails, and ends this process.
                made.send(Failed(error=picklable(error)))
                return


# --- slots --------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Pickles tensors as numpy arrays, whose bytes can stay outside the pickle."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, Tensor):
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def write_slot(batch: PackedBatch, slot: np.ndarray) -> Made:
    """Writes the arrays of a batch end to end into a slot and gives what is left of it."""
    head, buffers = BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(head, protocol=5, buffer_callback=buffers.append).dump(batch)
    sizes = [buffer.raw().nbytes for buffer in buffers]
    for part, buffer in zip(_parts(sizes, slot), buffers, strict=True):
        part[:] = np.frombuffer(buffer.raw(), np.uint8)
    return Made(head=head.getvalue(), sizes=sizes)


def read_slot(made: Made, slot: np.ndarray) -> PackedBatch:
    """Gives the batch in a slot; its tensors are views of the slot."""
    parts = [part.data for part in _parts(made.sizes, slot)]
    batch: PackedBatch = pickle.loads(made.head, buffers=parts)
    return batch


def _parts(sizes: Sequence[int], slot: np.ndarray) -> Iterator[np.ndarray]:
    start = 0
    for size in sizes:
        yield slot[start : start + size]
        start += -(-size // _ALIGNMENT) * _ALIGNMENT


def bytes_of_batch(
    records: Mapping[str, LayerRecord],
    layer_names: Sequence[str],
    *,
    batch_tokens: int,
    num_anchors: int,
    block_size: int,
) -> int:
    """Gives what the largest batch takes in a slot: tokens, blocks, block tokens and rows."""
    token_bytes = 8 + sum(
        encoded_bytes_per_token(records[name].encoding, records[name].hidden_size)
        for name in layer_names
    )
    block_bytes = 2 * 8 + block_size * (2 * 8 + 8 + 8 + 4)
    num_arrays = 2 * len(layer_names) + len(fields(PackedBatch))
    return batch_tokens * token_bytes + num_anchors * block_bytes + num_arrays * _ALIGNMENT


def copied(batch: PackedBatch, *, pin_memory: bool) -> PackedBatch:
    """Gives the batch in memory of its own, from which a GPU copies by itself where asked for."""
    own: Callable[[Tensor], Tensor] = Tensor.pin_memory if pin_memory else Tensor.clone
    tensors: dict[str, Any] = {
        field.name: own(value)
        for field in fields(batch)
        if isinstance(value := getattr(batch, field.name), Tensor)
    }
    layers = tuple(
        EncodedLayer(
            data=own(layer.data), scales=None if layer.scales is None else own(layer.scales)
        )
        for layer in batch.layers
    )
    return replace(batch, layers=layers, **tensors)


# --- processes ----------------------------------------------------------------------------------


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """What is started inside never sees these signals; they reach us when it has been started."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        # The first process of all would start it, and that ends with signals let through again.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(process: Any, connections: Sequence[Connection]) -> None:
    process.kill()
    process.join()
    for connection in connections:
        connection.close()


def _ignore() -> None:
    pass


def _raise(error: DamagedShardError) -> None:
    raise error


def picklable(error: Exception) -> Exception:
    """The error itself where it can be sent, else one that says the same.

    Its traceback, which cannot be sent, goes with it as a note.
    """
    note = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(note)
    return error
