"""Answering: dialogues answered by the target loaded here, in slots or in batches."""

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from stage1_extract.config import DataConfig, RegenerateConfig, TargetConfig
from stage1_extract.decode_attention import DecodeUnsupportedError
from stage1_extract.dialogues import Dialogue, render_prompt
from stage1_extract.generation import BatchedAnswers, Generator
from stage1_extract.problems import Problems, UnusableConversationError
from stage1_extract.replayed_slots import ReplayedSlots, can_replay
from stage1_extract.signals import StopRequest
from stage1_extract.slots import Slots, can_share_slots
from stage1_extract.target import load_target, resolve_target
from stage1_extract.target_transformers import TransformersTarget

_FEW_ANSWERS, _MANY_ANSWERS = 16, 512
"""At once where settings do not say: step by step, and where a step is replayed as a whole."""
_FILL_SHARE = 8
"""Slots are filled again when one in so many is free."""


def answer_here(
    dialogues: Sequence[Dialogue],
    target: TargetConfig,
    data: DataConfig,
    config: RegenerateConfig,
    problems: Problems,
    stop: StopRequest,
    *,
    device: str | None = None,
) -> Iterator[list[Dialogue]]:
    """Answers dialogues with the target loaded here, in the order in which they finish."""
    loaded = load_target(target, device=device or ("cuda" if torch.cuda.is_available() else "cpu"))
    generator = Generator(loaded, resolve_target(target), config)
    usable = []
    for dialogue in dialogues:
        try:
            render_prompt(dialogue, loaded.tokenizer, data.template_arguments)
            generator.check_length(dialogue.prompt_ids, source=dialogue.source)
        except UnusableConversationError as problem:
            problems.add(problem)
        else:
            usable.append(dialogue)
    # The longest first, so that memory fails early.
    usable.sort(key=lambda each: (-len(each.prompt_ids), each.id))

    def answered(*, may_replay: bool) -> Iterator[list[Dialogue]]:
        answers = answers_of(
            loaded, generator, config, num_prompts=len(usable), may_replay=may_replay
        )
        return answer_all(usable, answers, generator, loaded.tokenizer, data, stop)

    try:
        yield from answered(may_replay=True)
        return
    except DecodeUnsupportedError as error:
        # The first prompts that were read showed it: nothing is answered yet.
        print(f"answers are written step by step: {error}", file=sys.stderr)
    # Only here are the replayed slots, and their memory, gone.
    yield from answered(may_replay=False)


def answers_of(
    target: TransformersTarget,
    generator: Generator,
    config: RegenerateConfig,
    *,
    num_prompts: int,
    may_replay: bool = True,
) -> "Slots | ReplayedSlots | BatchedAnswers":
    """Slots where the target's caches allow them, replayed on a GPU where it can; else batches.

    No more of them than there are prompts: replayed slots cost memory and time also when idle.
    """
    has_slots = can_share_slots(target.model)
    is_on_gpu = target.model.device.type == "cuda"
    is_replayed = may_replay and has_slots and is_on_gpu and can_replay(target.model)
    num_slots = config.batch_size or (_MANY_ANSWERS if is_replayed else _FEW_ANSWERS)
    num_slots = max(1, min(num_slots, num_prompts))
    if not has_slots:
        return BatchedAnswers(generator, num_slots=num_slots)
    return (ReplayedSlots if is_replayed else Slots)(
        target.model,
        num_slots=num_slots,
        max_new_tokens=config.max_new_tokens,
        stop_ids=generator.stop_ids,
        temperature=config.temperature,
        top_p=config.top_p,
        seed=config.seed,
    )


def answer_all(
    dialogues: Sequence[Dialogue],
    answers: "Slots | ReplayedSlots | BatchedAnswers",
    generator: Generator,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    stop: StopRequest,
) -> Iterator[list[Dialogue]]:
    """Answers all turns of dialogues; as answers end, the next prompts take their places.

    Args:
        dialogues: Rendered up to their first answer, in the order to start them in.
        answers: Where answers are written.
        generator: Knows the stop tokens and the target's longest input.
        tokenizer: The target's.
        data: Gives the template arguments.
        stop: Ends it behind the current step; what is half written is dropped.

    Yields:
        Finished dialogues.
    """
    waiting = deque(dialogues)
    while (waiting or answers.num_running) and not stop:
        try:
            if _is_worth_filling(answers):
                count = min(answers.num_free, len(waiting))
                started = [waiting.popleft() for _ in range(count)]
                answers.start([(each, each.prompt_ids) for each in started])
            ended = answers.step()
        except torch.cuda.OutOfMemoryError:
            if answers.num_slots == 1:
                raise
            waiting.extendleft(reversed(answers.shrink()))
            print(f"out of memory: {answers.num_slots} answers at once", file=sys.stderr)
            continue
        finished = []
        for dialogue, answer_ids in ended:
            add_written(dialogue, answer_ids, generator, tokenizer)
            if has_next_turn(dialogue, generator, tokenizer, data.template_arguments):
                waiting.appendleft(dialogue)
            else:
                finished.append(dialogue)
        if finished:
            yield finished


def _is_worth_filling(answers: "Slots | ReplayedSlots | BatchedAnswers") -> bool:
    """Whether so many slots are free that reading prompts pays: each reading stops the others."""
    return answers.num_running == 0 or answers.num_free * _FILL_SHARE >= answers.num_slots


def add_written(
    dialogue: Dialogue,
    answer_ids: list[int],
    generator: Generator,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Adds the tokens that the target wrote to a dialogue, as text and as they are."""
    has_ended = answer_ids[-1] in generator.stop_ids
    text_ids = answer_ids[:-1] if has_ended else answer_ids
    text = tokenizer.decode(text_ids, clean_up_tokenization_spaces=False)
    dialogue.written.append(dialogue.prompt_ids + answer_ids)
    dialogue.add_answer(
        {"role": "assistant", "content": text},
        num_tokens=len(answer_ids),
        was_cut=not has_ended,
    )


def has_next_turn(
    dialogue: Dialogue,
    generator: Generator,
    tokenizer: PreTrainedTokenizerBase,
    template_arguments: Mapping[str, Any],
) -> bool:
    """Renders the next turn of a dialogue, if there is one that the target can answer."""
    if dialogue.is_finished:
        return False
    num_messages = len(dialogue.messages)
    try:
        render_prompt(dialogue, tokenizer, template_arguments)
        generator.check_length(dialogue.prompt_ids, source=dialogue.source)
    except UnusableConversationError:
        # The turns answered so far stand.
        del dialogue.messages[num_messages:]
        return False
    return True
