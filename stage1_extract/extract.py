"""Extract: conversations in, sealed shards of the target's hidden states out. The page to read.

`prepare_store` makes the store and its plan; any number of `run_worker` processes fill it, on any
machines, at any time. A unit is computed by one worker from its own sequences only, so what is
stored does not depend on how many there are.
"""

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import islice

import torch
from jaxtyping import Int32
from numpy import ndarray

from stage1_extract.batches import batches_for, row_sizes
from stage1_extract.calibration import calibrate
from stage1_extract.config import ExtractRun
from stage1_extract.conversations import Conversations
from stage1_extract.failures import too_many_failed
from stage1_extract.full_disk import bytes_needed_named
from stage1_extract.open_shard import OpenShard
from stage1_extract.parity import choose_batching
from stage1_extract.pipeline import Pipeline, ShardInProgress
from stage1_extract.preparation import (
    calibration_sequences,
    open_conversations,
    plan_units,
    record_layers,
    run_sequence,
    store_identity,
    store_shape,
)
from stage1_extract.problems import UnusableConversationError
from stage1_extract.sequences import TokenSequence
from stage1_extract.signals import StopRequest, stop_requests
from stage1_extract.target import load_target, resolve_target
from stage1_extract.target_head import FACTS_FILE, head_files
from stage1_extract.target_transformers import TransformersTarget, load_config, load_tokenizer
from stage1_extract.tensor_parallel import (
    Calls,
    Group,
    LeadingTarget,
    calls_to_followers,
    find_group,
    follow,
)
from stage1_extract.work import unit_order
from stage1_extract.worker_metrics import WorkerMetrics
from storage.errors import StoreError
from storage.reader import open_store
from storage.schema import LayerRecord, UnitId
from storage.writer import WritableStore, create_store, open_for_writing

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_STOPPED_EARLY = 75
"""Work that stopped at a signal and can be resumed (EX_TEMPFAIL)."""

_PROOF_SEQUENCES = 3
_PROOF_TOKENS = 256
_PROOF_UNITS = 8


def prepare_store(run: ExtractRun, *, is_worker: bool = False) -> WritableStore:
    """Makes the store with identity, layer records and plan, or brings an existing one up to date.

    Idempotent, and safe when several processes call it at once. Loads no weights, but to calibrate
    a new store's encoding.

    Args:
        run: The run's settings.
        is_worker: Whether others may be filling the store already: then room on the disk is asked
            for only where new conversations are planned.

    Raises:
        ValueError: The target, the data or a setting is unusable, or there is no room.
        StoreError: The store belongs to another identity, or cannot be written.
    """
    config = load_config(run.target)
    shape = store_shape(run, config)
    tokenizer = load_tokenizer(run.target)
    conversations = open_conversations(run)
    if conversations.problems.counts:
        summary = f"{conversations.problems.summary()}{conversations.problems.first()}"
        print(f"unusable lines: {summary}", file=sys.stderr, flush=True)
    store = create_store(run.store_dir, store_identity(run, config, tokenizer))
    sample = calibration_sequences(run, conversations, tokenizer, vocab_size=config.vocab_size)
    record_layers(store, shape, lambda: calibrate(run, sample, layers=shape.layers))
    plan_units(store, run, conversations, tokenizer, shape, counts_open_units=not is_worker)
    return store


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
    if not order:
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
                for unit in order:
                    if not stop and not store.is_committed(unit):
                        worker.extract_unit(unit)
        finally:
            metrics.close()
    print(metrics.summary(), flush=True)
    if stop and not all(map(store.is_committed, order)):
        return EXIT_STOPPED_EARLY
    return judge_extraction(store, run)


def judge_extraction(store: WritableStore, run: ExtractRun) -> int:
    """Exit code of an extraction whose units are all committed, whoever committed them."""
    limit = run.extract.max_failed_fraction
    failed = too_many_failed(store, run.store_dir, max_failed_fraction=limit)
    return EXIT_FAILED if failed else EXIT_DONE


def proof_units(store: WritableStore, open_units: Iterable[UnitId]) -> list[UnitId]:
    """Units whose sequences prove the target: the same for all workers, so that all batch alike."""
    generation = min(open_units).generation
    return [unit for unit in store.units() if unit.generation == generation]


