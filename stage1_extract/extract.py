"""Extract: conversations in, sealed shards of the target's hidden states out. The page to read.

`prepare_store` makes the store and its plan; any number of `run_worker` processes fill it, on any
machines, at any time. A unit is computed by one worker from its own sequences only, so what is
stored does not depend on how many there are.
"""

import os
from collections.abc import Iterable

import torch

from stage1_extract.config import ExtractRun
from stage1_extract.failures import EXIT_DONE, judge_extraction
from stage1_extract.full_disk import bytes_needed_named
from stage1_extract.head_needs import lacking_head_files
from stage1_extract.planning import prepare_store
from stage1_extract.preparation import open_conversations
from stage1_extract.signals import StopRequest, stop_requests
from stage1_extract.tensor_parallel import (
    Calls,
    calls_to_followers,
    find_group,
    follow,
    load_workers_target,
    worker_device,
)
from stage1_extract.work import unit_order
from stage1_extract.worker import Worker, pipeline_of
from stage1_extract.worker_metrics import WorkerMetrics
from storage.schema import UnitId
from storage.writer import WritableStore, open_for_writing

__all__ = ["prepare_store", "run_worker"]

EXIT_STOPPED_EARLY = 75
"""Work that stopped at a signal and can be resumed (EX_TEMPFAIL)."""


def run_worker(run: ExtractRun, *, worker_index: int, num_workers: int) -> int:
    """Computes and seals units until none is left or a stop is asked for.

    Start it after `prepare_store`. It takes its own share of the units first, then what the others
    have left. SIGTERM, SIGUSR1 and Ctrl-C end it between two batches: the open unit is finished if
    the grace time allows, else dropped. With `extract.gpus_per_worker` it is called in each process
    of the worker; the first does the work, the others compute their parts of it.

    Returns:
        0 when every unit is committed, 75 when stopped early, 1 when too many sequences failed.

    Raises:
        ValueError: The target cannot be loaded or its states fail the parity check.
        StoreError: The store cannot be written.
    """
    torch.set_num_threads(run.extract.torch_threads)
    group = find_group(os.environ, wanted_size=run.extract.gpus_per_worker)
    if group.rank > 0:
        follow(group, run.target, device=worker_device(worker_index, group))
        return EXIT_DONE
    with calls_to_followers(group) as calls:
        return lead_worker(run, calls, worker_index=worker_index, num_workers=num_workers)


def lead_worker(
    run: ExtractRun, calls: Calls | None, *, worker_index: int, num_workers: int
) -> int:
    """A worker's work, see `run_worker`, in its first process or its only one.

    Args:
        run: The run's settings.
        calls: To the worker's other processes.
        worker_index: 0-based.
        num_workers: Workers of this run.
    """
    store = open_for_writing(run.store_dir)
    order = unit_order(store.units(), worker_index=worker_index, num_workers=num_workers)
    order = [unit for unit in order if not store.is_committed(unit)]
    if not order and not lacking_head_files(store, run):
        print("nothing to extract: all units are committed")
        return judge_extraction(store, run)
    metrics_path = run.run_dir / "extract" / f"worker-{worker_index:05d}.metrics.jsonl"
    with stop_requests() as stop, bytes_needed_named(run, store):
        metrics = WorkerMetrics(metrics_path, worker_index=worker_index, num_workers=num_workers)
        try:
            worker = start_worker(run, store, metrics, stop, calls, worker_index=worker_index)
            worker.prove(proof_units(store, order))
            metrics.restart_clock()
            with pipeline_of(worker) as worker.pipeline:
                worker.extract_units(order)
        finally:
            metrics.close()
    print(metrics.summary(), flush=True)
    if stop and not all(map(store.is_committed, order)):
        return EXIT_STOPPED_EARLY
    return judge_extraction(store, run)


def proof_units(store: WritableStore, open_units: Iterable[UnitId]) -> list[UnitId]:
    """Units whose sequences prove the target: the same for all workers, so that all batch alike.

    Where none is open any more, and only the head is to be written again, all of them.
    """
    first = min(open_units, default=None)
    return [unit for unit in store.units() if first is None or unit.generation == first.generation]


def start_worker(
    run: ExtractRun,
    store: WritableStore,
    metrics: WorkerMetrics,
    stop: StopRequest,
    calls: Calls | None = None,
    *,
    worker_index: int,
) -> Worker:
    """Loads the target on this worker's device or devices and indexes the conversations."""
    return Worker(
        run=run,
        store=store,
        target=load_workers_target(run.target, calls, worker_index=worker_index),
        conversations=open_conversations(run),
        layers=store.layers,
        metrics=metrics,
        stop=stop,
    )
