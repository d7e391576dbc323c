"""The trainer's way from the store to the device: what an epoch trains, read ahead, packed, copied.

What is trained, and in which order, is a pure function of (seed, epoch, snapshot); only the reading
is concurrent.
"""

import itertools
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float32, Integer

from stage2_train.architecture import DrafterArchitecture
from stage2_train.batch_processes import BatchProcesses, bytes_of_batch
from stage2_train.batches import Window, draw_window
from stage2_train.blocks import offset_weights
from stage2_train.clock import DeviceClock
from stage2_train.collate import PackedBatch, collate, with_masks, without_weights
from stage2_train.config import DrafterRun, TrainConfig
from stage2_train.packing import PackedEpoch, pack_epoch
from storage.errors import DamagedShardError, StoreNotFoundError
from storage.order import epoch_order, mix
from storage.read_cache import ReadCache
from storage.reader import SequenceStates, Snapshot, Store, open_store
from storage.schema import LM_HEAD_INPUT, layer_name
from storage.stream import read_ahead

POLL_S = 5.0
# Sequences of a batch above which processes of their own read them, and how many do.
MANY_SEQUENCES = 8
NUM_PROCESSES = 2
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class BatchMaker:
    """Everything that turns windows of a snapshot into packed batches; the same all run long."""

    layer_names: tuple[str, ...]
    batch_tokens: int
    window_tokens: int
    """Tokens of one sequence at most."""
    num_anchors: int
    weight_of_offset: Float32[np.ndarray, "block_size"]
    mask_token_id: int
    seed: int
    stop_at_unsupervised: bool
    is_divided_by_blocks: bool
    read_ahead_bytes: int
    read_threads: int
    device: torch.device
    copies: DeviceClock | None = None
    """Counts the time that copies to a GPU take, beside its computing."""
    add_masks: Callable[[PackedBatch], PackedBatch] | None = None
    """Builds the attention masks of a batch on a GPU, beside its computing; None does not."""
    on_damage: Callable[[DamagedShardError], None] | None = None
    """Called for each damaged sequence, which its batch then lacks; None raises."""
    processes: BatchProcesses | None = None
    """Read and pack beside this process; None does so in threads of it."""

    @property
    def full_weight_sum(self) -> float:
        """What the loss of a batch is divided by whose blocks all are real and whole."""
        if self.is_divided_by_blocks:
            return float(self.num_anchors)
        return self.num_anchors * float(self.weight_of_offset.sum(dtype=np.float64))

    def batches(
        self, snapshot: Snapshot, planned: Iterable[Sequence[Window]], *, epoch: int
    ) -> Iterator[PackedBatch]:
        """Yields the planned batches in order, on the device, while later ones are read."""
        if self.processes is not None:
            on_host = self.processes.batches(self, snapshot.id, planned, epoch=epoch)
        else:
            on_host = self.on_host(snapshot, planned, epoch=epoch)
        if self.device.type != "cuda":
            return on_host
        return copied_ahead(
            _made_ahead(on_host),
            self.device,
            self.copies or DeviceClock(self.device),
            add_masks=self.add_masks,
        )

    def for_host(self) -> "BatchMaker":
        """The same without what belongs to this process and its device."""
        return replace(
            self,
            device=torch.device("cpu"),
            copies=None,
            add_masks=None,
            on_damage=None,
            processes=None,
        )

    def close(self) -> None:
        """Ends what runs beside this process; another epoch would start it again."""
        if self.processes is not None:
            self.processes.close()

    def on_host(
        self, snapshot: Snapshot, planned: Iterable[Sequence[Window]], *, epoch: int
    ) -> Generator[PackedBatch, None, None]:
        """Yields the planned batches in order, on the host, while later ones are read."""
        planned, to_read = itertools.tee(planned)
        items = ([(w.sequence_index, slice(w.start, w.stop)) for w in batch] for batch in to_read)
        reading = read_ahead(
            snapshot,
            items,
            layers=self.layer_names,
            read_ahead_bytes=self.read_ahead_bytes,
            num_threads=self.read_threads,
            on_damage=self.on_damage,
        )
        with closing(reading):  # type: ignore[type-var]
            last: PackedBatch | None = None
            # Batches of which all is damaged: their steps are made, and nothing is learned from
            # them. Those before the first other one wait for what they can be made like.
            num_waiting = 0
            for windows, sequences in zip(planned, reading, strict=True):
                if sequences:
                    last = collate(
                        sequences,
                        whole_windows(windows, sequences, snapshot.sequence_id),
                        layer_names=self.layer_names,
                        batch_tokens=self.batch_tokens,
                        num_anchors=self.num_anchors,
                        weight_of_offset=self.weight_of_offset,
                        mask_token_id=self.mask_token_id,
                        seed=self.seed,
                        epoch=epoch,
                        stop_at_unsupervised=self.stop_at_unsupervised,
                        is_divided_by_blocks=self.is_divided_by_blocks,
                        pin_memory=self.device.type == "cuda",
                    )
                    yield from itertools.repeat(without_weights(last), num_waiting)
                    num_waiting = 0
                    yield last
                elif last is not None:
                    yield without_weights(last)
                else:
                    num_waiting += 1
            if num_waiting > 0:
                raise ValueError(
                    f"all sequences of {num_waiting} batches are damaged; run `store verify`, then "
                    "`store repair` and `extract`"
                )


