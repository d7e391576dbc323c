"""One training step of our drafter beside SpecForge's and speculators', at one shape, in one run.

    pip install --no-deps --target PEERS speculators==0.9.0 specforge==0.2.0
    DFLASH_PEERS=PEERS python benchmarks/stage2_peers.py [--trainers ours,specforge,speculators]
        [--shape qwen3-8b|tiny] [--sequences 1] [--steps 10] [--no-record]

A step is forward, backward, clipping and AdamW on random weights and states that lie on the device
already; tok/s counts sequence tokens. Each peer runs with the optimizer, the arithmetic types and
the compilation that its own trainer uses: SpecForge a bf16 draft model with fp32 master weights and
FlexAttention, speculators fp32 weights under bf16 autocast, compiled whole, with its eager
cross-entropy. All build the masks of each step, ours on a stream of their own as in training.
Random states do not change what a step costs. An interrupt (SIGINT) ends the run with the figures
of the trainers that are through: compiling speculators takes minutes.
"""

import argparse
import itertools
import os
from collections.abc import Callable
from functools import partial

# speculators looks its target up on the hub, which this script does not need.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from peer_imports import import_peer
from results import device_name, record
from shapes import SHAPES, Shape
from stage2_step import (
    PACKAGES,
    WARMUP_STEPS,
    architecture_of,
    make_trainer,
    median_s,
    random_batch,
    random_head,
    sustained_s,
    wait,
)
from torch import Tensor, nn
from transformers import Qwen3Config

from stage2_train.blocks import offset_weights
from stage2_train.clock import DeviceClock
from stage2_train.collate import with_masks
from stage2_train.data import copied_ahead
from stage2_train.export import speculators_config

GAMMA = 7.0
Step = Callable[[int], object]


def ours(shape: Shape, arguments: argparse.Namespace, device: torch.device) -> Step:
    """Our step, all sequences packed into one row, its masks built beside the step before."""
    assert offset_weights(16)[2] == offset_weights(16, gamma=GAMMA)[2]
    trainer = make_trainer(shape, "bf16", arguments, device)
    batch = random_batch(
        shape,
        [shape.sequence_tokens] * arguments.sequences,
        batch_tokens=shape.sequence_tokens * arguments.sequences,
        num_anchors=arguments.anchors * arguments.sequences,
        seed=0,
        encoding="bf16",
    ).to(device)
    if device.type == "cpu":
        return lambda number: trainer.step(batch)
    wait(device)  # For the stream of the masks knows nothing of the one that copies here.
    arriving = copied_ahead(
        itertools.repeat(batch),
        device,
        DeviceClock(device),
        add_masks=partial(with_masks, architecture=architecture_of(shape)),
    )
    return lambda number: trainer.step(next(arriving))


def specforge(shape: Shape, arguments: argparse.Namespace, device: torch.device) -> Step:
    """SpecForge's `OnlineDFlashModel` and `BF16Optimizer`, a row a sequence."""
    family = import_peer("specforge.algorithms.common.dflash_family_model")
    optimizer_module = import_peer("specforge.optimizer")
    backend = "flex_attention" if device.type == "cuda" else "sdpa"
    config = Qwen3Config(**architecture_of(shape).to_config())
    config._attn_implementation = backend
    with torch.device(device):
        draft = import_peer("specforge.modeling.draft.dflash").DFlashDraftModel(config)
    draft.to(device, torch.bfloat16).train()
    head = random_head(shape, device)
    lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False, device="meta")
    lm_head.weight = nn.Parameter(head.lm_head_weight, requires_grad=False)
    model = family.OnlineDFlashModel(
        draft_model=draft,
        target_lm_head=lm_head,
        target_embed_tokens=nn.Embedding.from_pretrained(head.embed_weight, freeze=True),
        mask_token_id=shape.vocab_size - 1,
        block_size=shape.block_size,
        attention_backend=backend,
        num_anchors=arguments.anchors,
        loss_decay_gamma=GAMMA,
    ).to(device)
    optimizer = optimizer_module.BF16Optimizer(draft, lr=1e-5, max_grad_norm=1.0)
    inputs = {
        "input_ids": random_ids(shape, (arguments.sequences, shape.sequence_tokens), device),
        "hidden_states": random_states(shape, arguments.sequences, shape.num_layers, device),
        "loss_mask": supervised(shape, arguments.sequences, device).float(),
    }

    def step(_: int) -> None:
        loss, _, _ = model(**inputs)
        loss.backward()
        optimizer.step()

    return step


