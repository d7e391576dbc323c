"""Train one drafter: the page that tells stage 2's story, from the store to a checkpoint."""

from contextlib import closing

import torch

from stage2_train.config import DrafterRun
from stage2_train.data import wait_for_store
from stage2_train.monitor import say
from stage2_train.preparation import prepare
from stage2_train.signals import StopSignals
from stage2_train.training import Ending, Training
from storage.lock import only_process_in

__all__ = ["EXIT_DONE", "EXIT_STOPPED_EARLY", "Training", "train_drafter"]

EXIT_DONE, EXIT_STOPPED_EARLY = 0, 75


def train_drafter(run: DrafterRun) -> int:
    """Trains a drafter to its end, or resumes its last whole checkpoint and does so.

    Returns:
        0 when all steps are done, 75 when SIGTERM or SIGUSR1 stopped it behind a checkpoint.

    Raises:
        ValueError: a setting does not fit the store, the target or the checkpoint, or another
            process is training this drafter.
    """
    torch.set_num_threads(run.train.torch_threads)
    work = f"training of drafter {run.drafter.name}"
    with only_process_in(run.drafter_dir, work=work), StopSignals() as stop:
        store = wait_for_store(run, is_stopped=stop.is_set, say=say)
        if store is None:
            return EXIT_STOPPED_EARLY
        training, position = prepare(run, store)
        with closing(training.monitor):
            ending: Ending = "done" if position.epoch >= run.train.epochs else "epoch"
            while ending == "epoch":
                snapshot = store.snapshot(position.snapshot_id)
                position, ending = training.epoch(snapshot, position.in_snapshot(snapshot.id), stop)
        say(f"{ending} after step {position.step}")
    return EXIT_DONE if ending == "done" else EXIT_STOPPED_EARLY