def worker_device(worker_index: int, group: Group) -> str:
    """The device of this process: a GPU where there is any."""
    num_gpus = torch.cuda.device_count()
    number = worker_index if group.size == 1 else group.local_rank
    return f"cuda:{number % num_gpus}" if num_gpus else "cpu"


def start_worker(
    run: ExtractRun,
    store: WritableStore,
    metrics: WorkerMetrics,
    stop: StopRequest,
    calls: Calls | None = None,
    *,
    worker_index: int,
) -> "Worker":
    """Loads the target on this worker's device or devices and indexes the conversations."""
    if calls is None:
        target = load_target(run.target, device=worker_device(worker_index, Group()))
    else:
        device = worker_device(worker_index, calls.group)
        target = LeadingTarget.lead(run.target, calls, device=device)
    return Worker(
        run=run,
        store=store,
        target=target,
        conversations=open_conversations(run),
        layers=store.layers,
        metrics=metrics,
        stop=stop,
    )


@contextmanager
def pipeline_of(worker: "Worker") -> Iterator[Pipeline | None]:
    """A GPU worker's pipeline, all its shards sealed at the end; the CPU needs none."""
    if not worker.target.device.startswith("cuda"):
        yield None
        return
    from stage1_extract.transfer import CudaTransfer

    settings = worker.run.extract
    transfer = CudaTransfer(
        worker.layers,
        device=worker.target.device,
        batch_tokens=worker.batch_tokens,
        write_buffer_bytes=settings.write_buffer_bytes,
    )
    transfer.warm_up(worker.target.model.dtype)
    worker.metrics.restart_clock()
    with Pipeline(transfer, worker.metrics, num_threads=settings.writer_threads) as pipeline:
        yield pipeline
        pipeline.drain()