def speculators(shape: Shape, arguments: argparse.Namespace, device: torch.device) -> Step:
    """Speculators' `DFlashDraftModel` as its trainer runs it, sequences packed into one row."""
    dflash = import_peer("speculators.models.dflash")
    on_gpu = device.type == "cuda"
    settings = dflash.DFlashSpeculatorConfig.from_dict(
        speculators_config(
            architecture_of(shape), target="target", target_architectures=["Qwen3ForCausalLM"]
        )
    )
    settings.transformer_layer_config._attn_implementation = (
        "simple_flex_attention" if on_gpu else "sdpa"
    )
    with torch.device(device):
        module = dflash.DFlashDraftModel(config=settings)
    head = random_head(shape, device)
    for frozen, weight in (
        (module.embed_tokens, head.embed_weight),
        (module.lm_head, head.lm_head_weight),
        (module.verifier_lm_head, head.lm_head_weight),
    ):
        frozen.weight = nn.Parameter(weight, requires_grad=False)
    module.to(device).train()
    keywords, _ = module.get_trainer_kwargs(
        loss_fn="ce",
        loss_implementation="eager",
        dflash_decay_gamma=GAMMA,
        max_anchors=arguments.anchors * arguments.sequences,
    )
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5)
    length = shape.sequence_tokens
    whole = (1, -1)
    inputs = {
        "input_ids": random_ids(shape, (1, length * arguments.sequences), device),
        "hidden_states": random_states(shape, arguments.sequences, shape.num_layers, device).view(
            1, length * arguments.sequences, -1
        ),
        "verifier_last_hidden_states": random_states(shape, arguments.sequences, 1, device).view(
            1, length * arguments.sequences, -1
        ),
        "loss_mask": supervised(shape, arguments.sequences, device).long().view(whole),
        "document_ids": torch.arange(arguments.sequences, device=device)
        .repeat_interleave(length)
        .view(whole),
        "position_ids": torch.arange(length, device=device).repeat(arguments.sequences).view(whole),
    }

    def step(_: int) -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            _, loss, _ = module(**inputs, **keywords)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()

    return step


TRAINERS = {"ours": ours, "specforge": specforge, "speculators": speculators}


def random_ids(shape: Shape, size: tuple[int, int], device: torch.device) -> Tensor:
    """Random tokens."""
    return torch.randint(0, shape.vocab_size - 1, size, device=device)


def random_states(shape: Shape, num_rows: int, num_layers: int, device: torch.device) -> Tensor:
    """Random bf16 states of some layers side by side, [rows, tokens, layers * hidden]."""
    size = (num_rows, shape.sequence_tokens, num_layers * shape.hidden_size)
    return torch.randn(size, device=device, dtype=torch.bfloat16)


def supervised(shape: Shape, num_rows: int, device: torch.device) -> Tensor:
    """The mask of our own benchmark: all but the first eighth of each sequence."""
    mask = torch.arange(shape.sequence_tokens, device=device) >= shape.sequence_tokens // 8
    return mask.expand(num_rows, -1)


def measure(
    name: str, shape: Shape, arguments: argparse.Namespace, device: torch.device
) -> dict[str, tuple[float, str, str]]:
    """Warms one trainer up and times it; gives its figures by name."""
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.init()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    step = TRAINERS[name](shape, arguments, device)
    for number in range(WARMUP_STEPS):
        step(number)
    median = median_s(step, device, arguments.steps)
    sustained = sustained_s(step, device, arguments.steps)
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    tokens = shape.sequence_tokens * arguments.sequences
    note = f"{arguments.shape}, {arguments.sequences} x {shape.sequence_tokens} tokens, bf16"
    many = "" if arguments.sequences == 1 else f"_{arguments.sequences}_sequences"
    return {
        f"stage2_{name}{many}_tok_s": (tokens / sustained, "tokens/s", note),
        f"stage2_{name}{many}_step": (median * 1e3, "ms", f"median of {arguments.steps}"),
        f"stage2_{name}{many}_memory": (memory, "GiB", "peak allocated"),
    }


def main() -> None:
    """Times the trainers asked for and records their figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--trainers", default=",".join(TRAINERS))
    parser.add_argument("--sequences", type=int, default=1, help="sequences of a step")
    parser.add_argument("--anchors", type=int, default=512, help="anchors of a sequence")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--no-record", action="store_true")
    arguments = parser.parse_args()
    arguments.encoding, arguments.compile_mode, arguments.chunk_rows = "bf16", None, 2560
    shape = SHAPES[arguments.shape]
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    figures: dict[str, tuple[float, str, str]] = {}
    for trainer in arguments.trainers.split(","):
        try:
            found = measure(trainer, shape, arguments, device)
        except KeyboardInterrupt:
            print(f"{trainer} was interrupted")
            break
        print({figure: round(value, 2) for figure, (value, _, _) in found.items()}, flush=True)
        figures |= found
    if not figures:
        raise SystemExit("no trainer was through")
    record(
        "Training steps of three trainers",
        figures,
        device=device_name(),
        packages=PACKAGES,
        only_print=arguments.no_record,
    )


if __name__ == "__main__":
    main()
