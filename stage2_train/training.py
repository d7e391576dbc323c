"""A running training: epochs, steps, validations, checkpoints."""

import importlib.metadata
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import Tensor

from stage2_train.checkpoint import remove_old_checkpoints, save_checkpoint
from stage2_train.collate import PackedBatch
from stage2_train.compile import Evidence
from stage2_train.config import DrafterRun
from stage2_train.data import BatchMaker, plan_epoch
from stage2_train.decode import LayerDecoder
from stage2_train.drafter import Drafter
from stage2_train.fast_path import FastPath
from stage2_train.metrics import BlockSums
from stage2_train.monitor import Monitor
from stage2_train.optimizer import MasterAdamW, learning_rate
from stage2_train.position import Position, total_steps
from stage2_train.signals import StopSignals
from stage2_train.step import batch_loss
from stage2_train.target_head import TargetHead
from stage2_train.validation import validate
from storage.reader import Snapshot

T = TypeVar("T")
Ending = Literal["epoch", "done", "stopped"]


@dataclass
class Training:
    """The parts of a running training; everything that changes lies in three of them."""

    run: DrafterRun
    drafter: Drafter
    optimizer: MasterAdamW
    monitor: Monitor
    head: TargetHead
    decoders: tuple[LayerDecoder, ...]
    batches: BatchMaker
    fast_path: FastPath | None
    evidence: Evidence
    validation: dict[str, Any]
    """What the last validation found, with its step."""

    def epoch(
        self, snapshot: Snapshot, position: Position, stop: StopSignals
    ) -> tuple[Position, Ending]:
        """Trains the rest of an epoch; says how it ended: all of it, all training, or stopped."""
        train = self.run.train
        planned = plan_epoch(
            snapshot, seed=train.seed, epoch=position.epoch, batch_tokens=train.batch_tokens
        )
        steps = total_steps(
            position, num_batches=len(planned), epochs=train.epochs, max_steps=train.max_steps
        )
        if position.step >= steps:
            return position, "done"
        batches = self.batches.batches(snapshot, planned[position.batch :], epoch=position.epoch)
        for batch, wait_s in timed(batches):
            position = self.step(batch, position, steps=steps, wait_s=wait_s)
            is_last = position.step >= steps
            if is_last or position.step % train.validation_steps == 0:
                self.validate(snapshot, position)
            is_stopped = stop.is_set()
            if is_last or is_stopped or position.step % train.checkpoint_steps == 0:
                self.save(position, is_done=is_last)
            if is_last or is_stopped:
                return position, "done" if is_last else "stopped"
        return position.next_epoch(), "epoch"

    def step(
        self, batch: PackedBatch, position: Position, *, steps: int, wait_s: float
    ) -> Position:
        """Trains one batch and reports where a report is due."""
        train = self.run.train
        rate = learning_rate(position.step, total_steps=steps, config=train.optimizer)
        sums, gradient_norm = self._update(batch, rate)
        self.monitor.add(batch, sums, wait_s=wait_s)
        position = position.after_step()
        if position.step % train.log_steps == 0 or position.step in (1, steps):
            self.monitor.report(
                step=position.step,
                total_steps=steps,
                epoch=position.epoch,
                learning_rate=rate,
                gradient_norm=gradient_norm,
                evidence=self.evidence.take(),
            )
        return position

    def _update(self, batch: PackedBatch, rate: float) -> tuple[BlockSums, Tensor]:
        result = batch_loss(
            self.drafter,
            batch,
            head=self.head,
            decoders=self.decoders,
            chunk_rows=self.run.train.loss.chunk_rows,
            fast_path=self.fast_path,
        )
        result.loss.backward()
        self.evidence.add_step(is_compiled=result.is_compiled)
        return result.sums, self.optimizer.step(rate)

    def validate(self, snapshot: Snapshot, position: Position) -> None:
        """Measures the drafter on held-out sequences; training goes on unchanged."""
        with self.monitor.pause(), self.evidence.compiling_allowed():
            found = validate(
                self.drafter,
                snapshot,
                head=self.head,
                decoders=self.decoders,
                batches=self.batches,
                num_sequences=self.run.train.validation_sequences,
                chunk_rows=self.run.train.loss.chunk_rows,
                fast_path=self.fast_path,
            )
        self.validation = {"step": position.step, **found}
        self.monitor.report_validation(step=position.step, validation=found)

    def save(self, position: Position, *, is_done: bool) -> None:
        """Writes a checkpoint and removes those no longer kept."""
        with self.monitor.pause():
            is_current = self.validation.get("step") == position.step
            save_checkpoint(
                self.run.drafter_dir,
                step=position.step,
                architecture=self.drafter.architecture,
                weights=self.optimizer.weights(),
                optimizer=self.optimizer.state(),
                state={
                    "position": position.to_json(),
                    "is_done": is_done,
                    "validation": self.validation if is_current else None,
                    "settings": self.run.model_dump(mode="json"),
                    "versions": versions(),
                },
            )
            remove_old_checkpoints(self.run.drafter_dir, keep=self.run.train.keep_checkpoints)


def timed(batches: Iterable[T]) -> Iterator[tuple[T, float]]:
    """Yields each batch with the seconds that were spent waiting for it."""
    iterator = iter(batches)
    while True:
        start_s = time.perf_counter()
        try:
            batch = next(iterator)
        except StopIteration:
            return
        yield batch, time.perf_counter() - start_s


def versions() -> dict[str, str]:
    """Gives the versions of the packages that shape a result."""
    names = ("torch", "transformers", "numpy", "safetensors", "zarr")
    return {name: importlib.metadata.version(name) for name in names}
