"""Answers here: slots that are filled again as answers end, against batches that wait for the last.

    python benchmarks/regenerate_speed.py [--target MODEL] [--prompts N] [--slots N] [--no-record]

The embedded SmolLM2 answers the prompts of the demo's conversations, greedy, both ways in one
process on the same prompts; answers are compared. On two CPU cores about 3 minutes, on a GPU one
(`--prompts 2000 --slots 512 --max-new-tokens 256`).
"""

import argparse
import json
import os
import platform
import time
from collections import deque
from pathlib import Path

import torch
from results import record

from stage1_extract.config import RegenerateConfig, TargetConfig
from stage1_extract.generation import BatchedAnswers, Generator
from stage1_extract.rendering import render
from stage1_extract.slots import Slots
from stage1_extract.target import load_target, resolve_target

DATA = Path(__file__).parent.parent / "dflash_offline" / "presets" / "demo_conversations.jsonl"


def answer_all(
    answers: Slots | BatchedAnswers, prompts: list[list[int]]
) -> tuple[dict[int, list[int]], float]:
    """Answers by the place of their prompt, and the seconds they took; the longest start first."""
    order = sorted(range(len(prompts)), key=lambda place: (-len(prompts[place]), place))
    waiting = deque((place, prompts[place]) for place in order)
    found: dict[int, list[int]] = {}
    start_s = time.perf_counter()
    while waiting or answers.num_running:
        if answers.num_running == 0 or answers.num_free * 8 >= answers.num_slots:
            count = min(answers.num_free, len(waiting))
            answers.start([waiting.popleft() for _ in range(count)])
        found.update(answers.step())
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return found, time.perf_counter() - start_s


def main() -> None:
    """Measures both ways and records them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="embedded:smollm2-135m-instruct")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--no-record", action="store_true", help="Print only.")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = RegenerateConfig(max_new_tokens=arguments.max_new_tokens, batch_size=arguments.slots)
    target_config = TargetConfig(model=arguments.target, dtype="float32")
    target = load_target(target_config, device=device)
    generator = Generator(target, resolve_target(target_config), config)
    lines = DATA.read_text(encoding="utf-8").splitlines()[: arguments.prompts]
    prompts = [
        render(json.loads(line)["messages"][:1], target.tokenizer, {}, add_generation_prompt=True)
        for line in lines
    ]

    def slots() -> Slots:
        return Slots(
            target.model,
            num_slots=arguments.slots,
            max_new_tokens=arguments.max_new_tokens,
            stop_ids=generator.stop_ids,
        )

    answer_all(slots(), prompts[:2])
    in_slots, slots_s = answer_all(slots(), prompts)
    in_batches, batches_s = answer_all(
        BatchedAnswers(generator, num_slots=arguments.slots), prompts
    )
    num_tokens = sum(map(len, in_slots.values()))
    num_same = sum(in_slots[place] == in_batches[place] for place in range(len(prompts)))
    note = f"{len(prompts)} prompts, {arguments.slots} at once, {num_tokens} tokens written"
    figures = {
        "regenerate_slots_tok_s": (num_tokens / slots_s, "tok/s", note),
        "regenerate_batches_tok_s": (
            sum(map(len, in_batches.values())) / batches_s,
            "tok/s",
            "transformers' generate",
        ),
        "regenerate_slots_speedup": (batches_s / slots_s, "x", "time of batches by time of slots"),
        "regenerate_same_answers_fraction": (
            num_same / len(prompts),
            "",
            "float32; ties broken by rounding differ",
        ),
    }
    about_device = (
        torch.cuda.get_device_name(0)
        if device == "cuda"
        else f"{os.cpu_count()} CPU cores, {platform.machine()}"
    )
    packages = ("torch", "transformers")
    record(
        "Answers of the target, slots against batches",
        figures,
        device=about_device,
        packages=packages,
        only_print=arguments.no_record,
    )


if __name__ == "__main__":
    main()
