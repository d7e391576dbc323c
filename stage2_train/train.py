"""Train one drafter: the page that tells stage 2's story, from the store to a checkpoint."""

import importlib.metadata
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor

from stage2_train.architecture import DrafterArchitecture, resolve_architecture
from stage2_train.checkpoint import (
    latest_checkpoint,
    load_tensors,
    read_architecture,
    read_state,
    remove_old_checkpoints,
    save_checkpoint,
)
from stage2_train.collate import PackedBatch
from stage2_train.compile import Evidence
from stage2_train.config import DrafterRun
from stage2_train.data import BatchMaker, make_batch_maker, plan_epoch, wait_for_store
from stage2_train.decode import LayerDecoder, layer_decoders
from stage2_train.device import choose_device, choose_dtype
from stage2_train.drafter import Drafter, initialize
from stage2_train.export import load_any_drafter
from stage2_train.fast_path import FastPath, make_fast_path
from stage2_train.fp8 import freeze_fp8, use_fp8
from stage2_train.metrics import BlockSums
from stage2_train.monitor import Monitor
from stage2_train.optimizer import MasterAdamW, learning_rate
from stage2_train.position import Position, total_steps
from stage2_train.step import batch_loss
from stage2_train.target_head import TargetHead, load_target_head
from stage2_train.validation import validate
from storage.lock import only_process_in
from storage.reader import Snapshot, Store

EXIT_DONE, EXIT_STOPPED_EARLY = 0, 75
# Settings that say what a position means: a run with others cannot go on from a checkpoint.
POSITION_SETTINGS = ("seed", "batch_tokens")
T = TypeVar("T")


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
        is_done = False
        while position.epoch < run.train.epochs and not is_done:
            snapshot = store.snapshot(position.snapshot_id)
            position, is_done = training.epoch(snapshot, position.in_snapshot(snapshot.id), stop)
            if stop.is_set() and not is_done:
                say(f"stopped after step {position.step}")
                return EXIT_STOPPED_EARLY
        say(f"done: {position.step} steps")
    return EXIT_DONE


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
        self, snapshot: Snapshot, position: Position, stop: "StopSignals"
    ) -> tuple[Position, bool]:
        """Trains the rest of an epoch; says whether that was the end of all training."""
        train = self.run.train
        planned = plan_epoch(
            snapshot, seed=train.seed, epoch=position.epoch, batch_tokens=train.batch_tokens
        )
        steps = total_steps(
            position, num_batches=len(planned), epochs=train.epochs, max_steps=train.max_steps
        )
        if position.step >= steps:
            return position, True
        batches = self.batches.batches(snapshot, planned[position.batch :], epoch=position.epoch)
        for batch, wait_s in timed(batches):
            position = self.step(batch, position, steps=steps, wait_s=wait_s)
            is_last = position.step >= steps
            if is_last or position.step % train.validation_steps == 0:
                self.validate(snapshot, position)
            if is_last or stop.is_set() or position.step % train.checkpoint_steps == 0:
                self.save(position, is_done=is_last)
            if is_last or stop.is_set():
                return position, is_last
        return position.next_epoch(), False

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


def prepare(run: DrafterRun, store: Store) -> tuple[Training, Position]:
    """Builds everything a training needs, and takes over the last whole checkpoint if any."""
    device = choose_device()
    dtype = choose_dtype(run.train.dtype, device)
    stored_head = load_target_head(store)
    architecture = architecture_for(run, store, stored_head)
    head = stored_head.to(device, dtype)
    with torch.device("meta"):
        drafter = Drafter(architecture)
    # Drawn once: a billion weights take seconds.
    initialize(drafter.to_empty(device="cpu"), seed=run.train.seed)
    if run.drafter.init_from is not None:
        take_weights(drafter, Path(run.drafter.init_from))
    optimizer = MasterAdamW(drafter, run.train.optimizer, device=device, dtype=dtype)
    position = resume(run, architecture, optimizer)
    is_compiled = device.type == "cuda" if run.train.compile is None else run.train.compile
    if run.train.fp8:
        head = use_fp8_products(drafter, head)
    batches = make_batch_maker(run.train, architecture, device)
    training = Training(
        run=run,
        drafter=drafter,
        optimizer=optimizer,
        monitor=Monitor(
            run.drafter_dir,
            first_step=position.step,
            device=device,
            architecture=architecture,
        ),
        head=head,
        decoders=layer_decoders(store.layers, batches.layer_names, device),
        batches=batches,
        fast_path=choose_fast_path(run.train.attention, device, is_compiled=is_compiled),
        evidence=Evidence(is_compiling_wanted=is_compiled),
        validation={},
    )
    num_weights = sum(weight.numel() for weight in optimizer.masters)
    say(
        f"drafter {run.drafter.name}: {num_weights / 1e6:.1f} M weights, layers "
        f"{', '.join(batches.layer_names)}, {dtype} on {device}, from step {position.step}"
    )
    return training, position


