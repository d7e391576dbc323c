"""Batches made by other processes are those made here, errors and damage included."""

import os
import signal
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stage2_train.batch_processes import bytes_of_batch, copied, read_slot, write_slot
from stage2_train.config import DrafterConfig, DrafterRun, TrainConfig
from stage2_train.data import in_processes, make_batch_maker, plan_epoch
from storage.errors import DamagedShardError
from storage.reader import open_store


def makers(store_dir, architecture, num_processes, *, on_damage=None):
    """A maker that works here and one that does the same in processes."""
    run = DrafterRun(
        drafter=DrafterConfig(name="d"),
        train=TrainConfig(
            batch_tokens=64,
            num_anchors=6,
            read_processes=num_processes,
            on_damage="stop" if on_damage is None else "skip",
        ),
        store_dir=store_dir,
        drafter_dir=Path("unused"),
    )
    here = make_batch_maker(run.train, architecture, torch.device("cpu"), on_damage=on_damage)
    return here, in_processes(here, run, open_store(store_dir))


def parts_of(batch):
    """Everything a batch holds, as a list of tensors and numbers."""
    values = [getattr(batch, field.name) for field in fields(batch) if field.name != "layers"]
    return values + [part for layer in batch.layers for part in (layer.data, layer.scales)]


def are_equal(first, second):
    """Whether two batches hold the same."""
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(parts_of(first), parts_of(second), strict=True)
    )


def test_a_batch_comes_out_of_a_slot_as_it_went_in(shared_store_dir, architecture):
    store = open_store(shared_store_dir)
    here, _ = makers(shared_store_dir, architecture, 0)
    snapshot = store.snapshot()
    planned = plan_epoch(snapshot, seed=0, epoch=0, batch_tokens=64)
    batch = next(here.batches(snapshot, planned, epoch=0))
    size = bytes_of_batch(
        store.layers,
        here.layer_names,
        batch_tokens=64,
        num_anchors=6,
        block_size=architecture.block_size,
    )
    slot = torch.zeros(size, dtype=torch.uint8).numpy()
    made = write_slot(batch, slot)
    found = read_slot(made, slot)
    kept = copied(found, pin_memory=False)
    assert are_equal(found, batch)
    slot[:] = 255
    assert not are_equal(found, batch)
    assert are_equal(kept, batch)


@pytest.mark.parametrize("num_processes", [1, 3])
def test_processes_make_the_same_batches_in_the_same_order(
    shared_store_dir, architecture, num_processes
):
    snapshot = open_store(shared_store_dir).snapshot()
    here, beside = makers(shared_store_dir, architecture, num_processes)
    for epoch in (0, 1):
        planned = plan_epoch(snapshot, seed=0, epoch=epoch, batch_tokens=64)
        expected = list(here.batches(snapshot, planned, epoch=epoch))
        found = list(beside.batches(snapshot, planned, epoch=epoch))
        assert len(found) == len(expected) > num_processes
        assert all(map(are_equal, found, expected))
    beside.close()


def test_an_epoch_left_early_ends_the_processes_and_the_next_one_starts_others(
    shared_store_dir, architecture
):
    snapshot = open_store(shared_store_dir).snapshot()
    here, beside = makers(shared_store_dir, architecture, 1)
    planned = plan_epoch(snapshot, seed=0, epoch=0, batch_tokens=64)
    batches = beside.batches(snapshot, planned, epoch=0)
    next(batches)
    batches.close()
    assert beside.processes._running == []
    again = next(beside.batches(snapshot, planned, epoch=0))
    assert are_equal(again, next(here.batches(snapshot, planned, epoch=0)))
    beside.close()


def test_damage_is_raised_or_called_back_here(tmp_path, tiny_store, architecture):
    store_dir = tiny_store.fill_store(tmp_path / "store")
    snapshot = open_store(store_dir).snapshot()
    planned = plan_epoch(snapshot, seed=0, epoch=0, batch_tokens=64)
    next((store_dir / "shards").rglob("layers/*/c/0/0")).unlink()
    _, strict = makers(store_dir, architecture, 1)
    with pytest.raises(DamagedShardError, match="00000-"):
        list(strict.batches(snapshot, planned, epoch=0))
    damaged = []
    here, tolerant = makers(store_dir, architecture, 1, on_damage=damaged.append)
    found = list(tolerant.batches(snapshot, planned, epoch=0))
    tolerant.close()
    beside = sorted(error.sequence_id for error in damaged)
    damaged.clear()
    assert all(map(are_equal, found, here.batches(snapshot, planned, epoch=0)))
    assert beside == sorted(error.sequence_id for error in damaged) != []


@pytest.mark.parametrize(
    "error", [KeyError("plan"), OSError("the store is gone"), ConnectionResetError("hung up")]
)
def test_an_error_in_the_plan_is_raised_here(shared_store_dir, architecture, error):
    snapshot = open_store(shared_store_dir).snapshot()
    _, beside = makers(shared_store_dir, architecture, 2)
    planned = plan_epoch(snapshot, seed=0, epoch=0, batch_tokens=64)

    def broken():
        yield planned[0]
        raise error

    with pytest.raises(type(error), match=error.args[0]) as raised:
        list(beside.batches(snapshot, broken(), epoch=0))
    # It has been to another process, and still says where it was raised.
    assert "in broken" in "".join(raised.value.__notes__)
    assert beside.processes._running == []


FIRST_PROCESS = """
import signal
from multiprocessing import get_context
from stage2_train.batch_processes import _STOP_SIGNALS, _signals_blocked

# The first process that is spawned also starts the tracker of resources.
with _signals_blocked():
    pool = get_context("spawn").Pool(1)
assert pool.apply(signal.pthread_sigmask, (signal.SIG_BLOCK, ())) >= _STOP_SIGNALS
assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & _STOP_SIGNALS
pool.close()
pool.join()
"""


def test_the_first_process_of_all_is_started_with_signals_blocked(run_script):
    run_script(FIRST_PROCESS)


def test_signals_that_stop_a_training_do_not_reach_them_and_a_death_is_said(
    shared_store_dir, architecture
):
    snapshot = open_store(shared_store_dir).snapshot()
    _, beside = makers(shared_store_dir, architecture, 1)
    planned = plan_epoch(snapshot, seed=0, epoch=0, batch_tokens=64)
    batches = beside.batches(snapshot, planned, epoch=0)
    next(batches)
    process_id = beside.processes._running[0].process_id
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.kill(process_id, number)
    next(batches)
    os.kill(process_id, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="has died"):
        list(batches)
