"""Prompts that a chat target writes itself: as many as one likes, of the kinds it was trained on.

    python benchmarks/own_prompts.py FOLDER [--model MODEL] [--seconds 30]
    dflash-offline regenerate RUN.toml     (regenerate.prompts = FOLDER)

A target that learned from whole conversations also writes their first half: given the template up
to where the user speaks, and a word or two to begin with, it goes on with a prompt of the kind that
it was trained on. Beginnings lead to small talk, word problems and code. No prompt that shares 40
characters with an evaluated one is kept, none twice.
"""

import argparse
import inspect
import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from quality_run import kept, write_prompt_lines
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dflash_offline.suites import PUBLIC_SUITES, public_turns
from stage1_extract.config import TargetConfig
from stage1_extract.rendering import render
from stage1_extract.replayed_slots import ReplayedSlots
from stage1_extract.target import load_target, resolve_target
from stage1_extract.target_files import stop_token_ids
from stage1_extract.target_transformers import TransformersTarget

_NAMES = (
    "Anna Ben Carla David Elena Farid Grace Hugo Irene Jamal Karin Liam Maya Noah Olga Peter Rosa "
    "Sam Tina Victor Wendy Yusuf Zoe Mark Lucy Tom Jenny Carlos Emily Kevin Alice Bob John Mary "
    "James Sarah Michael Linda Tim Jessica Mr.~Lee Ms.~Green"
).split()
_DOINGS = (
    "has|bought|is|wants to|sells|earns|saved|needs|went to|runs|reads|bakes|works|drives|makes|"
    "spends|collects|plants|and his friends|and her sister|can|gave|started with|ordered"
).split("|")
_SCENES = (
    "A store|A farmer|There are|In a class|A bakery|A train|A baker|A school|A company|A box of|"
    "A group of|The price of|If a|A car|A rectangle|A teacher|A garden|On Monday|A restaurant|"
    "A recipe|A pack of|The sum of|A tank|A family|A book|Every day|A shirt|A theater|A jar|A bus"
).split("|")
_CHAT = (
    "|||||Write|Write a short|Write an email|Explain|What|What is|What are|How|How can I|How do|"
    "Imagine|Compose|Describe|Compare|Why|Can you|Could you|I|I'm|Give me|Suggest|Provide|Create|"
    "Discuss|Which|Summarize|Rewrite|Edit|Translate|Classify|Extract|Read the following|Given|"
    "Draft|Design|Develop|Help me|Tell me|Who|When|You are|Act as|Pretend|Suppose|Is it|Do you|"
    "The following|Identify|List|Analyze|Evaluate|Solve|Let|Find|Please|In the|As a"
).split("|")
_CODE_ASKS = (
    "Write a Python function|Write a Python function to|Write a Python function that takes|"
    "Create a Python function|Implement a Python function|Develop a Python|Write a function|"
    "Implement a function|Write a Python program|Fix the|I'm trying to write a Python"
).split("|")
_VERBS = (
    "count sum find get is has remove sort filter merge reverse max min check convert split join "
    "select compare generate compute make add all unique longest shortest first last number total "
    "even odd prime string list words digits rotate encode decode parse flip match order fib solve"
).split()
_CODE_HEADS = (
    "Complete the following function:\n```python\ndef {verb}",
    "Complete the following function:\n```python\nfrom typing import List\n\n\ndef {verb}",
    "Complete this function:\n```python\ndef {verb}_",
    "Finish the function:\n```python\n\ndef {verb}_",
)
Request = tuple[str, str]
"""Kind of a prompt, and its text or first words."""
_MIN_PROBABILITY_OF_LARGEST = 0.05
_MAX_PROMPT_TOKENS = 160
_FILL_SHARE = 8
"""Slots are filled again when one in so many is free."""


def beginnings(seed: int) -> Iterator[tuple[str, str]]:
    """Endless (kind, first words of a prompt): half of them word problems and code, half chat."""
    draw = random.Random(seed)
    while True:
        name = draw.choice(_NAMES).replace("~", " ")
        yield "words", f"{name} {draw.choice(_DOINGS)}"
        yield "words", draw.choice(_SCENES) if draw.random() < 0.6 else f"{name}"
        yield "chat", draw.choice(_CHAT)
        yield "chat", draw.choice(_CHAT)
        yield "chat", draw.choice(_CHAT)
        if draw.random() < 0.4:
            yield "code", draw.choice(_CODE_ASKS)
        else:
            yield "code", draw.choice(_CODE_HEADS).format(verb=draw.choice(_VERBS))


