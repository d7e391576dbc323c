"""How much longer decoding with a drafter takes than its model passes alone.

    python benchmarks/decode_overhead.py [--drafter FOLDER] [--batch-size 16] [--no-record]

Decodes prompts with the embedded target and a drafter, and notes every call of a model with its
arguments. Then makes the same calls again, one behind the other, with nothing between them. What
the loop takes beyond that is its own: drafting masks, judging, bookkeeping, the one wait per pass.
The goal is at most 15% on an H200.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


class RecordedCalls:
    """Calls of the models, to be made again."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []

    def watch(self, owner: Any, name: str, *, before: Callable[[], Callable[[], Any]]) -> None:
        """Note every call of a method; `before` gives what must be set up before its repetition."""
        method = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            set_up = before()

            def again() -> None:
                set_up()
                method(*args, **kwargs)

            self.calls.append(again)
            return method(*args, **kwargs)

        setattr(owner, name, noted)

    def replay_s(self, device: torch.device) -> float:
        """Make all calls again; gives the seconds."""
        synchronize(device)
        start_s = time.perf_counter()
        with torch.inference_mode():
            for call in self.calls:
                call()
        synchronize(device)
        return time.perf_counter() - start_s


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
    """Decode once with notes, once without, and replay the notes."""
    device = next(model.parameters()).device
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
    decoding = min(
        (decode(target, prompts, **arguments) for _ in range(args.repeats)),
        key=lambda decoding: decoding.decode_s,
    )

    recorded = RecordedCalls()

    def place_again() -> Callable[[], Any]:
        cache = target.cache
        layers = [layer for layer in cache.layers if hasattr(layer, "slots")]
        slots, num_visible = layers[0].slots, layers[0].num_visible
        # Rows that end are dropped: the call is made again on the rows it was made on.
        held = [(layer, layer.keys, layer.values) for layer in layers if layer.is_initialized]

        def set_up() -> None:
            for layer, keys, values in held:
                layer.keys, layer.values = keys, values
            cache.place(slots, num_visible=num_visible)

        return set_up

    recorded.watch(model, "forward", before=place_again)
    for name in ("forward", "context_key_values"):
        recorded.watch(drafter, name, before=lambda: lambda: None)
    decode(target, prompts, **arguments)
    for owner, name in ((model, "forward"), (drafter, "forward"), (drafter, "context_key_values")):
        delattr(owner, name)
    # The first two calls are the prefill: target, then the drafter's context.
    del recorded.calls[:2]
    head_s = head_seconds(arguments["head"], decoding, args, device)
    forward_s = min(recorded.replay_s(device) for _ in range(args.repeats)) + head_s
    num_passes = max(len(each.acceptance_lengths) for each in decoding.generations)
    return {
        "num_passes": num_passes,
        "loop_s": decoding.decode_s,
        "model_passes_s": forward_s,
        "overhead_fraction": decoding.decode_s / forward_s - 1.0,
        "tokens_per_s": decoding.tokens_per_s,
    }


def head_seconds(
    head: TargetHead, decoding: Any, args: argparse.Namespace, device: torch.device
) -> float:
    """Seconds of the LM head on the drafted rows, part of the drafter's passes."""
    num_passes = max(len(each.acceptance_lengths) for each in decoding.generations)
    num_rows = args.batch_size * (args.block_size - 1)
    hidden = torch.zeros(num_rows, head.hidden_size, dtype=head.embed_weight.dtype, device=device)
    with torch.inference_mode():
        head.logits(hidden)
        synchronize(device)
        start_s = time.perf_counter()
        for _ in range(num_passes):
            head.logits(hidden)
        synchronize(device)
    return time.perf_counter() - start_s


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
    parser.add_argument("--repeats", type=int, default=3)
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
