"""What fp8 products and what they cost beside themselves take, and how far gradients are off.

    python benchmarks/fp8_products.py [--shape qwen3-8b|tiny] [--no-gradients] [--no-record]

Times, for the MLP of a shape with the block tokens of one step: the products of forward and of the
weight gradient in bf16 and fp8, quantizing, transposing codes. Then the gradients of a whole step,
tensor by tensor, against those of bf16 products, for both forms of `train.fp8`. Random weights and
states, as in `stage2_step.py`, which times whole steps. `--shape tiny` runs anywhere.
"""

import argparse
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from results import record
from shapes import SHAPES, Shape
from stage2_step import gradients_of, make_trainer, random_batch
from torch import Tensor

from stage2_train.fp8 import (
    Fp8Rows,
    plain_transposed_codes,
    product,
    quantize_rows,
    transposed_codes,
)

Figures = dict[str, tuple[float, str, str]]
VARIANTS = ("fp8", "fp8_all")


def seconds(call: Callable[[], object], device: torch.device, *, repeats: int = 20) -> float:
    """Mean time of a call among several that are not waited for one by one, the best of three."""
    wait(device)
    times = []
    call()
    for _ in range(3):
        wait(device)
        start_s = time.perf_counter()
        for _ in range(repeats):
            call()
        wait(device)
        times.append((time.perf_counter() - start_s) / repeats)
    return min(times)


def wait(device: torch.device) -> None:
    """Waits until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def uneven(rows: int, columns: int, device: torch.device, *, seed: int) -> Tensor:
    """Random numbers whose rows and columns differ in size, as activations and gradients do."""
    generator = torch.Generator(device).manual_seed(seed)
    row, column, entry = (
        torch.randn(size, generator=generator, device=device)
        for size in ((rows, 1), (1, columns), (rows, columns))
    )
    return (entry * (row + 0.5 * column).exp()).bfloat16()


def error_of(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def measure_products(shape: Shape, num_tokens: int, device: torch.device) -> Figures:
    """Times the products of an MLP's first map and the kernels around them; checks them first."""
    inputs = uneven(num_tokens, shape.hidden_size, device, seed=0)
    above = uneven(num_tokens, shape.intermediate_size, device, seed=1)
    weight = uneven(shape.intermediate_size, shape.hidden_size, device, seed=2)
    rows, of_weight = quantize_rows(inputs), quantize_rows(weight)
    slopes = quantize_rows(above * of_weight.scales.t())
    factors = slopes.scales / slopes.scales.amax()
    for some in (None, factors):
        found, expected = (
            f(slopes.codes, some) for f in (transposed_codes, plain_transposed_codes)
        )
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    token_scales = slopes.scales * rows.scales
    sums = (
        Fp8Rows(
            transposed_codes(slopes.codes, token_scales / token_scales.amax()),
            token_scales.amax() / of_weight.scales,
        ),
        Fp8Rows(transposed_codes(rows.codes, None), token_scales.new_ones(shape.hidden_size, 1)),
    )
    flops = 2 * num_tokens * shape.hidden_size * shape.intermediate_size
    calls: dict[str, tuple[Callable[[], object], float, str]] = {
        "forward_bf16": (lambda: inputs @ weight.t(), flops, "TFLOP/s"),
        "forward_fp8": (lambda: product(rows, of_weight), flops, "TFLOP/s"),
        "weight_gradient_bf16": (lambda: above.t() @ inputs, flops, "TFLOP/s"),
        "weight_gradient_fp8": (lambda: product(*sums), flops, "TFLOP/s"),
        "weight_gradient_fp8_precise": (
            lambda: product(*sums, is_fast=False),
            flops,
            "TFLOP/s",
        ),
        "transpose": (lambda: transposed_codes(rows.codes, None), 2 * inputs.numel(), "TB/s"),
        "transpose_wide": (
            lambda: transposed_codes(slopes.codes, factors),
            2 * above.numel(),
            "TB/s",
        ),
    }
    figures: Figures = {}
    for name, (call, work, unit) in calls.items():
        found_s = seconds(call, device)
        note = f"{num_tokens} x {shape.hidden_size} x {shape.intermediate_size}"
        note += f"; {work / found_s / 1e12:.3g} {unit}"
        figures[f"fp8_{name}"] = (found_s * 1e3, "ms", note)
    exact = above.float().t() @ inputs.float()
    for name, found in (
        ("bf16", above.t() @ inputs),
        ("fp8", product(*sums)),
        ("fp8_precise", product(*sums, is_fast=False)),
    ):
        figures[f"fp8_products_error_{name}"] = (
            error_of(found, exact),
            "fraction",
            "of a weight gradient, uneven random factors",
        )
    return figures


def measure_gradients(shape: Shape, arguments: argparse.Namespace, device: torch.device) -> Figures:
    """Compares the gradients of a step with fp8 products with those of bf16 ones."""
    batch = random_batch(
        shape,
        [shape.sequence_tokens],
        batch_tokens=shape.sequence_tokens,
        num_anchors=arguments.anchors,
        seed=0,
        encoding="bf16",
    ).to(device)
    found: dict[str, tuple[float, list[Tensor]]] = {}
    names: list[str] = []
    for variant in ("plain", *VARIANTS):
        trainer = make_trainer(shape, variant, arguments, device)
        # The layers uncompiled: what is rounded does not depend on it.
        trainer.fast_path = None
        found[variant] = gradients_of(trainer, batch)
        names = [name for name, _ in trainer.drafter.named_parameters()]
        del trainer
    figures: Figures = {}
    for variant in VARIANTS:
        by_kind: dict[str, list[float]] = defaultdict(list)
        for name, exact, ours in zip(names, found["plain"][1], found[variant][1], strict=True):
            by_kind[re.sub(r"^layers\.\d+\.|\.weight$", "", name)].append(error_of(ours, exact))
        for kind, errors in by_kind.items():
            print(f"{variant:<8} {kind:<28}" + "".join(f"{error:8.4f}" for error in errors))
        every = [error for errors in by_kind.values() for error in errors]
        worst = max(by_kind, key=lambda kind: max(by_kind[kind]))
        loss_gap = abs(found[variant][0] - found["plain"][0])
        figures[f"{variant}_gradient_error_median"] = (
            statistics.median(every),
            "fraction",
            f"of {len(every)} tensors, against bf16 products; loss off by {loss_gap:.1e}",
        )
        figures[f"{variant}_gradient_error_worst"] = (max(every), "fraction", worst)
    return figures


def main() -> None:
    """Measures and records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--no-gradients", action="store_true")
    parser.add_argument("--no-record", action="store_true")
    arguments = parser.parse_args()
    # What `stage2_step.make_trainer` asks for.
    arguments.encoding, arguments.compile_mode, arguments.chunk_rows = "bf16", None, 2560
    shape = SHAPES[arguments.shape]
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    found = measure_products(shape, arguments.anchors * shape.block_size, device)
    if not arguments.no_gradients:
        found |= measure_gradients(shape, arguments, device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    record(
        "fp8 products",
        found,
        device=name,
        packages=("torch", "triton"),
        only_print=arguments.no_record,
    )


if __name__ == "__main__":
    main()
