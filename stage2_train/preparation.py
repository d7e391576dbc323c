"""Builds everything a training needs from settings, store and checkpoint, or says what is wrong."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from stage2_train.architecture import DrafterArchitecture, resolve_architecture
from stage2_train.checkpoint import (
    latest_checkpoint,
    list_checkpoints,
    load_tensors,
    read_architecture,
    read_state,
)
from stage2_train.compile import Evidence
from stage2_train.config import DrafterRun, TrainConfig, refuse_less_than_a_block
from stage2_train.data import BatchMaker, in_processes, make_batch_maker
from stage2_train.decode import layer_decoders
from stage2_train.device import choose_device, choose_dtype
from stage2_train.drafter import Drafter, initialize
from stage2_train.fast_path import FastPath, make_fast_path
from stage2_train.fp8 import SUM_MULTIPLE, freeze_fp8, use_fp8
from stage2_train.gradients import GradientSum, WholeGradients
from stage2_train.monitor import Monitor
from stage2_train.optimizer import MasterAdamW
from stage2_train.position import Position
from stage2_train.ranks import ALONE, Ranks
from stage2_train.sharding import ShardedAdamW, ShardedGradients, ShardedPath
from stage2_train.start_weights import take_start_weights
from stage2_train.target_head import TargetHead, load_target_head
from stage2_train.training import Training
from storage.encodings import encoded_bytes_per_token
from storage.reader import Store
from storage.schema import LM_HEAD_INPUT

# Settings that say what a position means: a run with others cannot go on from a checkpoint.
POSITION_SETTINGS = ("seed", "batch_tokens", "window_tokens", "data_fraction")
# Those that change what is learned from here on, but not what a position means.
LEARNING_SETTINGS = ("epochs", "max_steps", "num_anchors", "dtype", "fp8", "loss", "optimizer")
# Hidden size from which fp8 products are faster all in all; between 576, where they are slower, and
# 4,096, where they are not, by the time that products and quantizing take.
MIN_FP8_HIDDEN_SIZE = 2048
# The first GPUs with fp8 products, and those on which training with them was measured.
ADA, HOPPER = (8, 9), (9, 0)


def prepare(run: DrafterRun, store: Store, ranks: Ranks = ALONE) -> tuple[Training, Position]:
    """Builds everything a training needs, and takes over the last whole checkpoint if any."""
    device = choose_device()
    dtype = choose_dtype(run.train.dtype, device)
    batches_per_step = choose_batches_per_step(run.train.batches_per_step, ranks)
    stored_head = load_target_head(store)
    architecture = architecture_for(run, store, stored_head)
    head = stored_head.to(device, dtype)
    with torch.device("meta"):
        drafter = Drafter(architecture)
    # Drawn once: a billion weights take seconds.
    initialize(drafter.to_empty(device="cpu"), seed=run.train.seed)
    checkpoint = find_checkpoint(run, ranks)
    start = None
    if checkpoint is None:
        start = take_start_weights(drafter, run.drafter.init_from, store)
    is_compiled = run.train.compile is not False
    fast_path = choose_fast_path(run.train.attention, device, is_compiled=is_compiled)
    if run.train.compile and fast_path is None:
        raise ValueError(
            'train.compile = true needs a GPU, and not train.attention = "sdpa"; leave it out to '
            "train uncompiled"
        )
    optimizer, gradients, sharded_path = place_weights(
        drafter, run.train, fast_path, device=device, dtype=dtype, ranks=ranks
    )
    monitor = Monitor(run.drafter_dir, device=device, architecture=architecture, ranks=ranks)
    say_damaged(run, checkpoint, say=monitor.say)
    position = Position()
    if checkpoint is not None:
        position = resume(
            checkpoint,
            run,
            architecture,
            optimizer,
            target=target_of(store),
            batches_per_step=batches_per_step,
            say=monitor.say,
        )
    monitor.start(first_step=position.step)
    if start is not None:
        monitor.say(f"starting from {start}")
    fp8 = choose_fp8(run.train, drafter, head)
    products = {False: "", True: " with fp8 products", "all": " with all products in fp8"}[fp8]
    if fp8:
        head = use_fp8_products(drafter, head, weight_gradients=fp8 == "all")
    batches = make_batch_maker(
        run.train,
        architecture,
        device,
        copies=monitor.copies,
        on_damage=monitor.note_damage,
    )
    batches = in_processes(batches, run, store)
    training = Training(
        run=run,
        drafter=drafter,
        optimizer=optimizer,
        gradients=gradients,
        ranks=ranks,
        batches_per_step=batches_per_step,
        monitor=monitor,
        head=head,
        decoders=layer_decoders(store.layers, batches.layer_names, device),
        batches=batches,
        fast_path=fast_path,
        sharded_path=sharded_path,
        evidence=Evidence(is_compiling_wanted=fast_path is not None and is_compiled),
        validation={},
        target=target_of(store),
    )
    num_weights = sum(weight.numel() for weight in optimizer.masters)
    monitor.say(
        f"drafter {run.drafter.name}: {num_weights / 1e6:.1f} M weights, layers "
        f"{', '.join(batches.layer_names)} ({read_bytes_per_token(store, batches):,} bytes read a "
        f"token), {dtype}{products} on {ranks.size} x {device}, from step {position.step}"
    )
    return training, position


def read_bytes_per_token(store: Store, batches: BatchMaker) -> int:
    """Gives what this drafter reads of the store: times its rate, what the disk has to give."""
    records = [store.layers[name] for name in batches.layer_names]
    return sum(encoded_bytes_per_token(each.encoding, each.hidden_size) for each in records)


def place_weights(
    drafter: Drafter,
    train: TrainConfig,
    fast_path: FastPath | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    ranks: Ranks,
) -> tuple[MasterAdamW | ShardedAdamW, GradientSum, ShardedPath | None]:
    """Brings the drafter to its device, whole or spread over the ranks; gives what learns there."""
    if train.parallel == "fsdp" and ranks.size > 1:
        drafter.to(device, torch.float32)
        path = ShardedPath(drafter, fast_path, dtype=dtype, ranks=ranks)
        sharded = ShardedAdamW(drafter, train.optimizer, ranks=ranks)
        return sharded, ShardedGradients(sharded.parameters, ranks), path
    optimizer = MasterAdamW(drafter, train.optimizer, device=device, dtype=dtype)
    return optimizer, WholeGradients(optimizer.parameters, ranks), None


def choose_batches_per_step(wanted: int | None, ranks: Ranks) -> int:
    """Gives the packed batches of one update, of which every rank computes the same number.

    Raises:
        ValueError: they cannot be shared out evenly.
    """
    if wanted is None:
        return ranks.size
    if wanted % ranks.size:
        raise ValueError(
            f"train.batches_per_step {wanted} is no multiple of the {ranks.size} processes of this "
            "drafter (train.gpus_per_drafter)"
        )
    return wanted


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


def choose_fp8(train: TrainConfig, drafter: Drafter, head: TargetHead) -> bool | Literal["all"]:
    """Gives which products are fp8: as set, else all of them where that is faster and possible.

    It trains as good a drafter (docs/how-it-works.md); a narrow one's products are too short to
    make up for what quantizing takes.
    """
    if train.fp8 is not None:
        return train.fp8
    weight = drafter.fc.weight
    widths = {size for each in drafter.parameters() if each.dim() == 2 for size in each.shape}
    is_possible = weight.dtype == torch.bfloat16 and all(
        size % SUM_MULTIPLE == 0 for size in widths | set(head.lm_head_weight.shape)
    )
    is_measured = train.may_choose_fp8 and capability_of(weight.device) == HOPPER
    is_faster = drafter.architecture.hidden_size >= MIN_FP8_HIDDEN_SIZE
    return "all" if is_possible and is_measured and is_faster else False


def capability_of(device: torch.device) -> tuple[int, int]:
    """Gives the generation of a GPU; a CPU is before all of them."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def use_fp8_products(drafter: Drafter, head: TargetHead, *, weight_gradients: bool) -> TargetHead:
    """Makes the drafter's linear maps and the head's products fp8; gives the head.

    Raises:
        ValueError: the device has no fp8 products, or a width does not suit them.
    """
    device = drafter.fc.weight.device
    if capability_of(device) < ADA:
        raise ValueError(f"train.fp8 needs a GPU with fp8 products, found {device}; turn it off")
    use_fp8(drafter, weight_gradients=weight_gradients)
    return replace(head, fp8=freeze_fp8(head.lm_head_weight))


