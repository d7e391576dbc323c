"""Train the peers' DFlash models on our store, export all, judge all by the official decoder.

    pip install --no-deps --target PEERS speculators==0.9.0 specforge==0.2.0 dflash==0.1.0
    DFLASH_PEERS=PEERS python benchmarks/peers.py RUN.toml --steps 300 --out runs/peers

Ours, SpecForge's and speculators' training models start from the same weights and see the same
sequences, batch by batch, with the same number of anchors, learning rates and clipping; each has
its own anchors, masks and loss. speculators learns from the target's distribution, so the store
must hold `lm_head_input` (`store.lm_head_input = true`). Every drafter is exported to the official
layout and decodes the held-out prompts with `dflash.model.dflash_generate`.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import Qwen3Config

sys.path.insert(0, str(Path(__file__).parent))
from peer_imports import import_peer
from results import record

from dflash_offline.config import RunConfig, drafter_run, load_run_file, store_dir_of
from dflash_offline.decode_target import TargetDecoder
from dflash_offline.speculate import DecodingSettings, decode
from dflash_offline.suites import held_out_dialogues
from stage1_extract.target import load_target, resolve_target
from stage2_train.acceptance import bootstrap_interval, mean_acceptance_length
from stage2_train.architecture import DrafterArchitecture
from stage2_train.batches import Window
from stage2_train.checkpoint import save_checkpoint
from stage2_train.config import DrafterRun
from stage2_train.data import make_batch_maker, plan_epoch
from stage2_train.decode import layer_decoders
from stage2_train.device import choose_device
from stage2_train.drafter import Drafter, initialize
from stage2_train.export import export_official, export_speculators, load_any_drafter
from stage2_train.optimizer import learning_rate
from stage2_train.preparation import architecture_for
from stage2_train.step import batch_loss
from stage2_train.target_head import TargetHead, load_target_head
from stage2_train.walk import decode_states
from storage.reader import Snapshot, Store, open_store
from storage.schema import LM_HEAD_INPUT

TRAINERS = ("ours", "specforge", "speculators")


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all trainers share."""

    run: DrafterRun
    store: Store
    snapshot: Snapshot
    head: TargetHead
    architecture: DrafterArchitecture
    target_dir: str
    device: torch.device
    num_steps: int
    speculators_loss: str

    def planned(self) -> Iterator[tuple[int, list[Window]]]:
        """Yield the epoch and the windows of each step, epoch after epoch."""
        train = self.run.train
        epoch = num_done = 0
        while True:
            for windows in plan_epoch(
                self.snapshot, seed=train.seed, epoch=epoch, batch_tokens=train.batch_tokens
            ):
                if num_done == self.num_steps:
                    return
                yield epoch, windows
                num_done += 1
            epoch += 1


@dataclass(frozen=True, kw_only=True)
class StoredWindow:
    """One window of a sequence, decoded."""

    token_ids: Tensor
    loss_mask: Tensor
    states: Tensor
    lm_head_input: Tensor | None


class Trainer(Protocol):
    """A model that gives the loss of one step's windows, and its drafter in the end."""

    module: nn.Module

    def loss(self, epoch: int, windows: Sequence[Window]) -> Tensor:
        """Give the loss."""
        ...

    def export(self, out_dir: Path) -> Path:
        """Write the official folder."""
        ...


