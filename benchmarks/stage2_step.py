"""How fast one training step of stage 2 is, at the shape of Qwen3-8B, and whether it is right.

    python benchmarks/stage2_step.py [--variants bf16,fp8] [--sequences 1] [--anchors 512]
        [--steps 30] [--shape qwen3-8b|wide|tiny] [--compile-mode MODE] [--profile] [--no-record]

A step is decoding the states, forward, backward, clipping and AdamW on random weights and states;
`tok/s` counts sequence tokens. Before anything is timed the fast path's loss and gradients are
compared with the plain path's on the same weights, and no recompilation is allowed after warm-up.
MFU is the useful arithmetic of the step over the bf16 peak of matrix products, measured in the
same run. `--shape tiny` runs anywhere, to try the script.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from results import device_name, record
from shapes import SHAPES, Shape
from torch import Tensor

from stage2_train.architecture import FULL, DrafterArchitecture, default_target_layer_ids
from stage2_train.blocks import Supervision, make_blocks, offset_weights
from stage2_train.collate import EncodedLayer, PackedBatch, batch_of, with_masks
from stage2_train.config import OptimizerConfig
from stage2_train.decode import LayerDecoder
from stage2_train.drafter import INIT_STD, Drafter
from stage2_train.fast_path import FastPath, make_fast_path
from stage2_train.flops import measured_peak_flops, step_flops
from stage2_train.fp8 import freeze_fp8, use_fp8
from stage2_train.optimizer import MasterAdamW
from stage2_train.step import batch_loss
from stage2_train.target_head import TargetHead

PACKAGES = ("torch", "triton", "transformers")
WARMUP_STEPS = 5


def architecture_of(shape: Shape) -> DrafterArchitecture:
    """The drafter of a shape, as its export would say."""
    return DrafterArchitecture(
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        rms_norm_eps=1e-6,
        vocab_size=shape.vocab_size,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        max_position_embeddings=40_960,
        block_size=shape.block_size,
        mask_token_id=shape.vocab_size - 1,
        target_layer_ids=default_target_layer_ids(shape.num_layers, shape.num_target_layers),
        num_target_layers=shape.num_target_layers,
        layer_types=(FULL,) * shape.num_layers,
    )


def random_head(shape: Shape, device: torch.device) -> TargetHead:
    """An untied embedding and LM head of the size of a trained one's."""
    generator = torch.Generator(device).manual_seed(1)
    size = (shape.vocab_size, shape.hidden_size)
    embed, lm_head = (
        torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16) * 0.02
        for _ in range(2)
    )
    return TargetHead(
        config={},
        embed_weight=embed,
        lm_head_weight=lm_head,
        lm_head_bias=None,
        embedding_scale=1.0,
        logit_scale=1.0,
        final_logit_softcapping=None,
        tokenizer_size=shape.vocab_size,
        mask_token_id=shape.vocab_size - 1,
        eos_token_ids=(),
    )


def random_batch(
    shape: Shape,
    lengths: Sequence[int],
    *,
    batch_tokens: int,
    num_anchors: int,
    seed: int,
    encoding: str,
) -> PackedBatch:
    """A packed batch of random tokens and states, on the host."""
    rng = np.random.default_rng(seed)
    packed = [
        Supervision(
            sequence_id=f"{seed}-{number}",
            token_ids=rng.integers(0, shape.vocab_size - 1, length),
            loss_mask=np.arange(length) >= length // 8,
        )
        for number, length in enumerate(lengths)
    ]
    blocks = make_blocks(
        packed,
        num_anchors=num_anchors,
        weight_of_offset=offset_weights(shape.block_size),
        seed=seed,
        epoch=0,
    )
    positions = np.zeros(batch_tokens, np.int64)
    positions[: sum(lengths)] = np.concatenate([np.arange(length) for length in lengths])
    return batch_of(
        blocks,
        layers=tuple(
            random_layer(batch_tokens, shape.hidden_size, encoding, seed=seed + number)
            for number in range(shape.num_layers)
        ),
        positions=positions,
        num_real_tokens=sum(lengths),
        mask_token_id=shape.vocab_size - 1,
    )


