"""Plan: what a run will take, stage by stage, before anything runs. Loads no weights.

Sizes follow from the data's tokens and the target's configuration; hours from a table of devices or
from a measurement. Tables and JSON of it are in `plan_report`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dflash_offline.config import RunConfig, drafter_run, extract_run
from dflash_offline.launch import count_gpus, slots
from dflash_offline.plan_training import TrainingPlan, plan_training, planned_architecture
from stage1_extract.config import ExtractRun
from stage1_extract.plan import StoreShape, StoreSize, Way, WorkerMemory

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from stage1_extract.plan_counts import TokenCount
    from stage1_extract.plan_room import Room

MEASURED_SEQUENCES = 256
MEASURED_S = 20.0


@dataclass(frozen=True, kw_only=True)
class ExtractionPlan:
    """Stage 1."""

    target: str
    num_parameters: int
    shape: StoreShape
    count: "TokenCount"
    size: StoreSize
    bytes_by_encoding: dict[str, int]
    """The whole store in every encoding that suits it, those of `store encode` included."""
    room: "Room"
    ways: list[Way]
    """How it would fit, where it does not."""
    problem: str | None
    """Why `extract` would refuse to start."""
    device: str
    num_workers: int
    worker_tokens_per_s: float | None
    """None where the table does not hold the device."""
    is_measured: bool
    memory: WorkerMemory

    @property
    def hours(self) -> float | None:
        """Until the store is full, all workers together."""
        if self.worker_tokens_per_s is None:
            return None
        return self.count.num_tokens / (self.worker_tokens_per_s * self.num_workers) / 3600

    @property
    def write_bytes_per_s(self) -> float | None:
        """What the disk has to take from all workers together."""
        if self.worker_tokens_per_s is None:
            return None
        return self.worker_tokens_per_s * self.num_workers * self.shape.state_bytes


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Both stages."""

    extraction: ExtractionPlan
    training: list[TrainingPlan]


def plan_run(config: RunConfig, *, measure: bool) -> RunPlan:
    """Plans a run from its data and the target's configuration.

    Args:
        config: The run file, checked.
        measure: Whether to load the target and time its forward pass instead of using the table.

    Raises:
        ValueError: Target, data or a setting is unusable.
    """
    import torch

    from stage1_extract.target import resolve_target
    from stage1_extract.target_files import load_config

    run = extract_run(config)
    folder = resolve_target(run.target, weights=False)
    light = run.model_copy(update={"target": run.target.model_copy(update={"model": folder})})
    target_config = load_config(light.target)
    check_later_stages(config, target_config)
    gpu_name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    extraction = _plan_extraction(run, light, target_config, gpu_name, measure=measure)
    return RunPlan(
        extraction=extraction,
        training=[
            plan_training(
                drafter_run(config, drafter.name),
                target_config,
                extraction.shape,
                extraction.count,
                held_out_fraction=config.store.held_out_fraction,
                gpu_name=gpu_name,
            )
            for drafter in config.drafter
        ],
    )


def check_later_stages(config: RunConfig, target_config: "PretrainedConfig") -> None:
    """Refuses what would otherwise stop the run only after the hours of stage 1.

    Args:
        config: The run file, checked.
        target_config: The target's configuration.

    Raises:
        ValueError: A drafter does not fit the target or the store, or a suite is unknown.
    """
    from dflash_offline.suites import refuse_unknown_suite
    from stage1_extract.preparation import store_shape

    shape = store_shape(extract_run(config), target_config)
    for drafter in config.drafter:
        planned_architecture(drafter_run(config, drafter.name), target_config, shape)
    for suite in config.eval.suites:
        refuse_unknown_suite(suite)


