"""A running training: epochs, steps, validations, checkpoints."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from stage2_train.batches import Share, Window, share_steps
from stage2_train.checkpoint import remove_old_checkpoints, save_checkpoint
from stage2_train.collate import PackedBatch, without_weights
from stage2_train.compile import Evidence
from stage2_train.compile_cache import CompileCache
from stage2_train.config import DrafterRun
from stage2_train.data import BatchMaker, plan_epoch
from stage2_train.decode import LayerDecoder
from stage2_train.drafter import Drafter
from stage2_train.fast_path import FastPath
from stage2_train.gradients import GradientSum
from stage2_train.live_line import epoch_words
from stage2_train.monitor import Monitor
from stage2_train.optimizer import MasterAdamW, learning_rate
from stage2_train.position import Position, total_steps
from stage2_train.ranks import Ranks
from stage2_train.sharding import ShardedAdamW, ShardedPath, whole_drafter
from stage2_train.signals import StopSignals
from stage2_train.step import batch_loss
from stage2_train.target_head import TargetHead
from stage2_train.validation import validate
from storage.reader import Snapshot
from storage.versions import versions

Ending = Literal["epoch", "done", "stopped"]


@dataclass(frozen=True, kw_only=True)
class StepBatches:
    """The batches of one update that this rank computes."""

    arriving: Iterator[PackedBatch]
    num_own: int
    num_all: int
    """Batches of the update over all ranks."""


@dataclass
class Training:
    """The parts of a running training; everything that changes lies in three of them."""

    run: DrafterRun
    drafter: Drafter
    optimizer: MasterAdamW | ShardedAdamW
    gradients: GradientSum
    ranks: Ranks
    batches_per_step: int
    monitor: Monitor
    head: TargetHead
    decoders: tuple[LayerDecoder, ...]
    batches: BatchMaker
    fast_path: FastPath | None
    sharded_path: ShardedPath | None
    """Runs the drafter in steps where its weights are spread over the ranks."""
    evidence: Evidence
    validation: dict[str, Any]
    """What the last validation found, with its step."""
    target: dict[str, str]
    """Name of the target whose states are learned, and its weights' digest."""
    cache: CompileCache | None = None
    """What was compiled, to be kept with the checkpoints."""

    def epoch(
        self, snapshot: Snapshot, position: Position, stop: StopSignals
    ) -> tuple[Position, Ending]:
        """Trains the rest of an epoch; says how it ended: all of it, all training, or stopped."""
        train = self.run.train
        planned = plan_epoch(
            snapshot,
            seed=train.seed,
            epoch=position.epoch,
            batch_tokens=train.batch_tokens,
            window_tokens=train.window_tokens,
            data_fraction=train.data_fraction,
        )
        steps = total_steps(
            position,
            num_batches=len(planned),
            batches_per_step=self.batches_per_step,
            epochs=train.epochs,
            max_steps=train.max_steps,
        )
        if position.step >= steps:
            return position, "done"
        words = epoch_words(
            snapshot.num_tokens[planned.order],
            num_batches=len(planned),
            batch_tokens=train.batch_tokens,
            window_tokens=train.window_tokens,
        )
        self.monitor.say_epoch(position.epoch, words)
        for batches in self.steps_of(snapshot, planned, position):
            position, is_stopped = self.step(batches, position, steps=steps, stop=stop)
            is_last = position.step >= steps
            if is_last or position.step % train.validation_steps == 0:
                self.validate(snapshot, position)
            if self.is_checkpoint_due(position.step, is_end=is_last or is_stopped):
                self.save(position, is_done=is_last)
            if is_last or is_stopped:
                return position, "done" if is_last else "stopped"
        return position.next_epoch(), "epoch"

    def is_checkpoint_due(self, step: int, *, is_end: bool) -> bool:
        """Says whether a checkpoint is written behind a step."""
        return is_end or step % self.run.train.checkpoint_steps == 0

    def steps_of(
        self, snapshot: Snapshot, planned: Sequence[Sequence[Window]], position: Position
    ) -> Iterator[StepBatches]:
        """Yields the batches of each step that this rank computes, read ahead."""
        left = planned[position.batch :]

        def shares() -> Iterator[list[Share]]:
            return share_steps(
                left,
                batches_per_step=self.batches_per_step,
                rank=self.ranks.rank,
                num_ranks=self.ranks.size,
            )

        # Made as they come, once for the reader ahead and once here: an epoch can be long.
        windows = (share.windows for of_step in shares() for share in of_step)
        arriving = self.batches.batches(snapshot, windows, epoch=position.epoch)
        for number, of_step in enumerate(shares()):
            yield StepBatches(
                arriving=self._arriving(arriving, of_step),
                num_own=len(of_step),
                num_all=min(self.batches_per_step, len(left) - number * self.batches_per_step),
            )

    def _arriving(
        self, batches: Iterator[PackedBatch], of_step: Sequence[Share]
    ) -> Iterator[PackedBatch]:
        for share in of_step:
            with self.monitor.waits.span():
                batch = next(batches)
            yield without_weights(batch) if share.is_filler else batch

    def step(
        self, batches: StepBatches, position: Position, *, steps: int, stop: StopSignals
    ) -> tuple[Position, bool]:
        """Makes one update and reports where a report is due; says whether a rank was stopped."""
        train = self.run.train
        rate = learning_rate(position.step, total_steps=steps, config=train.optimizer)
        is_stopped, num_tokens = self._sum_gradients(batches, stop)
        gradient_norm = self.optimizer.step(rate)
        self.monitor.end_step()
        position = position.after_step(num_batches=batches.num_all, num_tokens=num_tokens)
        is_end = is_stopped or position.step >= steps
        # Also before each checkpoint: no step is left out, and bad weights are not kept.
        is_kept = self.is_checkpoint_due(position.step, is_end=is_end)
        if is_kept or position.step % train.log_steps == 0 or position.step == 1:
            self.monitor.report(
                step=position.step,
                total_steps=steps,
                epoch=position.epoch,
                num_tokens_seen=position.num_tokens,
                learning_rate=rate,
                gradient_norm=gradient_norm,
                evidence=self.evidence.take(),
            )
        return position, is_stopped

    def _sum_gradients(self, batches: StepBatches, stop: StopSignals) -> tuple[bool, int]:
        """Leaves the step's gradient in the parameters.

        Returns:
            Whether any rank was told to stop, and how many tokens all ranks trained.
        """
        loss = self.run.train.loss
        is_only_one = batches.num_own == self.ranks.size == 1
        # What several batches are divided by is known when all are through.
        weight_sum = None if is_only_one else self.batches.full_weight_sum
        is_compiled, own_weight, own_tokens = True, 0.0, 0
        for number, batch in enumerate(batches.arriving):
            if number > 0:
                self.gradients.add()
            result = batch_loss(
                self.drafter,
                batch,
                head=self.head,
                decoders=self.decoders,
                chunk_rows=loss.chunk_rows,
                kind=loss.kind,
                pace_smoothing=loss.pace_smoothing if loss.is_paced else None,
                weight_sum=weight_sum,
                fast_path=self.sharded_path or self.fast_path,
            )
            result.loss.backward()
            is_compiled = is_compiled and result.is_compiled
            own_weight += batch.weight_sum
            own_tokens += batch.num_real_tokens
            if batch.num_real_tokens > 0:
                self.monitor.add(batch, result.sums)
        self.evidence.add_step(is_compiled=is_compiled)
        weight, num_stopped, num_tokens = self.ranks.sum(
            own_weight, float(stop.is_set()), float(own_tokens)
        )
        if not is_only_one:
            self.gradients.finish(self.batches.full_weight_sum / max(weight, 1e-30))
        return num_stopped > 0, int(num_tokens)

    def validate(self, snapshot: Snapshot, position: Position) -> None:
        """Measures the drafter on held-out sequences; training goes on unchanged."""
        with self.monitor.pause(), self.evidence.compiling_allowed():
            drafter = self.drafter
            if self.sharded_path is not None:
                drafter = whole_drafter(drafter, dtype=self.head.embed_weight.dtype)
            found = validate(
                drafter,
                snapshot,
                head=self.head,
                decoders=self.decoders,
                # Its copies are no part of the steps' time; the processes are an epoch ahead.
                batches=replace(self.batches, copies=None, processes=None),
                num_sequences=self.run.train.validation_sequences,
                loss=self.run.train.loss,
                fast_path=self.fast_path,
                ranks=self.ranks,
            )
        self.validation = {"step": position.step, **found}
        self.monitor.report_validation(step=position.step, validation=found)

    def save(self, position: Position, *, is_done: bool) -> None:
        """Writes a checkpoint and removes those no longer kept: the first rank does, for all."""
        with self.monitor.pause():
            weights, optimizer = self.optimizer.weights(), self.optimizer.state()
            if self.ranks.is_first:
                is_current = self.validation.get("step") == position.step
                save_checkpoint(
                    self.run.drafter_dir,
                    step=position.step,
                    architecture=self.drafter.architecture,
                    weights=weights,
                    optimizer=optimizer,
                    state={
                        "position": position.to_json(),
                        "is_done": is_done,
                        "validation": self.validation if is_current else None,
                        "target": self.target,
                        "settings": self.run.model_dump(mode="json"),
                        "batches_per_step": self.batches_per_step,
                        "num_ranks": self.ranks.size,
                        "versions": versions(),
                    },
                )
                if self.cache is not None:
                    self.cache.pin(say=self.monitor.say)
                remove_old_checkpoints(self.run.drafter_dir, keep=self.run.train.keep_checkpoints)
            # Nobody goes on, or leaves, before it is on disk.
            self.ranks.sum(0.0)