def likely_tokens(
    logits: Tensor, *, temperature: float, top_p: float, uniforms: Tensor | None
) -> Tensor:
    """Draws among tokens that are likely enough beside the likeliest; without sorting."""
    del top_p, uniforms
    scaled = logits.float() / temperature
    floor = scaled.amax(dim=-1, keepdim=True) + float(np.log(_MIN_PROBABILITY_OF_LARGEST))
    noise = -torch.log(-torch.log(torch.rand_like(scaled).clamp(1e-9, 1 - 1e-7)))
    drawn: Tensor = torch.where(scaled >= floor, scaled + noise, float("-inf")).argmax(dim=-1)
    return drawn


def written(
    slots: ReplayedSlots, prompts: Iterator[tuple[Request, list[int]]], *, budget_s: float
) -> list[tuple[Request, list[int]]]:
    """What the target writes to endless prompts within a time, in order of ending.

    What is half written by then is dropped.
    """
    found: list[tuple[Request, list[int]]] = []
    start_s = time.time()
    while time.time() - start_s < budget_s:
        if slots.num_free * _FILL_SHARE >= slots.num_slots:
            slots.start(list(itertools.islice(prompts, slots.num_free)))
        found += slots.step()
    num_tokens, elapsed_s = sum(len(tokens) for _, tokens in found), time.time() - start_s
    print(f"{len(found)} written, {num_tokens:,} tokens, {num_tokens / elapsed_s:,.0f} tok/s")
    return found


def evaluated_text() -> str:
    """All that the public suites ask."""
    return "\n".join(
        turn for suite in PUBLIC_SUITES for turns in public_turns(suite) for turn in turns
    )


def own_prompts(
    target: TransformersTarget,
    evaluated: str,
    *,
    stop_ids: frozenset[int],
    num_slots: int,
    budget_s: float,
    seed: int,
) -> list[tuple[str, str]]:
    """(kind, prompt) of the prompts that the target writes within a time, mixed."""
    tokenizer = target.tokenizer
    head, _ = around_prompt(tokenizer)

    def starts() -> Iterator[tuple[Request, list[int]]]:
        for kind, words in beginnings(seed):
            yield (kind, words), tokenizer.encode(head + words, add_special_tokens=False)

    slots = ReplayedSlots(
        target.model,
        num_slots=num_slots,
        max_new_tokens=_MAX_PROMPT_TOKENS,
        stop_ids=stop_ids,
        temperature=1.0,
        choose=likely_tokens,
    )
    found = written(slots, starts(), budget_s=budget_s)
    complete = [(request, tokens) for request, tokens in found if tokens[-1] in stop_ids]
    texts = tokenizer.batch_decode([tokens[:-1] for _, tokens in complete])
    prompts: dict[str, str] = {}
    for ((kind, words), _), text in zip(complete, texts, strict=True):
        prompts.setdefault((words + text).strip(), kind)
    return [(prompts[text], text) for text in kept(prompts, evaluated, limit=10**9)]


def around_prompt(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What the chat template puts before and behind a first message."""
    marked: str = tokenizer.decode(
        render([{"role": "user", "content": "@@"}], tokenizer, {}, add_generation_prompt=True)
    )
    head, tail = marked.split("@@")
    return head, tail


def main() -> None:
    """Writes the prompts, one file for each kind; ids are `own_<kind>-<number>`."""
    parser = argparse.ArgumentParser(description=inspect.getdoc(inspect.getmodule(main)))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="embedded:smollm2-135m-instruct")
    parser.add_argument("--slots", type=int, default=1536, help="prompts written at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--evaluated", type=Path, help="text of the suites; else they are fetched")
    arguments = parser.parse_args()
    evaluated = arguments.evaluated.read_text() if arguments.evaluated else evaluated_text()
    config = TargetConfig(model=arguments.model)
    target = load_target(config, device="cuda" if torch.cuda.is_available() else "cpu")
    prompts = own_prompts(
        target,
        evaluated,
        stop_ids=frozenset(stop_token_ids(resolve_target(config), target.config)),
        num_slots=arguments.slots,
        budget_s=arguments.seconds,
        seed=arguments.seed,
    )
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for kind in sorted({kind for kind, _ in prompts}):
        texts = [text for each, text in prompts if each == kind]
        write_prompt_lines(arguments.folder, f"own_{kind}", texts)


if __name__ == "__main__":
    main()