def whole_windows(
    windows: Sequence[Window],
    sequences: Sequence[SequenceStates],
    sequence_id: Callable[[int], str],
) -> Sequence[Window]:
    """Gives the windows of the sequences that were read: all, unless some were damaged."""
    if len(sequences) == len(windows):
        return windows
    read = {sequence.sequence_id for sequence in sequences}
    return [window for window in windows if sequence_id(window.sequence_index) in read]


def make_batch_maker(
    train: TrainConfig,
    architecture: DrafterArchitecture,
    device: torch.device,
    *,
    copies: DeviceClock | None = None,
    on_damage: Callable[[DamagedShardError], None] | None = None,
) -> BatchMaker:
    """Gathers what batches depend on from the settings."""
    layer_names = tuple(layer_name(i) for i in architecture.target_layer_ids)
    is_paced = train.loss.is_paced
    return BatchMaker(
        layer_names=layer_names
        if train.loss.kind == "cross_entropy"
        else (*layer_names, LM_HEAD_INPUT),
        batch_tokens=train.batch_tokens,
        window_tokens=train.window_tokens or train.batch_tokens,
        num_anchors=train.num_anchors,
        weight_of_offset=offset_weights(
            architecture.block_size,
            # D-PACE's own weights take the place of the decay.
            gamma=math.inf if is_paced else train.loss.gamma,
            min_weight=train.loss.min_weight,
        ),
        mask_token_id=architecture.mask_token_id,
        seed=train.seed,
        stop_at_unsupervised=train.loss.stop_at_unsupervised,
        is_divided_by_blocks=is_paced,
        read_ahead_bytes=train.read_ahead_bytes,
        read_threads=train.read_threads,
        device=device,
        copies=copies,
        add_masks=partial(
            with_masks,
            architecture=architecture,
            # Our own kernels' tiles have room for bf16, and would cut fp32 to TF32.
            is_flex_wanted=train.attention == "flex" or train.dtype == "float32",
        )
        if device.type == "cuda" and train.attention != "sdpa"
        else None,
        on_damage=on_damage if train.on_damage == "skip" else None,
    )


def in_processes(maker: BatchMaker, run: DrafterRun, store: Store) -> BatchMaker:
    """Gives the maker whose batches processes of their own make; itself where none shall."""
    num_processes = run.train.read_processes
    if num_processes is None:
        num_processes = choose_processes(maker, store.snapshot().num_tokens)
    if num_processes == 0:
        return maker
    slot_bytes = bytes_of_batch(
        store.layers,
        maker.layer_names,
        batch_tokens=maker.batch_tokens,
        num_anchors=maker.num_anchors,
        block_size=len(maker.weight_of_offset),
    )
    processes = BatchProcesses(
        partial(open_run_store, run),
        num_processes=num_processes,
        slot_bytes=slot_bytes,
    )
    return replace(maker, processes=processes)


def choose_processes(maker: BatchMaker, num_tokens: Integer[np.ndarray, "sequences"]) -> int:
    """Gives the processes that make batches where the settings do not say.

    A sequence costs the interpreter half a millisecond whatever its length, so many of them in a
    batch hold up a trainer that launches kernels for a GPU.
    """
    if maker.device.type != "cuda" or len(num_tokens) == 0:
        return 0
    is_many = maker.batch_tokens > MANY_SEQUENCES * num_tokens.clip(max=maker.window_tokens).mean()
    return NUM_PROCESSES if is_many else 0


def plan_epoch(
    snapshot: Snapshot,
    *,
    seed: int,
    epoch: int,
    batch_tokens: int,
    window_tokens: int | None = None,
    data_fraction: float = 1.0,
) -> PackedEpoch:
    """Gives the batches of an epoch: every sequence that is trained in one of them exactly.

    Args:
        snapshot: the sequences.
        seed: of the order and of windows.
        epoch: which one.
        batch_tokens: token budget of a batch.
        window_tokens: tokens of a sequence at most; None takes all that the budget holds.
        data_fraction: share of the sequences that is trained.

    Raises:
        ValueError: the snapshot has nothing to train on.
    """
    include = trainable(snapshot) & of_share(snapshot, data_fraction)
    if not include.any():
        raise ValueError(
            f"none of the {snapshot.num_sequences} sequences in the store can be trained on: "
            f"{int(snapshot.held_out.sum())} are held out, "
            f"{int((snapshot.num_supervised == 0).sum())} have no two supervised tokens in a row; "
            f"train.data_fraction is {data_fraction:g}; "
            "look at a loss mask with `store info --sequence ID`"
        )
    order = epoch_order(snapshot, seed=seed, epoch=epoch, include=include)
    window = batch_tokens if window_tokens is None else window_tokens

    def draw(index: int) -> Window:
        return draw_window(
            index,
            int(snapshot.num_tokens[index]),
            window_tokens=window,
            seed=seed,
            epoch=epoch,
            sequence_id=snapshot.sequence_id,
        )

    lengths = np.minimum(snapshot.num_tokens[order], window)
    return pack_epoch(order, lengths, batch_tokens=batch_tokens, draw=draw)


