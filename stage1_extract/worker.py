"""The worker: what one process, or the first of a group, does with one unit after another."""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from jaxtyping import Int32
from numpy import ndarray

from stage1_extract.ahead import one_ahead
from stage1_extract.batches import batches_for
from stage1_extract.config import ExtractRun
from stage1_extract.conversations import Conversations
from stage1_extract.head_needs import lacking_head_files
from stage1_extract.open_shard import OpenShard
from stage1_extract.parity import choose_way
from stage1_extract.pipeline import Pipeline, ShardInProgress
from stage1_extract.preparation import run_sequence
from stage1_extract.problems import UnusableConversationError
from stage1_extract.sequences import TokenSequence
from stage1_extract.signals import StopRequest
from stage1_extract.target import resolve_target
from stage1_extract.target_head import head_files
from stage1_extract.target_transformers import TransformersTarget
from stage1_extract.worker_metrics import WorkerMetrics
from storage.head import FACTS_FILE, LAST_LAYERS_FILE
from storage.schema import LayerRecord, UnitId
from storage.writer import WritableStore

_PROOF_SEQUENCES = 3
_PROOF_TOKENS = 256
_PROOF_UNITS = 8


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
class UnitContent:
    """The conversations of a unit as tokens."""

    sequences: list[TokenSequence] = field(default_factory=list)
    unusable: dict[str, UnusableConversationError] = field(default_factory=dict)
    """By id what is wrong with those that cannot be used."""


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
        Sequences with NaN or infinity prove nothing and are left out. Units without a usable
        sequence are passed over, and when there is no other one that is said: nothing can be
        stored then, and the head is saved when there is.

        Raises:
            ValueError: States or head follow no rule that stage 2 could rely on, or all sequences
                tried give NaN.
        """
        num_tried = num_units = 0
        for unit in units:
            usable = self.read_unit(unit).sequences
            if not usable:
                continue
            proof = [each.token_ids[:_PROOF_TOKENS] for each in usable[:_PROOF_SEQUENCES]]
            proof.append(max(usable, key=lambda each: each.num_tokens).token_ids)
            finite = [token_ids for token_ids in proof if self.is_finite(token_ids)]
            if finite:
                self.choose_way(finite)
                save_head(self.store, self.run, self.target, token_ids=finite[0])
                return
            num_tried, num_units = num_tried + len(proof), num_units + 1
            if num_units == _PROOF_UNITS:
                break
        if num_tried:
            raise ValueError(
                f"target.model: {self.run.target.model} gives NaN or infinity for all {num_tried}"
                f" sequences tried; check its weights, and target.dtype = {self.run.target.dtype}"
                " (float16 overflows where bfloat16 does not)"
            )
        print(
            "no conversation of these units can be used: there is nothing to store, and no head of"
            " the target is saved",
            file=sys.stderr,
            flush=True,
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
        choose_way(
            self.target,
            proof,
            layers=list(self.layers),
            settings=self.run.extract,
            batch_tokens=self.batch_tokens,
        )
        if self.target.compiled is not None:
            self.metrics.evidence = self.target.compiled.evidence

    def extract_units(self, units: Iterable[UnitId]) -> None:
        """Computes and commits units one after another, until a stop is asked for.

        On a GPU the next unit's conversations become tokens while the present one is computed.
        """
        wanted = takewhile(lambda _: not self.stop, units)
        still_open = (unit for unit in wanted if not self.store.is_committed(unit))
        one_by_one = ((unit, self.read_unit(unit)) for unit in still_open)
        is_beside = self.pipeline is not None
        for unit, content in one_ahead(self.read_unit, still_open) if is_beside else one_by_one:
            if self.stop:
                return
            self.extract_unit(unit, content)

    def extract_unit(self, unit: UnitId, content: "UnitContent") -> None:
        """Computes a unit and commits it whole, or drops it.

        It is dropped when a stop leaves no time for it, or when another worker commits it first.
        With a pipeline the commit comes later, by the time the pipeline is drained.
        """
        sequences = content.sequences
        batches = batches_for(
            self.target.batching,
            [each.num_tokens for each in sequences],
            batch_tokens=self.batch_tokens,
        )
        pace = _Pace(sum(each.num_tokens for each in sequences))
        with self.open_shard(unit) as shard:
            shard.skip(content.unusable)
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

    def read_unit(self, unit: UnitId) -> "UnitContent":
        """The unit's conversations as tokens."""
        with self.metrics.timed("tokenize"):
            content = UnitContent()
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
                    content.unusable[sequence_id] = problem
                else:
                    content.sequences.append(sequence)
        return content

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
    """Puts the target's head into the store, once; what is lost of it is put again."""
    lacking = lacking_head_files(store, run)
    if not lacking:
        return
    files = target.together(
        head_files,
        folder=resolve_target(run.target),
        token_ids=token_ids,
        # They are kept once, as many as the first run wanted.
        num_last_layers=run.store.last_layers if LAST_LAYERS_FILE in lacking else 0,
    )
    if FACTS_FILE not in lacking:
        # The rest stands as the first run wrote it, perhaps with other versions of libraries.
        files = {name: data for name, data in files.items() if name in lacking}
    # The facts come last: trainings that wait for the head begin with them.
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
