"""Whether our decoder accepts exactly what the official one accepts, prompt by prompt.

    DFLASH_PEERS=PEERS python benchmarks/official_decoder.py RUN --drafter NAME \\
        [--set eval.num_prompts=50] [--no-record]

Decodes the run's evaluation prompts twice with one exported drafter: with `dflash` 0.1.0 (in PEERS,
see `peers.py`) one prompt at a time, and with ours, batched. The target serves both.
"""

import argparse
import time
from pathlib import Path

import torch
from peers import decode_here, judge
from results import record

from dflash_offline.config import drafter_run, load_run_file, store_dir_of
from dflash_offline.suites import dialogue_messages, load_suite
from stage1_extract.rendering import render
from stage1_extract.target import load_target
from stage2_train.acceptance import mean_acceptance_length
from stage2_train.device import choose_device
from stage2_train.target_head import load_target_head
from storage.reader import open_store


def main() -> None:
    """Decode, compare, print, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    config = load_run_file(args.run, overrides=args.overrides)
    torch.set_num_threads(config.eval.torch_threads)
    store = open_store(store_dir_of(config))
    head = load_target_head(store)
    target = load_target(config.target, device=str(choose_device()))
    suite = config.eval.suites[0]
    dialogues = load_suite(suite, snapshot=store.snapshot(), limit=config.eval.num_prompts)
    prompts = [
        list(dialogue.token_ids)
        if dialogue.token_ids is not None
        else render(
            list(dialogue_messages(dialogue, ())),
            target.tokenizer,
            store.identity.template_arguments,
            add_generation_prompt=True,
        )
        for dialogue in dialogues
    ]
    folder = drafter_run(config, args.drafter).drafter_dir / "export"
    start_s = time.perf_counter()
    official = judge(folder, target.model, prompts, config, list(head.eos_token_ids))
    official_s = time.perf_counter() - start_s
    head = head.to(choose_device(), target.model.dtype)
    ours = decode_here(folder, target.model, prompts, config, head)
    num_equal = sum(one == other for one, other in zip(official, ours, strict=True))
    print(f"{num_equal} of {len(prompts)} prompts with the same acceptance lengths")
    print(f"official: {mean_acceptance_length(official):.4f} in {official_s:.0f} s")
    print(f"ours: {mean_acceptance_length(ours):.4f}")
    if not args.no_record:
        note = f"{len(prompts)} prompts of {Path(suite).name}, {config.eval.max_new_tokens} tokens"
        record(
            "Our decoder against the official one",
            {
                "decoder_equals_official_fraction": (num_equal / len(prompts), "fraction", note),
                "decoder_official_acceptance": (
                    mean_acceptance_length(official),
                    "tokens per target pass",
                    note,
                ),
            },
            device=str(choose_device()),
            packages=("torch", "transformers"),
        )


if __name__ == "__main__":
    main()
