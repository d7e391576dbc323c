"""How much longer decoding with a drafter takes than its model passes alone.

    python benchmarks/decode_overhead.py [--drafter FOLDER] [--batch-size 16] [--no-record]

Decodes prompts with the embedded target and a drafter, and marks the beginning and the end of every
call of a model in the same run: with events on the GPU's own clock, so that it holds whether the
GPU or the launching host is the slower one. What the loop takes beyond these calls is its own:
masks, judging, bookkeeping, the one wait per pass. The goal is at most 15% on an H200.
"""

import argparse
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from results import record

from dflash_offline.decode_target import TargetDecoder
from dflash_offline.speculate import DecodingSettings, decode
from stage1_extract.config import TargetConfig
from stage1_extract.target import load_target
from stage2_train.architecture import DrafterArchitecture, default_target_layer_ids
from stage2_train.drafter import Drafter, initialize
from stage2_train.export import load_any_drafter
from stage2_train.target_head import TargetHead


class ModelClock:
    """Marks when calls of the models begin and end, on the device's clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[tuple[Any, Any]] = []

    def mark(self) -> Any:
        """Note this moment in the device's queue."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds from one mark to another; the device must have passed both."""
        if self.device.type != "cuda":
            return float(end - start)
        return float(start.elapsed_time(end)) / 1000.0

    def watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Give the method with its calls marked."""

        def marked(*args: Any, **kwargs: Any) -> Any:
            start = self.mark()
            result = method(*args, **kwargs)
            self.marks.append((start, self.mark()))
            return result

        return marked

    def model_s(self) -> float:
        """Seconds spent in all marked calls."""
        return sum(self.seconds(start, end) for start, end in self.marks)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_drafter(config: Any, *, num_layers: int, block_size: int) -> Drafter:
    """A random drafter: it accepts next to nothing, so its loop makes the most passes."""
    drafter = Drafter(
        DrafterArchitecture(
            hidden_size=config.hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.hidden_size // config.num_attention_heads,
            intermediate_size=config.intermediate_size,
            rms_norm_eps=1e-6,
            vocab_size=config.vocab_size,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            max_position_embeddings=config.max_position_embeddings,
            block_size=block_size,
            mask_token_id=0,
            target_layer_ids=default_target_layer_ids(num_layers, config.num_hidden_layers),
            num_target_layers=config.num_hidden_layers,
            layer_types=("full_attention",) * num_layers,
        )
    )
    initialize(drafter, seed=0)
    return drafter


def head_of_model(model: Any) -> TargetHead:
    """The target's own embedding and LM head, without copies."""
    return TargetHead(
        config=model.config.to_dict(),
        embed_weight=model.get_input_embeddings().weight,
        lm_head_weight=model.get_output_embeddings().weight,
        lm_head_bias=None,
        embedding_scale=1.0,
        logit_scale=1.0,
        final_logit_softcapping=None,
        tokenizer_size=model.config.vocab_size,
        mask_token_id=None,
        eos_token_ids=(),
    )


def measure(model: Any, drafter: Drafter, args: argparse.Namespace) -> dict[str, float]:
    """Decode several times; gives the figures of the run whose overhead is the median."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(
        0, model.config.vocab_size, (args.batch_size, args.prompt_tokens), generator=generator
    ).tolist()
    arguments: dict[str, Any] = {
        "settings": DecodingSettings(max_new_tokens=args.new_tokens),
        "batch_size": args.batch_size,
        "drafter": drafter,
        "head": head_of_model(model),
    }
    target = TargetDecoder(model, layer_ids=drafter.architecture.target_layer_ids)
    decode(target, prompts, **arguments)
    runs = [measure_once(target, drafter, prompts, arguments) for _ in range(args.repeats)]
    return sorted(runs, key=lambda figures: figures["overhead_fraction"])[len(runs) // 2]


def measure_once(
    target: TargetDecoder, drafter: Drafter, prompts: Any, arguments: dict[str, Any]
) -> dict[str, float]:
    """Decode once with every model call marked."""
    clock = ModelClock(target.device)
    with ExitStack() as stack:
        for owner, name in (
            (target.model, "forward"),
            (drafter, "forward"),
            (drafter, "context_key_values"),
        ):
            stack.enter_context(patch.object(owner, name, clock.watched(getattr(owner, name))))
        # The loop makes its own copy of the head, so the class is watched.
        logits = TargetHead.logits
        watched = clock.watched(logits)
        stack.enter_context(
            patch.object(TargetHead, "logits", lambda head, hidden: watched(head, hidden))
        )
        decoding = decode(target, prompts, **arguments)
    synchronize(target.device)
    # The first two calls are the prefill, which `decode_s` leaves out: target, drafter's context.
    del clock.marks[:2]
    model_s = clock.model_s()
    return {
        "num_passes": max(len(each.acceptance_lengths) for each in decoding.generations),
        "loop_s": decoding.decode_s,
        "model_passes_s": model_s,
        "overhead_fraction": decoding.decode_s / model_s - 1.0,
        "tokens_per_s": decoding.tokens_per_s,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="embedded:smollm2-135m-instruct")
    parser.add_argument("--drafter", type=Path, help="drafter folder; default: a random one")
    parser.add_argument("--num-layers", type=int, default=5)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--torch-threads", type=int, default=1)
    parser.add_argument("--no-record", action="store_true", help="print only")
    args = parser.parse_args()
    torch.set_num_threads(args.torch_threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = args.dtype or ("bfloat16" if device == "cuda" else "float32")
    target = load_target(TargetConfig(model=args.target, dtype=dtype), device=device)
    if args.drafter is None:
        drafter = make_drafter(
            target.config, num_layers=args.num_layers, block_size=args.block_size
        )
    else:
        drafter = load_any_drafter(args.drafter, num_target_layers=target.config.num_hidden_layers)
        args.block_size = drafter.architecture.block_size
        args.num_layers = drafter.architecture.num_hidden_layers
    drafter = drafter.to(device, getattr(torch, dtype)).eval()
    figures = measure(target.model, drafter, args)
    name = torch.cuda.get_device_name() if device == "cuda" else f"{args.torch_threads} CPU threads"
    shape = f"{args.batch_size} prompts, block {args.block_size}, {args.num_layers} draft layers"
    units = {"num_passes": "passes", "overhead_fraction": "1", "tokens_per_s": "tokens/s"}
    found = {f"decode_{key}": (value, units.get(key, "s"), shape) for key, value in figures.items()}
    if args.no_record:
        print(json.dumps(figures, indent=1))
    else:
        packages = ("torch", "transformers")
        record("Decoding beyond the model passes", found, device=name, packages=packages)


if __name__ == "__main__":
    main()