def choose_fast_path(
    attention: str | None, device: torch.device, *, is_compiled: bool
) -> FastPath | None:
    """Gives the compiled layers on a GPU, and None where the plain ones are used.

    Raises:
        ValueError: FlexAttention is asked for where it cannot train.
    """
    if attention == "flex" and device.type != "cuda":
        raise ValueError(
            'train.attention = "flex" needs a GPU, for FlexAttention has no gradient on a CPU; '
            "leave the setting out"
        )
    if attention == "sdpa" or device.type != "cuda":
        return None
    return make_fast_path(is_compiled=is_compiled)


def use_fp8_products(drafter: Drafter, head: TargetHead) -> TargetHead:
    """Makes the drafter's linear maps and the head's products fp8; gives the head.

    Raises:
        ValueError: the device has no fp8 products, or a width does not suit them.
    """
    device = drafter.fc.weight.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError(f"train.fp8 needs a GPU with fp8 products, found {device}; turn it off")
    use_fp8(drafter)
    return replace(head, fp8=freeze_fp8(head.lm_head_weight))


def architecture_for(run: DrafterRun, store: Store, head: TargetHead) -> DrafterArchitecture:
    """Resolves the drafter's shape and checks that settings, store and target fit together."""
    if head.hidden_size != store.identity.hidden_size:
        raise ValueError(
            f"the store's head has width {head.hidden_size}, its hidden states "
            f"{store.identity.hidden_size}; extract the head of the same target again"
        )
    if run.train.batch_tokens < run.drafter.block_size:
        raise ValueError(
            f"train.batch_tokens {run.train.batch_tokens} is smaller than a block of "
            f"{run.drafter.block_size}; raise it to the length of your sequences"
        )
    return resolve_architecture(
        run.drafter,
        target_config=head.config,
        vocab_size=head.vocab_size,
        num_target_layers=store.identity.num_target_layers,
        stored_layer_ids=[int(name) for name in store.layers if name.isdigit()],
        mask_token_id=head.mask_token_id,
        scales={
            "input_embedding_scale": head.embedding_scale,
            "output_multiplier": head.logit_scale,
            "final_logit_softcapping": head.final_logit_softcapping,
        },
    )


def take_weights(drafter: Drafter, folder: Path) -> None:
    """Starts from the weights of another drafter of the same shape, in any layout we read."""
    shape = drafter.architecture
    other = load_any_drafter(folder, num_target_layers=shape.num_target_layers)
    if other.architecture.target_layer_ids != shape.target_layer_ids:
        raise ValueError(
            f"init_from {folder} reads target layers {other.architecture.target_layer_ids}, this "
            f"drafter {shape.target_layer_ids}; they must be the same"
        )
    try:
        drafter.load_state_dict(other.state_dict())
    except RuntimeError as error:
        first = str(error).splitlines()[-1].strip()
        raise ValueError(f"init_from {folder} has another shape: {first}") from error


def resume(run: DrafterRun, architecture: DrafterArchitecture, optimizer: MasterAdamW) -> Position:
    """Takes over the newest whole checkpoint; without one the run starts at its beginning.

    Raises:
        ValueError: the checkpoint is of another drafter, or its position means something else.
    """
    checkpoint = latest_checkpoint(run.drafter_dir)
    if checkpoint is None:
        return Position()
    state = read_state(checkpoint)
    before, now = state["settings"]["train"], run.train.model_dump(mode="json")
    changed = [
        f"train.{name} was {before[name]}, is {now[name]}"
        for name in POSITION_SETTINGS
        if before[name] != now[name]
    ]
    shape_before = read_architecture(checkpoint).to_config()
    changed += [
        f"{name} was {shape_before.get(name)}, is {value}"
        for name, value in architecture.to_config().items()
        if shape_before.get(name) != value
    ]
    if changed:
        raise ValueError(
            f"{checkpoint} cannot be resumed with other settings: {'; '.join(changed)}; restore "
            "them, or give the drafter another name"
        )
    optimizer.load(*load_tensors(checkpoint))
    say(f"resuming {checkpoint}")
    return Position.from_json(state["position"])


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


class StopSignals:
    """Notes SIGTERM and SIGUSR1 instead of dying: the current step ends in a checkpoint."""

    def __init__(self) -> None:
        self._is_set = False
        self._before: dict[int, Any] = {}

    def is_set(self) -> bool:
        """Says whether a signal came."""
        return self._is_set

    def __enter__(self) -> "StopSignals":
        for number in (signal.SIGTERM, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_set = True


def versions() -> dict[str, str]:
    """Gives the versions of the packages that shape a result."""
    names = ("torch", "transformers", "numpy", "safetensors", "zarr")
    return {name: importlib.metadata.version(name) for name in names}


def say(line: str) -> None:
    """Prints a line at once, for the launcher to pass on."""
    print(line, flush=True)