class Ours:
    """Our own training step."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.module = fresh_drafter(bench)
        self.head = bench.head.to(bench.device, torch.float32)
        self.batches = make_batch_maker(bench.run.train, bench.architecture, bench.device)
        self.decoders = layer_decoders(bench.store.layers, self.batches.layer_names, bench.device)

    def loss(self, epoch: int, windows: Sequence[Window]) -> Tensor:
        """Give the loss of one packed batch."""
        batch = next(self.batches.batches(self.bench.snapshot, [windows], epoch=epoch))
        result = batch_loss(
            self.module,
            batch,
            head=self.head,
            decoders=self.decoders,
            chunk_rows=self.bench.run.train.loss.chunk_rows,
        )
        return result.loss

    def export(self, out_dir: Path) -> Path:
        """Write the official folder."""
        return export_weights(self.bench.architecture, self.module.state_dict(), out_dir)


class SpecForge:
    """SpecForge's `OnlineDFlashModel`: one row for each sequence, anchors drawn for each row."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        family = import_peer("specforge.algorithms.common.dflash_family_model")
        config = Qwen3Config(**bench.architecture.to_config())
        config._attn_implementation = "sdpa"
        draft = import_peer("specforge.modeling.draft.dflash").DFlashDraftModel(config)
        draft.load_state_dict(fresh_drafter(bench).state_dict(), strict=False)
        self.module = draft.to(bench.device).train()
        embed, lm_head = frozen_modules(bench)
        self.model = family.OnlineDFlashModel(
            draft_model=draft,
            target_lm_head=lm_head,
            target_embed_tokens=embed,
            mask_token_id=bench.architecture.mask_token_id,
            block_size=bench.architecture.block_size,
            attention_backend="sdpa",
            num_anchors=bench.run.train.num_anchors,
            loss_decay_gamma=gamma_of(bench),
        ).to(bench.device)

    def loss(self, epoch: int, windows: Sequence[Window]) -> Tensor:
        """Give the loss of one padded batch."""
        stored = [read_window(self.bench, window) for window in windows]
        longest = max(len(each.token_ids) for each in stored)
        self.model.num_anchors = max(1, self.bench.run.train.num_anchors // len(stored))

        def padded(tensors: list[Tensor]) -> Tensor:
            rows = tensors[0].new_zeros((len(tensors), longest, *tensors[0].shape[1:]))
            for row, tensor in zip(rows, tensors, strict=True):
                row[: len(tensor)] = tensor
            return rows

        loss, _, _ = self.model(
            input_ids=padded([each.token_ids for each in stored]),
            hidden_states=padded([each.states for each in stored]),
            loss_mask=padded([each.loss_mask.float() for each in stored]),
        )
        return loss

    def export(self, out_dir: Path) -> Path:
        """Write the official folder."""
        weights = self.module.state_dict()
        return export_weights(self.bench.architecture, weights, out_dir)


class Speculators:
    """speculators' `DFlashDraftModel`: sequences packed end to end, the target's distribution."""

    def __init__(self, bench: Bench) -> None:
        if LM_HEAD_INPUT not in bench.store.layers:
            raise ValueError(
                "speculators learns from the target's distribution: extract a store with "
                "store.lm_head_input = true"
            )
        self.bench = bench
        dflash = import_peer("speculators.models.dflash")
        # Written by our export and loaded by theirs: the target's layer ids are translated there.
        folder = bench.run.drafter_dir / "speculators-start"
        start = save_checkpoint(
            bench.run.drafter_dir,
            step=0,
            architecture=bench.architecture,
            weights=fresh_drafter(bench).state_dict(),
            optimizer={},
            state={},
        )
        export_speculators(start, folder, target=bench.target_dir, dtype=torch.float32)
        settings = dflash.DFlashSpeculatorConfig.from_pretrained(folder)
        settings.transformer_layer_config._attn_implementation = "sdpa"
        self.module = dflash.DFlashDraftModel.from_pretrained(
            folder, config=settings, dtype=torch.float32
        )
        # The store keeps the state after the final norm, they cache the one before it.
        self.module.verifier_norm = nn.Identity()
        self.module.to(bench.device).train()
        self.arguments, _ = self.module.get_trainer_kwargs(
            loss_fn=bench.speculators_loss,
            loss_implementation="eager",
            dflash_decay_gamma=gamma_of(bench),
            max_anchors=bench.run.train.num_anchors,
        )

    def loss(self, epoch: int, windows: Sequence[Window]) -> Tensor:
        """Give the loss of one packed batch."""
        stored = [read_window(self.bench, window, lm_head_input=True) for window in windows]
        lengths = [len(each.token_ids) for each in stored]
        device = self.bench.device
        # They draw no anchor in the last block of a pack: padding keeps the last sequence whole.
        tail = self.bench.architecture.block_size

        def packed(tensors: list[Tensor], *, padding: float = 0) -> Tensor:
            end = tensors[0].new_full((tail, *tensors[0].shape[1:]), padding)
            return torch.cat([*tensors, end])[None]

        documents = [torch.full((n,), i, device=device) for i, n in enumerate(lengths)]
        _, loss, _ = self.module(
            hidden_states=packed([each.states for each in stored]),
            input_ids=packed([each.token_ids for each in stored]),
            loss_mask=packed([each.loss_mask.long() for each in stored]),
            verifier_last_hidden_states=packed([each.lm_head_input for each in stored]),
            document_ids=packed(documents, padding=-1),
            position_ids=packed([torch.arange(n, device=device) for n in lengths]),
            **self.arguments,
        )
        return loss

    def export(self, out_dir: Path) -> Path:
        """Write their own folder, read it back, write the official one."""
        self.module.verifier_norm = nn.RMSNorm(self.bench.architecture.hidden_size)
        own = out_dir.with_name(out_dir.name + "-speculators")
        self.module.save_pretrained(own)
        drafter = load_any_drafter(own, num_target_layers=self.bench.architecture.num_target_layers)
        return export_weights(self.bench.architecture, drafter.state_dict(), out_dir)


def fresh_drafter(bench: Bench) -> Drafter:
    """Give the drafter that all trainings start from."""
    drafter = Drafter(bench.architecture)
    initialize(drafter, seed=bench.run.train.seed)
    return drafter.to(bench.device).train()


def frozen_modules(bench: Bench) -> tuple[nn.Embedding, nn.Linear]:
    """Give the target's embedding and LM head as modules, frozen."""
    head = bench.head.to(bench.device, torch.float32)
    embed = nn.Embedding.from_pretrained(head.embed_weight, freeze=True)
    lm_head = nn.Linear(head.hidden_size, head.vocab_size, bias=False, device="meta")
    lm_head.weight = nn.Parameter(head.lm_head_weight, requires_grad=False)
    return embed, lm_head


def gamma_of(bench: Bench) -> float:
    """Give the decay of the offset weights that our own training uses."""
    known = {16: 7.0, 10: 5.0, 8: 4.0}
    gamma = bench.run.train.loss.gamma or known.get(bench.architecture.block_size)
    if gamma is None:
        raise ValueError("set train.loss.gamma: this block size has no usual one")
    return gamma


def read_window(bench: Bench, window: Window, *, lm_head_input: bool = False) -> StoredWindow:
    """Read one window and decode its states."""
    names = [str(layer_id) for layer_id in bench.architecture.target_layer_ids]
    extra = [LM_HEAD_INPUT] if lm_head_input else []
    stored = bench.snapshot.read(
        window.sequence_index, layers=names + extra, tokens=slice(window.start, window.stop)
    )
    records = bench.store.layers
    like = torch.empty((bench.architecture.hidden_size, 0), device=bench.device)

    def decoded(layers: list[str]) -> Tensor:
        decoders = layer_decoders(records, layers, bench.device)
        return decode_states([stored.states[name] for name in layers], decoders, like=like)

    return StoredWindow(
        token_ids=torch.from_numpy(stored.token_ids).long().to(bench.device),
        loss_mask=torch.from_numpy(stored.loss_mask).to(bench.device),
        states=decoded(names),
        lm_head_input=decoded(extra) if extra else None,
    )


def train(bench: Bench, trainer: Trainer, *, name: str) -> dict[str, float]:
    """Train for the bench's steps; gives seconds per step and the last losses' mean."""
    config = bench.run.train.optimizer
    weights = [weight for weight in trainer.module.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(
        weights, lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay
    )
    torch.manual_seed(bench.run.train.seed)
    losses: list[float] = []
    start_s = time.perf_counter()
    for step, (epoch, windows) in enumerate(bench.planned()):
        loss = trainer.loss(epoch, windows)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, config.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, total_steps=bench.num_steps, config=config)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if (step + 1) % 25 == 0:
            print(f"{name}: step {step + 1}/{bench.num_steps} loss {losses[-1]:.3f}", flush=True)
    return {
        "step_s": (time.perf_counter() - start_s) / len(losses),
        "last_loss": sum(losses[-10:]) / len(losses[-10:]),
    }


def export_weights(
    architecture: DrafterArchitecture, weights: dict[str, Tensor], out_dir: Path
) -> Path:
    """Write weights under the official names as an official folder in fp32."""
    drafter = Drafter(architecture)
    drafter.load_state_dict({name: weights[name] for name in drafter.state_dict()})
    checkpoint = save_checkpoint(
        out_dir.with_name(out_dir.name + "-checkpoint"),
        step=0,
        architecture=architecture,
        weights=drafter.state_dict(),
        optimizer={},
        state={},
    )
    return export_official(checkpoint, out_dir, dtype=torch.float32)


def judge(
    folder: Path, target: nn.Module, prompts: list[list[int]], config: RunConfig, stops: list[int]
) -> list[list[int]]:
    """Decode the prompts with the official package; gives the acceptance lengths."""
    official = import_peer("dflash.model")
    device = next(target.parameters()).device
    drafter = official.DFlashDraftModel.from_pretrained(folder, dtype=target.dtype)
    drafter.to(device).eval()
    clock: Callable[[], float] = time.perf_counter
    lengths = []
    # Its own clock waits for a GPU.
    with mock.patch.object(official, "_cuda_time", clock):
        for prompt in prompts:
            answer = official.dflash_generate(
                drafter,
                target=target,
                input_ids=torch.tensor([prompt], device=device),
                max_new_tokens=config.eval.max_new_tokens,
                stop_token_ids=stops,
                return_stats=True,
            )
            lengths.append(answer.acceptance_lengths)
    return lengths


def decode_here(
    folder: Path, target: nn.Module, prompts: list[list[int]], config: RunConfig, head: TargetHead
) -> list[list[int]]:
    """Decode the prompts with our own decoder; gives the acceptance lengths."""
    device = next(target.parameters()).device
    drafter = load_any_drafter(folder, dtype=target.dtype, device=device)
    decoding = decode(
        TargetDecoder(target, layer_ids=drafter.architecture.target_layer_ids),
        prompts,
        settings=DecodingSettings(
            max_new_tokens=config.eval.max_new_tokens, stop_token_ids=head.eos_token_ids
        ),
        batch_size=config.eval.batch_size,
        drafter=drafter,
        head=head,
    )
    return [generation.acceptance_lengths for generation in decoding.generations]


def open_bench(config: RunConfig, args: argparse.Namespace) -> Bench:
    """Gather what all trainers share."""
    name = args.drafter or config.drafter[0].name
    run = drafter_run(config, name)
    # The weights of offsets that all three know.
    loss = run.train.loss.model_copy(update={"weighting": "decay"})
    train = run.train.model_copy(update={"loss": loss})
    run = run.model_copy(update={"train": train, "drafter_dir": args.out / "start"})
    store = open_store(store_dir_of(config))
    head = load_target_head(store)
    return Bench(
        run=run,
        store=store,
        snapshot=store.snapshot(),
        head=head,
        architecture=architecture_for(run, store, head),
        target_dir=resolve_target(config.target),
        device=choose_device(),
        num_steps=args.steps,
        speculators_loss=args.speculators_loss,
    )


def main() -> None:
    """Train, export and judge; print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--drafter", help="drafter of the run file whose shape is trained")
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--speculators-loss", default="kl_div", help="kl_div is its default")
    parser.add_argument("--out", type=Path, required=True, help="folder of exports and figures")
    parser.add_argument("--no-record", action="store_true", help="print only")
    args = parser.parse_args()
    args.out = args.out.resolve()
    config = load_run_file(args.run_file, overrides=args.overrides)
    torch.set_num_threads(config.train.torch_threads)
    bench = open_bench(config, args)
    target = load_target(config.target, device=str(bench.device)).model
    dialogues = held_out_dialogues(bench.snapshot, limit=config.eval.num_prompts)
    prompts = [list(dialogue.token_ids or ()) for dialogue in dialogues]
    kinds: dict[str, Callable[[Bench], Trainer]] = {
        "ours": Ours,
        "specforge": SpecForge,
        "speculators": Speculators,
    }
    rows: dict[str, dict[str, Any]] = {}
    for name in args.trainers:
        trainer = kinds[name](bench)
        figures = train(bench, trainer, name=name)
        lengths = judge(
            trainer.export(args.out / name), target, prompts, config, list(bench.head.eos_token_ids)
        )
        low, high = bootstrap_interval(lengths, seed=0)
        ours = decode_here(args.out / name, target, prompts, config, bench.head)
        rows[name] = {
            **figures,
            "num_equal_prompts": sum(a == b for a, b in zip(lengths, ours, strict=True)),
            "acceptance_length": mean_acceptance_length(lengths),
            "acceptance_length_interval": [low, high],
        }
        del trainer
    print_table(rows, num_steps=args.steps, num_prompts=len(prompts))
    if not args.no_record:
        record_rows(rows, num_steps=args.steps, num_prompts=len(prompts), device=bench.device)
    (args.out / "peers.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def record_rows(
    rows: dict[str, dict[str, Any]], *, num_steps: int, num_prompts: int, device: torch.device
) -> None:
    """Append the figures to the recorded ones."""
    figures = {}
    for name, row in rows.items():
        low, high = row["acceptance_length_interval"]
        note = (
            f"official decoder, {num_prompts} prompts, {num_steps} steps, {low:.3f} .. {high:.3f}"
        )
        figures[f"acceptance_held_out_{name}"] = (row["acceptance_length"], "tokens", note)
        figures[f"peers_{name}_step"] = (row["step_s"], "s", "one process, no compile")
    is_gpu = device.type == "cuda"
    place = torch.cuda.get_device_name() if is_gpu else f"{torch.get_num_threads()} CPU threads"
    record("Peers on our store", figures, device=place, packages=("torch", "transformers"))


def print_table(rows: dict[str, dict[str, Any]], *, num_steps: int, num_prompts: int) -> None:
    """Print one line for each trainer."""
    title = f"{num_steps} steps; {num_prompts} held-out prompts, decoded by the official package"
    table = Table(title=title)
    for heading in ("trainer", "acceptance length", "95% interval", "same in our decoder"):
        table.add_column(heading)
    for heading in ("s/step", "own loss, last 10"):
        table.add_column(heading)
    for name, row in rows.items():
        low, high = row["acceptance_length_interval"]
        table.add_row(
            name,
            f"{row['acceptance_length']:.3f}",
            f"{low:.3f} .. {high:.3f}",
            f"{row['num_equal_prompts']} of {num_prompts} prompts",
            f"{row['step_s']:.2f}",
            f"{row['last_loss']:.3f}",
        )
    Console(width=None if sys.stdout.isatty() else 110).print(table)


if __name__ == "__main__":
    main()
