"""Compile once what several drafters of one shape run: a few steps, thrown away."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch

from stage2_train.compile import WARMUP_STEPS
from stage2_train.compile_cache import packed, primed_archive, use_compile_cache
from stage2_train.config import DrafterRun
from stage2_train.data import plan_epoch, wait_for_store
from stage2_train.monitor import say
from stage2_train.preparation import prepare
from stage2_train.signals import StopSignals
from storage.files import replace_whole


@contextmanager
def removed(folder: Path) -> Iterator[None]:
    """Removes a folder in the end, whatever the end is."""
    try:
        yield
    finally:
        shutil.rmtree(folder)


def prime(run: DrafterRun) -> bool:
    """Trains a drafter's first steps and validates it, to fill the cache of its shape.

    Forward, backward, optimizer and validation are compiled, as any drafter of the shape will run
    them. Nothing is left of it but the archive.

    Returns:
        False when a signal stopped it before the store had anything.
    """
    torch.set_num_threads(run.train.torch_threads)
    with StopSignals() as stop, tempfile.TemporaryDirectory(prefix="prime-") as scratch:
        store = wait_for_store(run, is_stopped=stop.is_set, say=say)
        if store is None:
            return False
        throwaway = run.model_copy(update={"drafter_dir": Path(scratch) / run.drafter.name})
        cache = use_compile_cache(throwaway)
        training, position = prepare(throwaway, store)
        with training.monitor, closing(training.batches), removed(cache.folder.parent):
            snapshot = store.snapshot()
            planned = plan_epoch(
                snapshot,
                seed=run.train.seed,
                epoch=0,
                batch_tokens=run.train.batch_tokens,
                window_tokens=run.train.window_tokens,
                data_fraction=run.train.data_fraction,
            )
            for batches in training.steps_of(snapshot, planned[: WARMUP_STEPS + 1], position):
                position, is_stopped = training.step(batches, position, steps=10**6, stop=stop)
                if is_stopped:
                    return False
            training.validate(snapshot, position)
            replace_whole(primed_archive(run), packed(cache.folder))
    say(f"primed the compile cache for drafters like {run.drafter.name}")
    return True