def architecture_for(run: DrafterRun, store: Store, head: TargetHead) -> DrafterArchitecture:
    """Resolves the drafter's shape and checks that settings, store and target fit together."""
    if head.hidden_size != store.identity.hidden_size:
        raise ValueError(
            f"the store's head has width {head.hidden_size}, its hidden states "
            f"{store.identity.hidden_size}; extract the head of the same target again"
        )
    if run.train.loss.kind != "cross_entropy" and LM_HEAD_INPUT not in store.layers:
        raise ValueError(
            f'train.loss.kind = "{run.train.loss.kind}" learns the target\'s own distribution, for '
            f"which the store lacks the layer {LM_HEAD_INPUT}: extract with "
            'store.lm_head_input = true, or set train.loss.kind = "cross_entropy"'
        )
    refuse_less_than_a_block(run.train, run.drafter)
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


def find_checkpoint(run: DrafterRun, ranks: Ranks) -> Path | None:
    """Gives the newest whole checkpoint to all ranks.

    One looks for all: a network file system can show another an older listing.
    """
    return ranks.from_first(latest_checkpoint(run.drafter_dir) if ranks.is_first else None)


def say_damaged(run: DrafterRun, checkpoint: Path | None, *, say: Callable[[str], None]) -> None:
    """Says which newer checkpoints than the one found are no whole ones."""
    for torn in list_checkpoints(run.drafter_dir):
        if checkpoint is None or torn.name > checkpoint.name:
            say(f"{torn} is damaged: passed over")