@functools.lru_cache(maxsize=32)
def random_layer(num_tokens: int, hidden_size: int, encoding: str, *, seed: int) -> EncodedLayer:
    """One layer's stored states; kept, for batches share them and drawing takes seconds."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(num_tokens, hidden_size, generator=generator)
    if encoding == "bf16":
        return EncodedLayer(data=states.bfloat16().view(torch.uint16), scales=None)
    codes = (states * 100).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return EncodedLayer(data=codes, scales=torch.full((num_tokens,), 0.01))


@dataclass
class Trainer:
    """A drafter with everything a step needs."""

    drafter: Drafter
    optimizer: MasterAdamW
    head: TargetHead
    decoders: tuple[LayerDecoder, ...]
    fast_path: FastPath | None
    chunk_rows: int

    def loss_step(self, batch: PackedBatch) -> tuple[Tensor, bool]:
        """Forward and backward; gives the loss and whether compiled code ran."""
        result = batch_loss(
            self.drafter,
            batch,
            head=self.head,
            decoders=self.decoders,
            chunk_rows=self.chunk_rows,
            fast_path=self.fast_path,
        )
        result.loss.backward()
        return result.loss.detach(), result.is_compiled

    def step(self, batch: PackedBatch) -> bool:
        """A whole step; says whether compiled code ran."""
        _, is_compiled = self.loss_step(batch)
        self.optimizer.step(1e-5)
        return is_compiled


def random_drafter(shape: Shape, device: torch.device) -> Drafter:
    """The same fresh weights each time, drawn on the device: a billion take a CPU half a minute."""
    with torch.device("meta"):
        drafter = Drafter(architecture_of(shape))
    drafter = drafter.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=INIT_STD, generator=generator)
    return drafter


def make_trainer(
    shape: Shape, variant: str, arguments: argparse.Namespace, device: torch.device
) -> Trainer:
    """Builds a variant: `plain`, `bf16`, `fp8`, or `fp8_all` with fp8 weight gradients, too."""
    drafter = random_drafter(shape, device)
    optimizer = MasterAdamW(drafter, OptimizerConfig(), device=device, dtype=torch.bfloat16)
    head = random_head(shape, device)
    if variant in ("fp8", "fp8_all"):
        use_fp8(drafter, weight_gradients=variant == "fp8_all")
        head = replace(head, fp8=freeze_fp8(head.lm_head_weight))
    return Trainer(
        drafter=drafter,
        optimizer=optimizer,
        head=head,
        decoders=(LayerDecoder(encoding=arguments.encoding),) * shape.num_layers,
        fast_path=None
        if variant == "plain" or device.type == "cpu"
        else make_fast_path(is_compiled=True, mode=arguments.compile_mode),
        chunk_rows=arguments.chunk_rows,
    )


def gradients_of(trainer: Trainer, batch: PackedBatch) -> tuple[float, list[Tensor]]:
    """Loss and gradients of one batch, on the host."""
    loss, _ = trainer.loss_step(batch)
    gradients = [parameter.grad.float().cpu() for parameter in trainer.drafter.parameters()]
    trainer.drafter.zero_grad(set_to_none=True)
    return float(loss), gradients


def compare(
    reference: tuple[float, list[Tensor]], found: tuple[float, list[Tensor]]
) -> tuple[float, float]:
    """Difference of the losses, and the worst relative error among all gradient tensors."""
    errors = [
        float((ours - exact).norm() / exact.norm().clamp(min=1e-30))
        for exact, ours in zip(reference[1], found[1], strict=True)
    ]
    return abs(reference[0] - found[0]), max(errors)


def wait(device: torch.device) -> None:
    """Waits until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_s(call: Callable[[int], Any], device: torch.device, steps: int) -> float:
    """Median time of a call."""
    times = []
    for number in range(steps):
        wait(device)
        start_s = time.perf_counter()
        call(number)
        wait(device)
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


