"""Answers here: slots that are filled again as answers end, against batches that wait for the last.

    python benchmarks/regenerate_speed.py [--target MODEL] [--prompts N] [--slots N] [--no-record]

The embedded SmolLM2 answers the prompts of the demo's conversations, greedy, every way in one
process on the same prompts; answers are compared. On two CPU cores about 3 minutes; on a GPU, where
replayed slots are measured, too, one (`--prompts 2000 --slots 512 --max-new-tokens 256 --dtype
bfloat16`). Prompts beyond the demo's are the same with a few words more.
"""

import argparse
import itertools
import json
import os
import platform
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch
from results import record

from stage1_extract.config import RegenerateConfig, TargetConfig
from stage1_extract.generation import BatchedAnswers, Generator
from stage1_extract.rendering import render
from stage1_extract.replayed_slots import ReplayedSlots
from stage1_extract.slots import Slots
from stage1_extract.target import load_target, resolve_target
from stage1_extract.target_transformers import TransformersTarget

DATA = Path(__file__).parent.parent / "dflash_offline" / "presets" / "demo_conversations.jsonl"


def answer_all(
    answers: Slots | ReplayedSlots | BatchedAnswers, prompts: list[list[int]]
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


def prompts_of(target: TransformersTarget, count: int) -> list[list[int]]:
    """The demo's first messages, as often as needed, in the chat template."""
    lines = DATA.read_text(encoding="utf-8").splitlines()
    asked = [str(json.loads(line)["messages"][0]["content"]) for line in lines]
    texts = (
        text + " Say why." * again for again in range(-(-count // len(asked))) for text in asked
    )
    return [
        render(
            [{"role": "user", "content": text}], target.tokenizer, {}, add_generation_prompt=True
        )
        for text in itertools.islice(texts, count)
    ]


def main() -> None:
    """Measures every way and records them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="embedded:smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--no-record", action="store_true", help="Print only.")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = RegenerateConfig(max_new_tokens=arguments.max_new_tokens, batch_size=arguments.slots)
    target_config = TargetConfig(model=arguments.target, dtype=arguments.dtype)
    target = load_target(target_config, device=device)
    generator = Generator(target, resolve_target(target_config), config)
    prompts = prompts_of(target, arguments.prompts)

    def slots(kind: type[Slots] | type[ReplayedSlots]) -> Slots | ReplayedSlots:
        return kind(
            target.model,
            num_slots=arguments.slots,
            max_new_tokens=arguments.max_new_tokens,
            stop_ids=generator.stop_ids,
        )

    ways: dict[str, Callable[[], Slots | ReplayedSlots | BatchedAnswers]] = {
        "slots": lambda: slots(Slots),
        "batches": lambda: BatchedAnswers(generator, num_slots=arguments.slots),
    }
    if device == "cuda":
        ways = {"replayed": lambda: slots(ReplayedSlots)} | ways
    note = f"{arguments.dtype}, {len(prompts)} prompts, {arguments.slots} at once"
    figures: dict[str, tuple[float, str, str]] = {}
    answers, seconds = {}, {}
    for name, way in ways.items():
        answer_all(way(), prompts[:2])
        answers[name], seconds[name] = answer_all(way(), prompts)
        num_tokens = sum(map(len, answers[name].values()))
        rate = num_tokens / seconds[name]
        figures[f"regenerate_{name}_tok_s"] = (rate, "tok/s", f"{note}, {num_tokens} tokens")
    for name in list(ways)[:-1]:
        num_same = sum(answers[name][n] == answers["batches"][n] for n in range(len(prompts)))
        figures[f"regenerate_{name}_speedup"] = (
            seconds["batches"] / seconds[name],
            "x",
            f"time of batches by time of {name}; {num_same / len(prompts):.1%} of the answers are "
            "the same, others part where rounding decides",
        )
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