def resume(
    checkpoint: Path,
    run: DrafterRun,
    architecture: DrafterArchitecture,
    optimizer: MasterAdamW | ShardedAdamW,
    *,
    target: Mapping[str, str],
    batches_per_step: int,
    say: Callable[[str], None],
) -> Position:
    """Takes over a whole checkpoint: the optimizer's state, and where training goes on.

    Another number of ranks goes on with the same batches in the same order, and each sequence is
    still trained once an epoch.

    Raises:
        ValueError: the checkpoint is of another drafter, or its position means something else.
    """
    state = read_state(checkpoint)
    # Checkpoints of versions before 0.1 do not say it.
    learned_from = state.get("target", target)
    if learned_from["weights_sha256"] != target["weights_sha256"]:
        raise ValueError(
            f"{checkpoint} learned from states of the target {learned_from['name']}, the store "
            f"holds those of other weights, {target['name']}; give the drafter another name, or "
            "set store.dir back"
        )
    # A setting that is younger than the checkpoint had its default.
    before = flat(TrainConfig().model_dump(mode="json")) | flat(state["settings"]["train"])
    now = flat(run.train.model_dump(mode="json"))
    changes = {
        name: f"train.{name} was {before[name]}, is {value}"
        for name, value in now.items()
        if before[name] != value
    }
    changed = [change for name, change in changes.items() if name in POSITION_SETTINGS]
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
    if isinstance(optimizer, ShardedAdamW):
        optimizer.load(checkpoint)
    else:
        optimizer.load(*load_tensors(checkpoint))
    say(f"resuming {checkpoint}")
    learned = [text for name, text in changes.items() if name.split(".")[0] in LEARNING_SETTINGS]
    if learned:
        say(f"going on with other settings: {'; '.join(learned)}")
    for change in changes_of_sharing(
        state, num_ranks=run.train.gpus_per_drafter, batches_per_step=batches_per_step
    ):
        say(change)
    return Position.from_json(state["position"])


def target_of(store: Store) -> dict[str, str]:
    """Says whose states a store holds."""
    identity = store.identity
    return {"name": identity.target_name, "weights_sha256": identity.target_weights_sha256}


def flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Gives settings by their names in the run file, those of inner tables as `loss.kind`."""
    found: dict[str, Any] = {}
    for name, value in tables.items():
        inner = flat(value) if isinstance(value, Mapping) else None
        found |= {f"{name}.{key}": each for key, each in inner.items()} if inner else {name: value}
    return found


def changes_of_sharing(
    state: Mapping[str, Any], *, num_ranks: int, batches_per_step: int
) -> list[str]:
    """Says what other numbers of ranks or of batches a step mean for a resumed run."""
    ranks_before = state.get("num_ranks", 1)
    batches_before = state.get("batches_per_step", 1)
    said = []
    if ranks_before != num_ranks:
        said.append(
            f"going on with {num_ranks} processes, before {ranks_before}: the batches and their "
            "order stay the same, each sequence is trained once an epoch; sums are rounded "
            "differently, so the weights are not the same bit for bit"
        )
    if batches_before != batches_per_step:
        said.append(
            f"going on with {batches_per_step} batches a step, before {batches_before}: each "
            "sequence is trained once an epoch, the number of steps left changes; set "
            f"train.batches_per_step = {batches_before} to keep it"
        )
    return said
