"""Train one drafter: the page that tells stage 2's story, from the store to a checkpoint."""

from contextlib import AbstractContextManager, closing, nullcontext

import torch

from stage2_train.compile_cache import use_compile_cache
from stage2_train.config import DrafterRun
from stage2_train.data import open_run_store, wait_for_store
from stage2_train.device import choose_device
from stage2_train.monitor import say
from stage2_train.position import Position
from stage2_train.preparation import prepare
from stage2_train.ranks import Ranks, joined_ranks
from stage2_train.signals import StopSignals
from stage2_train.training import Ending, Training
from storage.lock import only_process_in
from storage.reader import Snapshot, Store

__all__ = ["EXIT_DONE", "EXIT_STOPPED_EARLY", "Training", "train_drafter"]

EXIT_DONE, EXIT_STOPPED_EARLY = 0, 75


def train_drafter(run: DrafterRun) -> int:
    """Trains a drafter to its end, or resumes its last whole checkpoint and does so.

    Returns:
        0 when all steps are done, 75 when SIGTERM or SIGUSR1 stopped it behind a checkpoint; of
        several ranks any one's signal stops all, behind the same step.

    Raises:
        ValueError: a setting does not fit the store, the target or the checkpoint, or another
            process is training this drafter.
    """
    torch.set_num_threads(run.train.torch_threads)
    with (
        StopSignals() as stop,
        joined_ranks(expected=run.train.gpus_per_drafter) as ranks,
        only_training_of(run, ranks),
    ):
        store = wait_together(run, ranks, stop)
        if store is None:
            return EXIT_STOPPED_EARLY
        cache = None
        if choose_device().type == "cuda":
            cache = use_compile_cache(run, rank=ranks.rank)
        training, position = prepare(run, store, ranks)
        training.cache = cache
        with training.monitor, closing(training.batches):
            ending: Ending = "done" if position.epoch >= run.train.epochs else "epoch"
            while ending == "epoch":
                snapshot = same_snapshot(store, position, ranks)
                position = position.in_snapshot(snapshot.id)
                position, ending = training.epoch(snapshot, position, stop)
        training.monitor.say(f"{ending} after step {position.step}")
    return EXIT_DONE if ending == "done" else EXIT_STOPPED_EARLY


def only_training_of(run: DrafterRun, ranks: Ranks) -> AbstractContextManager[None]:
    """Holds the drafter's folder against other trainings; the first rank does so for all."""
    if not ranks.is_first:
        return nullcontext()
    return only_process_in(run.drafter_dir, work=f"training of drafter {run.drafter.name}")


def wait_together(run: DrafterRun, ranks: Ranks, stop: StopSignals) -> Store | None:
    """Opens the store once there is enough of it, on all ranks; None if one was stopped."""
    store = None
    if ranks.is_first:
        store = wait_for_store(run, is_stopped=stop.is_set, say=say)
    is_stopped = stop.is_set() or (ranks.is_first and store is None)
    if ranks.sum(float(is_stopped)) != [0.0]:
        return None
    return store if store is not None else open_run_store(run)


def same_snapshot(store: Store, position: Position, ranks: Ranks) -> Snapshot:
    """Gives the epoch's snapshot, at its start the newest: the first rank's on a growing store."""
    snapshot = store.snapshot(position.snapshot_id)
    chosen = ranks.from_first(snapshot.id)
    return snapshot if snapshot.id == chosen else store.snapshot(chosen)