def sustained_s(call: Callable[[int], Any], device: torch.device, steps: int) -> float:
    """Mean time of a call among many that are not waited for one by one."""
    wait(device)
    start_s = time.perf_counter()
    for number in range(steps):
        call(number)
    wait(device)
    return (time.perf_counter() - start_s) / steps


def log_normal_batches(batch_tokens: int, count: int) -> list[list[int]]:
    """Packed lengths of a log-normal of median 700, capped at 4,096 or the budget."""
    from stage2_train.batches import Window, pack

    rng = np.random.default_rng(0)
    cap = min(4096, batch_tokens)
    lengths = np.clip(rng.lognormal(np.log(700), 1.0, 60 * count).astype(int), 16, cap)
    windows = [
        Window(sequence_index=i, start=0, stop=int(length)) for i, length in enumerate(lengths)
    ]
    packed = pack(windows, batch_tokens=batch_tokens)
    return [[w.num_tokens for w in next(packed)] for _ in range(count)]


def run_variant(
    shape: Shape,
    variant: str,
    arguments: argparse.Namespace,
    device: torch.device,
    reference: tuple[float, list[Tensor]],
    peak: float,
) -> dict[str, tuple[float, str, str]]:
    """Checks, warms up and times one variant; gives its figures by name."""
    # Three kinds of layers in three variants are more than torch's limit of compilations.
    torch._dynamo.reset()
    batch_tokens = shape.sequence_tokens * arguments.sequences
    num_anchors = arguments.anchors * arguments.sequences
    lengths = [[shape.sequence_tokens] * arguments.sequences] * 4
    if arguments.ragged:
        lengths = log_normal_batches(batch_tokens, 16)
    # On the device and with their masks, as the loader hands them over.
    batches = [
        with_masks(
            random_batch(
                shape,
                of_batch,
                batch_tokens=batch_tokens,
                num_anchors=num_anchors,
                seed=seed,
                encoding=arguments.encoding,
            ).to(device),
            architecture=architecture_of(shape),
        )
        for seed, of_batch in enumerate(lengths)
    ]
    trainer = make_trainer(shape, variant, arguments, device)
    start_s = time.perf_counter()
    loss_error, gradient_error = compare(
        reference, gradients_of(trainer, check_batch(shape, arguments, device))
    )
    first_step_s = time.perf_counter() - start_s
    print(
        f"{variant}: loss off by {loss_error:.2e}, worst gradient by {gradient_error:.3f}",
        flush=True,
    )
    for number in range(WARMUP_STEPS):
        trainer.step(batches[number % len(batches)])
    if device.type == "cuda":
        torch.compiler.set_stance("fail_on_recompile")
        torch.cuda.reset_peak_memory_stats(device)
    witnesses: list[bool] = []
    step_s = median_s(
        lambda number: witnesses.append(trainer.step(batches[number % len(batches)])),
        device,
        arguments.steps,
    )
    sustained = sustained_s(
        lambda number: trainer.step(batches[number % len(batches)]), device, arguments.steps
    )
    loss_s = median_s(
        lambda number: (
            trainer.loss_step(batches[number % len(batches)]),
            trainer.drafter.zero_grad(set_to_none=True),
        ),
        device,
        max(5, arguments.steps // 3),
    )
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    if arguments.profile:
        print_profile(lambda: trainer.step(batches[0]), device)
    if device.type == "cuda":
        torch.compiler.set_stance("default")
    mean_tokens = statistics.mean(batch.num_real_tokens for batch in batches)
    flops = statistics.mean(
        step_flops(
            architecture_of(shape),
            num_context_tokens=batch_tokens,
            num_blocks=num_anchors,
            num_rows=len(batch.row_index),
            num_seen_pairs=batch.num_seen_pairs,
        )
        for batch in batches
    )
    fill = mean_tokens / batch_tokens
    note = (
        f"{arguments.shape}, {arguments.sequences} x {shape.sequence_tokens} tokens, "
        f"{num_anchors} blocks of {shape.block_size}"
        + (f", log-normal lengths, fill {fill:.1%}" if arguments.ragged else "")
    )
    prefix = "_".join(["stage2_step", variant, *peculiarities(arguments)])
    return {
        f"{prefix}_tok_s": (mean_tokens / sustained, "tokens/s", note),
        f"{prefix}_step": (
            step_s * 1e3,
            "ms",
            f"median of {arguments.steps}; sustained {sustained * 1e3:.1f}",
        ),
        f"{prefix}_forward_backward": (loss_s * 1e3, "ms", "without clipping and AdamW"),
        f"{prefix}_mfu": (
            flops / sustained / peak,
            "fraction",
            f"{flops / 1e12:.1f} TFLOP, bf16 peak {peak / 1e12:.0f} TFLOP/s",
        ),
        f"{prefix}_memory": (memory, "GiB", "peak allocated"),
        f"{prefix}_compiled": (
            statistics.mean(witnesses),
            "fraction",
            "steps that ran compiled code, by their own word",
        ),
        f"{prefix}_first_step": (first_step_s, "s", "with compilation"),
        f"{prefix}_gradient_error": (
            gradient_error,
            "fraction",
            f"worst tensor against the plain path; loss off by {loss_error:.1e}",
        ),
    }


def peculiarities(arguments: argparse.Namespace) -> list[str]:
    """What sets a run apart from the headline, as parts of its figures' names."""
    parts = {
        arguments.shape.replace("-", "_"): arguments.shape != "qwen3-8b",
        f"{arguments.anchors}_anchors": arguments.anchors != 512,
        f"{arguments.sequences}_sequences": arguments.sequences != 1,
        "ragged": arguments.ragged,
    }
    return [part for part, is_set in parts.items() if is_set]


def check_batch(shape: Shape, arguments: argparse.Namespace, device: torch.device) -> PackedBatch:
    """The batch on which variants are compared with the plain path."""
    half = shape.sequence_tokens // 2
    return random_batch(
        shape,
        [half + 5, half - 30],
        batch_tokens=shape.sequence_tokens,
        num_anchors=arguments.anchors,
        seed=99,
        encoding=arguments.encoding,
    ).to(device)


def print_profile(step: Callable[[], Any], device: torch.device) -> None:
    """Prints where a step's time goes, kernel by kernel."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with profile(activities=activities) as profiler:
        step()
        wait(device)
    key = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=key, row_limit=30, max_name_column_width=70))


def main() -> None:
    """Runs the variants asked for and records their figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--variants", default="bf16,fp8", help="of plain, bf16, fp8 and fp8_all")
    parser.add_argument("--sequences", type=int, default=1, help="sequences of a step")
    parser.add_argument("--anchors", type=int, default=512, help="anchors of a sequence")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--chunk-rows", type=int, default=2560)
    parser.add_argument("--encoding", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--compile-mode", default=None)
    parser.add_argument("--ragged", action="store_true", help="log-normal lengths")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--no-record", action="store_true")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    peak = measured_peak_flops(device)
    plain = make_trainer(shape, "plain", arguments, device)
    reference = gradients_of(plain, check_batch(shape, arguments, device))
    del plain
    if device.type == "cuda":
        torch.cuda.empty_cache()  # The plain path has taken more than the variants will.
    figures: dict[str, tuple[float, str, str]] = {}
    for variant in arguments.variants.split(","):
        figures |= run_variant(shape, variant, arguments, device, reference, peak)
    record(
        "One training step of stage 2",
        figures,
        device=device_name(),
        packages=PACKAGES,
        only_print=arguments.no_record,
    )


if __name__ == "__main__":
    main()