def trainable(snapshot: Snapshot) -> Bool[np.ndarray, "sequences"]:
    """Says which sequences are trained: not held out, and with an anchor to draw."""
    return ~snapshot.held_out & (snapshot.num_supervised > 0)


def of_share(snapshot: Snapshot, fraction: float) -> Bool[np.ndarray, "sequences"]:
    """Says which sequences belong to a share of the data; larger shares hold smaller ones.

    Independent of what is held out, which the same hashes decide unmixed.
    """
    if fraction >= 1.0:
        return np.ones(snapshot.num_sequences, np.bool_)
    return mix(snapshot.id_hash) < np.uint64(math.floor(fraction * 2**64))


def wait_for_store(
    run: DrafterRun,
    *,
    is_stopped: Callable[[], bool],
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> Store | None:
    """Opens the store once enough shards are committed; None if stopped while waiting.

    A store whose whole plan is committed is enough, however few its shards.

    Raises:
        StoreError: there is no store, and `train.wait_for_store_s` says not to wait for one.
        ValueError: the wait took longer than that.
    """
    limit_s, waited_s = run.train.wait_for_store_s, 0.0
    while (store := _filled_store(run)) is None:
        if waited_s == 0.0:
            say(f"waiting for {run.train.start_after_shards} shards in {run.store_dir}")
        if limit_s is not None and waited_s >= limit_s:
            raise ValueError(
                f"{run.store_dir}: fewer than {run.train.start_after_shards} shards after waiting "
                f"{limit_s:.0f} s (train.wait_for_store_s); look into the log of the extraction"
            )
        if is_stopped():
            return None
        sleep(POLL_S)
        waited_s += POLL_S
    return None if is_stopped() else store  # The signal may have come in the last nap.


def open_run_store(run: DrafterRun) -> Store:
    """Opens the run's store, read through a cache on the local disk where one is set."""
    train = run.train
    cache = None
    if train.read_cache_dir is not None:
        cache = ReadCache(train.read_cache_dir, limit_bytes=train.read_cache_bytes)
    return open_store(run.store_dir, cache=cache)


def _filled_store(run: DrafterRun) -> Store | None:
    """Opens the store if training may start on it; None if it has to wait."""
    try:
        store = open_run_store(run)
    except StoreNotFoundError:
        if run.train.wait_for_store_s is None:
            raise
        return None
    is_enough = store.snapshot().num_shards >= run.train.start_after_shards
    return store if is_enough or is_complete(run.store_dir) else None


def is_complete(store_dir: Path | str) -> bool:
    """Says whether every planned unit of the store is committed; an unplanned store is not."""
    return open_store(store_dir).is_complete()


def _made_ahead(batches: Generator[T, None, None]) -> Generator[T, None, None]:
    """Makes the next batch in a thread of its own while the current one is used."""
    with ThreadPoolExecutor(1, thread_name_prefix="collate") as pool:
        upcoming = pool.submit(next, batches, None)
        try:
            while (batch := upcoming.result()) is not None:
                upcoming = pool.submit(next, batches, None)
                yield batch
        finally:
            upcoming.cancel()
            pool.shutdown(wait=True)
            batches.close()


def copied_ahead(
    batches: Iterator[PackedBatch],
    device: torch.device,
    copies: DeviceClock,
    *,
    add_masks: Callable[[PackedBatch], PackedBatch] | None = None,
) -> Iterator[PackedBatch]:
    """Copies the next batch to the device on a side stream while the current one is used.

    Its masks are built there, too: a step finds all it needs.
    """
    side = torch.cuda.Stream(device)
    upcoming = _start_copy(batches, device, side, copies, add_masks)
    while upcoming is not None:
        # The copy was started a step ago: as a rule the stream finds it done.
        torch.cuda.current_stream(device).wait_stream(side)
        batch = upcoming
        batch.record_stream(torch.cuda.current_stream(device))
        upcoming = _start_copy(batches, device, side, copies, add_masks)
        yield batch


def _start_copy(
    batches: Iterator[PackedBatch],
    device: torch.device,
    side: torch.cuda.Stream,
    copies: DeviceClock,
    add_masks: Callable[[PackedBatch], PackedBatch] | None,
) -> PackedBatch | None:
    batch = next(batches, None)
    if batch is None:
        return None
    with torch.cuda.stream(side):
        with copies.span():
            copied = batch.to(device)
        return copied if add_masks is None else add_masks(copied)
