"""Prompts that a chat target writes itself, and its greedy answers to them.

    python benchmarks/own_prompts.py OUT_DIR [--model ...] [--prompts-s 30] [--answers-s 70]

A target that learned from whole conversations also writes their first half: given the template up
to where the user speaks, and a word or two to begin with, it goes on with a prompt of the kind that
it was trained on. Beginnings lead to small talk, word problems and code. No prompt that shares 40
characters with an evaluated one is kept, none twice. Answers are kept as arrays, a file for each
kind (`kind`, `prompt_ids`, ...); `quality_run.py answers` makes conversations of them.
"""

import argparse
import inspect
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from quality_run import kept
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dflash_offline.suites import PUBLIC_SUITES, public_turns
from stage1_extract import replayed_slots
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
_MIN_PROBABILITY_OF_LARGEST = 0.05
_MAX_PROMPT_TOKENS = 160
_MAX_ANSWER_TOKENS = 256
_ANSWERED_PROMPT_TOKENS = 320


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
    return torch.where(scaled >= floor, scaled + noise, float("-inf")).argmax(dim=-1)


def written(
    target: TransformersTarget,
    prompts: Iterator[tuple[object, list[int]]],
    *,
    num_slots: int,
    max_new_tokens: int,
    stop_ids: frozenset[int],
    temperature: float,
    budget_s: float,
) -> list[tuple[object, list[int]]]:
    """What the target writes to prompts within a time, as (request, tokens) in order of ending."""
    slots = ReplayedSlots(
        target.model,
        num_slots=num_slots,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        temperature=temperature,
    )
    found: list[tuple[object, list[int]]] = []
    start_s, is_over = time.time(), False
    while True:
        if slots.num_free * 8 >= slots.num_slots and not is_over:
            batch = list(itertools.islice(prompts, slots.num_free))
            is_over = len(batch) < slots.num_free
            slots.start(batch)
        found += slots.step()
        elapsed_s = time.time() - start_s
        if elapsed_s > budget_s or slots.num_running == 0:
            break
    num_tokens = sum(len(tokens) for _, tokens in found)
    print(
        f"{len(found)} written, {num_tokens:,} tokens, {num_tokens / elapsed_s:,.0f} tok/s in "
        f"{elapsed_s:.1f} s",
        flush=True,
    )
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
    marked: str = tokenizer.decode(
        render([{"role": "user", "content": "@@"}], tokenizer, {}, add_generation_prompt=True)
    )
    head = marked[: marked.index("@@")]

    def starts() -> Iterator[tuple[object, list[int]]]:
        for kind, words in beginnings(seed):
            yield (kind, words), tokenizer.encode(head + words, add_special_tokens=False)

    plain = replayed_slots.next_tokens
    replayed_slots.next_tokens = likely_tokens
    try:
        found = written(
            target,
            starts(),
            num_slots=num_slots,
            max_new_tokens=_MAX_PROMPT_TOKENS,
            stop_ids=stop_ids,
            temperature=1.0,
            budget_s=budget_s,
        )
    finally:
        replayed_slots.next_tokens = plain
    complete = [(request, tokens) for request, tokens in found if tokens[-1] in stop_ids]
    texts = tokenizer.batch_decode([tokens[:-1] for _, tokens in complete])
    prompts = {}
    for (request, _), text in zip(complete, texts, strict=True):
        kind, words = request  # type: ignore[misc]
        prompts.setdefault((words + text).strip(), kind)
    return [(prompts[text], text) for text in kept(prompts, evaluated, limit=10**9)]


def write_arrays(path: Path, kind: str, pairs: Sequence[tuple[list[int], list[int]]]) -> None:
    """Writes prompts and answers of one kind; tokens fit 16 bits or are refused by numpy."""
    prompts, answers = zip(*pairs, strict=True)
    np.savez_compressed(
        path,
        kind=np.array([kind] * len(pairs)),
        prompt_lengths=np.array([len(each) for each in prompts]),
        answer_lengths=np.array([len(each) for each in answers]),
        prompt_ids=np.concatenate([np.array(each, np.uint16) for each in prompts]),
        answer_ids=np.concatenate([np.array(each, np.uint16) for each in answers]),
    )
    print(f"{path.name}: {len(pairs)} answers, {path.stat().st_size / 1e6:.1f} MB", flush=True)


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[list[int]]:
    """Prompts in the chat template, many at once."""
    marked: str = tokenizer.decode(
        render([{"role": "user", "content": "@@"}], tokenizer, {}, add_generation_prompt=True)
    )
    head, tail = marked.split("@@")
    texts = [head + each + tail for each in prompts]
    encoded: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return encoded


def main() -> None:
    """Writes prompts, then answers."""
    parser = argparse.ArgumentParser(description=inspect.getdoc(inspect.getmodule(main)))
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="embedded:smollm2-135m-instruct")
    parser.add_argument("--slots", type=int, default=1536)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts-s", type=float, default=30.0)
    parser.add_argument("--answers-s", type=float, default=70.0)
    parser.add_argument("--evaluated", type=Path, help="text of the suites; else they are fetched")
    arguments = parser.parse_args()
    evaluated = arguments.evaluated.read_text() if arguments.evaluated else evaluated_text()
    config = TargetConfig(model=arguments.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = load_target(config, device=device)
    stop_ids = frozenset(stop_token_ids(resolve_target(config), target.config))
    start_s = time.time()
    prompts = own_prompts(
        target,
        evaluated,
        stop_ids=stop_ids,
        num_slots=arguments.slots,
        budget_s=arguments.prompts_s,
        seed=arguments.seed,
    )
    counts = {kind: sum(k == kind for k, _ in prompts) for kind in ("words", "chat", "code")}
    print(f"{len(prompts)} prompts {counts} after {time.time() - start_s:.1f} s", flush=True)
    tokens = prompt_tokens(target.tokenizer, [text for _, text in prompts])
    asked = [
        ((kind, ids), ids)
        for (kind, _), ids in zip(prompts, tokens, strict=True)
        if len(ids) <= _ANSWERED_PROMPT_TOKENS
    ]
    # The first ones are long, so that room is made once.
    asked.sort(key=lambda each: -len(each[1]))
    asked = asked[: arguments.slots // 4] + random.Random(0).sample(
        asked[arguments.slots // 4 :], max(0, len(asked) - arguments.slots // 4)
    )
    answers = written(
        target,
        iter(asked),
        num_slots=arguments.slots,
        max_new_tokens=_MAX_ANSWER_TOKENS,
        stop_ids=stop_ids,
        temperature=0.0,
        budget_s=arguments.answers_s,
    )
    by_kind: dict[str, list[tuple[list[int], list[int]]]] = {}
    for (kind, ids), answer in answers:  # type: ignore[misc]
        by_kind.setdefault(kind, []).append((ids, answer))
    arguments.out.mkdir(parents=True, exist_ok=True)
    for kind, pairs in sorted(by_kind.items()):
        write_arrays(arguments.out / f"own-{kind}.npz", f"own_{kind}", pairs)


if __name__ == "__main__":
    main()