@dataclass(kw_only=True)
class Worker:
    """What one worker process holds while it goes from unit to unit."""

    run: ExtractRun
    store: WritableStore
    target: TransformersTarget
    conversations: Conversations
    layers: Mapping[str, LayerRecord]
    metrics: WorkerMetrics
    stop: StopRequest
    pipeline: Pipeline | None = None
    """Writes in the background on a GPU."""

    @property
    def batch_tokens(self) -> int:
        """Token budget of a forward pass; the longest sequence fits."""
        return max(self.run.extract.batch_tokens, self.store.identity.max_sequence_tokens)

    def prove(self, units: Iterable[UnitId]) -> None:
        """Checks the states of a few sequences against plain forward passes; saves the head.

        The longest sequence of the unit is among them, whole: windows and chunks show only there.
        Sequences with NaN or infinity prove nothing and are left out.

        Raises:
            ValueError: States or head follow no rule that stage 2 could rely on, or all sequences
                tried give NaN.
        """
        num_tried = 0
        for unit in islice(units, _PROOF_UNITS):
            usable, _ = self.read_unit(unit)
            if not usable:
                continue
            proof = [each.token_ids[:_PROOF_TOKENS] for each in usable[:_PROOF_SEQUENCES]]
            proof.append(max(usable, key=lambda each: each.num_tokens).token_ids)
            finite = [token_ids for token_ids in proof if self.is_finite(token_ids)]
            num_tried += len(proof)
            if finite:
                self.choose_way(finite)
                save_head(self.store, self.run, self.target, token_ids=finite[0])
                return
        if num_tried:
            raise ValueError(
                f"target.model: {self.run.target.model} gives NaN or infinity for all {num_tried}"
                f" sequences tried; check its weights, and target.dtype = {self.run.target.dtype}"
                " (float16 overflows where bfloat16 does not)"
            )

    def is_finite(self, token_ids: Int32[ndarray, "tokens"]) -> bool:
        """Whether a plain forward pass of a sequence gives finite states in all layers."""
        states = self.target.plain_hidden_states(token_ids, layers=list(self.layers))
        return all(bool(torch.isfinite(each).all()) for each in states.values())

    def choose_way(self, proof: Sequence[Int32[ndarray, "_"]]) -> None:
        """Sets the fastest way of running the target that proves exact on some sequences.

        Raises:
            ParityError: None is exact.
        """
        choose_batching(
            self.target,
            proof,
            layers=list(self.layers),
            wanted=self.run.extract.batching,
            compiled_rows=row_sizes(self.batch_tokens) if self.is_compiling_wanted else (),
            must_compile=self.run.extract.compile is True,
        )
        if self.target.compiled is not None:
            self.metrics.evidence = self.target.compiled.evidence

    @property
    def is_compiling_wanted(self) -> bool:
        """Whether decoder layers are to run compiled; parted ones are not."""
        wanted = self.run.extract.compile
        if self.run.extract.gpus_per_worker > 1:
            if wanted:
                raise ValueError(
                    "extract.compile = true: a target on several GPUs (extract.gpus_per_worker)"
                    " runs eagerly; remove one of the two settings"
                )
            return False
        return self.target.device.startswith("cuda") if wanted is None else wanted

    def extract_unit(self, unit: UnitId) -> None:
        """Computes a unit and commits it whole, or drops it.

        It is dropped when a stop leaves no time for it, or when another worker commits it first.
        With a pipeline the commit comes later, by the time the pipeline is drained.
        """
        with self.metrics.timed("tokenize"):
            sequences, unusable = self.read_unit(unit)
        batches = batches_for(
            self.target.batching,
            [each.num_tokens for each in sequences],
            batch_tokens=self.batch_tokens,
        )
        pace = _Pace(sum(each.num_tokens for each in sequences))
        with self.open_shard(unit) as shard:
            shard.skip(unusable)
            for batch in batches:
                out_of_time = self.stop and not pace.ends_in(
                    self.stop.seconds_left(self.run.extract.stop_grace_s)
                )
                if out_of_time or self.store.is_committed(unit):
                    return
                self.extract_batch(shard, [sequences[index] for index in batch])
                pace.num_done += sum(sequences[index].num_tokens for index in batch)
            shard.finish()

    def open_shard(self, unit: UnitId) -> AbstractContextManager[ShardInProgress]:
        """One attempt at a unit, written at once or by the pipeline."""
        shard = OpenShard(self.store.start_shard(unit), self.layers, self.metrics)
        return shard if self.pipeline is None else self.pipeline.open(shard)

    def read_unit(
        self, unit: UnitId
    ) -> tuple[list[TokenSequence], dict[str, UnusableConversationError]]:
        """The unit's sequences, and by id what is wrong with those that cannot be used."""
        usable, unusable = [], {}
        for sequence_id in self.store.sequences_of(unit):
            try:
                sequence = run_sequence(
                    self.run,
                    self.conversations,
                    sequence_id,
                    self.target.tokenizer,
                    vocab_size=self.store.identity.vocab_size,
                    target_weights=self.store.identity.target_weights_sha256[:16],
                )
            except UnusableConversationError as problem:
                unusable[sequence_id] = problem
            else:
                usable.append(sequence)
        return usable, unusable

    def extract_batch(self, shard: ShardInProgress, sequences: Sequence[TokenSequence]) -> None:
        """Forward pass of one batch, whose states the shard takes."""
        with self.enough_memory():
            with shard.forward_pass():
                states = self.target.hidden_states(
                    [each.token_ids for each in sequences], layers=list(self.layers)
                )
            shard.add(sequences, states)

    @contextmanager
    def enough_memory(self) -> Iterator[None]:
        """Turns a full GPU into one line that says which setting to lower."""
        try:
            yield
        except torch.cuda.OutOfMemoryError as error:
            raise ValueError(
                f"extract.batch_tokens = {self.run.extract.batch_tokens}: the GPU's memory cannot"
                " hold such a batch beside the target; lower it and run the same command again"
            ) from error


def save_head(
    store: WritableStore,
    run: ExtractRun,
    target: TransformersTarget,
    *,
    token_ids: Int32[ndarray, "tokens"],
) -> None:
    """Puts the target's head into the store, once; the facts come last and say it is whole."""
    try:
        open_store(run.store_dir).head_bytes(FACTS_FILE)
    except (StoreError, OSError):
        files = target.together(head_files, folder=resolve_target(run.target), token_ids=token_ids)
        for name in sorted(files, key=lambda each: (each == FACTS_FILE, each)):
            store.put_head_file(name, files[name])


class _Pace:
    """How fast a unit goes, to tell whether it can still be finished."""

    def __init__(self, num_tokens: int):
        self.num_done = 0
        self._num_tokens = num_tokens
        self._start_s = time.monotonic()

    def ends_in(self, seconds: float) -> bool:
        """Whether the rest, at the pace so far, takes less than these seconds."""
        elapsed_s = time.monotonic() - self._start_s
        left_s = elapsed_s * (self._num_tokens / max(1, self.num_done) - 1)
        return left_s < seconds