def _plan_extraction(
    run: ExtractRun,
    light: ExtractRun,
    target_config: "PretrainedConfig",
    gpu_name: str | None,
    *,
    measure: bool,
) -> ExtractionPlan:
    import torch

    from stage1_extract.plan import store_size, ways_to_fit, worker_memory
    from stage1_extract.plan_rates import estimated_rate, target_skeleton
    from stage1_extract.plan_room import WRITABLE_ENCODINGS, room_of
    from stage1_extract.preparation import store_shape
    from stage1_extract.target import target_name
    from storage.encodings import encodings_for

    shape = store_shape(run, target_config)
    skeleton = target_skeleton(light.target, shape.layers)
    count, sequences = _count(light, target_config)
    size = store_size(count, shape)
    room = room_of(run, stored_bytes=0)
    limits = [limit for limit in (room.free_bytes, room.max_bytes) if limit is not None]
    problem, is_planned = _problem_with_room(run, count, shape, room)
    group_size = run.extract.gpus_per_worker
    if measure:
        rate: float | None = _measure(run, sequences, shape)
    else:
        rate = estimated_rate(
            skeleton,
            mean_context_tokens=count.mean_context_tokens,
            gpu_name=gpu_name,
            dtype=run.target.dtype,
            num_places=group_size if gpu_name else group_size * run.extract.torch_threads,
        )
    places = slots(
        run.extract.gpus,
        available_gpus=count_gpus(),
        cpu_processes=run.extract.num_workers * group_size,
        first=True,
    )
    return ExtractionPlan(
        target=target_name(run.target),
        num_parameters=skeleton.num_parameters,
        shape=shape,
        count=count,
        size=size,
        bytes_by_encoding={
            name: store_size(count, replace(shape, encoding=name)).num_bytes
            for name in encodings_for(shape.hidden_size)
        },
        room=room,
        ways=(
            ways_to_fit(count, shape, max_bytes=min(limits), encodings=WRITABLE_ENCODINGS)
            if problem and limits and not is_planned
            else []
        ),
        problem=problem,
        device=gpu_name or "CPU",
        num_workers=max(1, len(places) // group_size),
        worker_tokens_per_s=rate,
        is_measured=measure,
        memory=worker_memory(
            shape,
            num_parameters=skeleton.num_parameters,
            element_bytes=getattr(torch, run.target.dtype).itemsize,
            batch_tokens=max(run.extract.batch_tokens, count.longest_tokens),
            mlp_size=_mlp_size(target_config),
            num_gpus=group_size,
            write_buffer_bytes=int(run.extract.write_buffer_bytes) if gpu_name else None,
        ),
    )


def _problem_with_room(
    run: ExtractRun, count: "TokenCount", shape: StoreShape, room: "Room"
) -> tuple[str | None, bool]:
    """Why `extract` would refuse to start now, and whether the store has a plan already.

    What the store holds already needs no room.
    """
    from stage1_extract.plan_room import problem_with_room, room_of
    from stage1_extract.planning import committed_bytes
    from storage.errors import StoreNotFoundError
    from storage.reader import open_store
    from storage.writer import open_for_writing

    try:
        store = open_for_writing(run.store_dir)
    except StoreNotFoundError:
        return problem_with_room(run, count, shape, room), False
    is_planned = bool(store.units())
    stored_bytes = committed_bytes(run, store, shape)
    if stored_bytes > 0:
        snapshot = open_store(run.store_dir).snapshot()
        count = replace(
            count,
            num_sequences=max(0, count.num_sequences - snapshot.num_sequences),
            num_tokens=max(0, count.num_tokens - int(snapshot.num_tokens.sum())),
        )
        if count.num_tokens == 0:
            return None, is_planned
        shape, room = replace(shape, head_bytes=0), room_of(run, stored_bytes=stored_bytes)
    return problem_with_room(run, count, shape, room, is_planned=is_planned), is_planned


def _count(
    run: ExtractRun, target_config: "PretrainedConfig"
) -> tuple["TokenCount", Callable[[int], list[Any]]]:
    """Tokens of the data, and a way to get some of its sequences."""
    from stage1_extract.plan_counts import sample, usable_sequences
    from stage1_extract.planning import counted
    from stage1_extract.preparation import open_conversations, run_sequence
    from stage1_extract.target_files import load_tokenizer

    tokenizer = load_tokenizer(run.target)
    conversations = open_conversations(run)

    def tokens_of(conversation_id: str) -> Any:
        return run_sequence(
            run, conversations, conversation_id, tokenizer, vocab_size=target_config.vocab_size
        )

    count = counted(conversations.ids, tokens_of, max_counted=run.data.counted_conversations)
    return count, lambda size: list(usable_sequences(sample(conversations.ids, size), tokens_of))


def _measure(run: ExtractRun, sequences: Callable[[int], list[Any]], shape: StoreShape) -> float:
    from stage1_extract.plan_rates import measured_rate

    if run.extract.gpus_per_worker > 1:
        raise ValueError(
            f"--measure loads the target on one GPU, extract.gpus_per_worker ="
            f" {run.extract.gpus_per_worker} says that it does not fit; plan without it"
        )
    found = sequences(MEASURED_SEQUENCES)
    if not found:
        raise ValueError(
            f"none of {MEASURED_SEQUENCES} conversations drawn can be used; plan without --measure"
        )
    return measured_rate(run, found, shape.layers, seconds=MEASURED_S)


def _mlp_size(target_config: "PretrainedConfig") -> int:
    return int(getattr(target_config, "intermediate_size", None) or 4 * target_config.hidden_size)
