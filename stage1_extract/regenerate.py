"""Regenerate: the target answers prompts itself, because drafters learn from its own words.

Writes conversations as `extract` reads them, one JSON line each, appended batch by batch. A run
that is started again goes on with the ids that are missing.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from stage1_extract.config import DataConfig, RegenerateConfig, TargetConfig
from stage1_extract.conversations import Conversation, read_conversations
from stage1_extract.generation import Generator
from stage1_extract.problems import Problems, UnusableConversationError
from stage1_extract.sequences import is_prefix, render, tokens_id
from stage1_extract.target import load_target, resolve_target, target_name
from stage1_extract.target_identity import weights_id


@dataclass(kw_only=True)
class Dialogue:
    """A conversation that the target is answering turn by turn."""

    id: str
    source: str
    turns: list[list[dict[str, Any]]]
    """Given messages before each answer to come."""
    tools: list[dict[str, Any]] | None = None
    has_given_answers: bool = False
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation so far, answers included."""
    prompt_ids: list[int] = field(default_factory=list)
    """What the target answers next."""
    written: list[list[int]] = field(default_factory=list)
    """Prompt and answer tokens of each answer, as the target saw and wrote them."""
    was_cut: bool = False
    """Whether an answer ended at the length limit; later turns are then not asked."""


def regenerate(
    target: TargetConfig,
    data: DataConfig,
    config: RegenerateConfig,
    *,
    output_path: Path,
    device: str | None = None,
) -> Path:
    """Lets the target answer every prompt that the output does not hold yet.

    Args:
        target: The model that answers.
        data: Gives the template arguments and the tolerance for unusable lines.
        config: The prompts and how answers are decoded.
        output_path: JSONL file to append to; made, with its folder, when missing.
        device: Where the target runs; None takes a GPU if there is one.

    Returns:
        The output path.

    Raises:
        ValueError: No prompts, unusable prompts, or an output that other settings made.
    """
    if not config.prompts:
        raise ValueError("regenerate.prompts is empty; name at least one JSONL file of prompts")
    prompts = read_conversations(
        config.prompts,
        strict=data.strict,
        bad_line_limit=data.bad_line_limit,
        needs_answer=False,
    )
    settings = generation_settings(target, data, config)
    answered = answered_ids(output_path, settings)
    open_ids = [prompt_id for prompt_id in prompts.ids if prompt_id not in answered]
    if not open_ids:
        print(f"nothing to answer: {output_path} holds all {len(prompts)} conversations")
        return output_path
    loaded = load_target(target, device=device or ("cuda" if torch.cuda.is_available() else "cpu"))
    generator = Generator(loaded, resolve_target(target), config)
    dialogues = []
    for prompt_id in open_ids:
        try:
            dialogue = start_dialogue(prompts[prompt_id], turns=config.turns)
            render_prompt(dialogue, loaded.tokenizer, data.template_arguments)
            generator.check_length(dialogue.prompt_ids, source=dialogue.source)
        except UnusableConversationError as problem:
            prompts.problems.add(problem)
        else:
            dialogues.append(dialogue)
    progress = _Progress(len(dialogues))
    for batch in batches_by_length(dialogues, config.batch_size):
        answer(batch, generator, loaded.tokenizer, data.template_arguments)
        records = (record(each, loaded.tokenizer, data, settings) for each in batch)
        append_lines(output_path, _usable(records, prompts.problems))
        progress.show(batch)
    if prompts.problems.counts:
        summary = f"{prompts.problems.summary()}{prompts.problems.first()}"
        print(f"skipped: {summary}", file=sys.stderr)
    return output_path


def start_dialogue(conversation: Conversation, *, turns: str) -> Dialogue:
    """The given messages of a conversation, parted where the target is to answer.

    Raises:
        UnusableConversationError: Nothing in it asks for an answer.
    """

    def unusable(reason: str, detail: str = "") -> UnusableConversationError:
        return UnusableConversationError(reason, source=conversation.source, detail=detail)

    if conversation.messages is None:
        raise unusable("no messages", "pre-tokenised conversations cannot be answered")
    messages = [dict(message) for message in conversation.messages]
    if turns == "last":
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        parts = [messages[: answers[-1]] if answers else messages]
    else:
        if any(message["role"] == "tool" for message in messages):
            raise unusable(
                "tool messages", "they need their answers: set regenerate.turns = 'last'"
            )
        parts = _parts_ending_with_user(messages)
    if not parts or not parts[0] or parts[-1][-1]["role"] == "assistant":
        raise unusable("nothing to answer", "no user message stands before an answer")
    return Dialogue(
        id=conversation.id,
        source=conversation.source,
        turns=parts,
        tools=[dict(tool) for tool in conversation.tools] if conversation.tools else None,
        has_given_answers=any(each["role"] == "assistant" for part in parts for each in part),
    )


def render_prompt(
    dialogue: Dialogue,
    tokenizer: PreTrainedTokenizerBase,
    template_arguments: Mapping[str, Any],
) -> None:
    """Adds the next given messages and sets the tokens that the target is to go on from.

    Raises:
        UnusableConversationError: The chat template refuses the messages.
    """
    dialogue.messages += dialogue.turns[len(dialogue.written)]
    try:
        dialogue.prompt_ids = render(
            dialogue.messages,
            tokenizer,
            template_arguments,
            tools=dialogue.tools,
            add_generation_prompt=True,
        )
    except Exception as error:  # A template raises whatever it likes.
        raise UnusableConversationError(
            "chat template refuses it", source=dialogue.source, detail=str(error)
        ) from error


def batches_by_length(dialogues: Sequence[Dialogue], batch_size: int) -> Iterator[list[Dialogue]]:
    """Batches of prompts of similar length, the longest first, so that memory fails early."""
    by_length = sorted(dialogues, key=lambda each: (-len(each.prompt_ids), each.id))
    for start in range(0, len(by_length), batch_size):
        yield by_length[start : start + batch_size]


def answer(
    batch: Sequence[Dialogue],
    generator: Generator,
    tokenizer: PreTrainedTokenizerBase,
    template_arguments: Mapping[str, Any],
) -> None:
    """Answers all turns of a batch of dialogues, one round for each turn."""
    waiting = list(batch)
    while waiting:
        prompts = [dialogue.prompt_ids for dialogue in waiting]
        for dialogue, answer_ids in zip(waiting, generator.answer(prompts), strict=True):
            has_ended = answer_ids[-1] in generator.stop_ids
            text_ids = answer_ids[:-1] if has_ended else answer_ids
            text = tokenizer.decode(text_ids, clean_up_tokenization_spaces=False)
            dialogue.messages.append({"role": "assistant", "content": text})
            dialogue.written.append(dialogue.prompt_ids + answer_ids)
            dialogue.was_cut = not has_ended
        unfinished = [each for each in waiting if len(each.written) < len(each.turns)]
        waiting = []
        for dialogue in unfinished:
            if dialogue.was_cut:
                continue
            num_answered = len(dialogue.messages)
            render_prompt(dialogue, tokenizer, template_arguments)
            if generator.fits(dialogue.prompt_ids):
                waiting.append(dialogue)
            else:
                del dialogue.messages[num_answered:]


def record(
    dialogue: Dialogue,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """The JSON line of an answered dialogue.

    `num_tokens` and `tokens` (a hash) are recorded when the conversation, rendered anew, begins
    with exactly the tokens that the target saw and wrote, for every answer. `extract` then ends the
    sequence there: an answer broken off at the limit gets no end of turn that nobody produced.
    `greedy` holds only then, with greedy decoding, and when no given answer stands in between.

    Raises:
        UnusableConversationError: An answer is empty.
    """
    if not all(message["content"].strip() for message in _answers(dialogue)):
        raise UnusableConversationError("empty answer", source=dialogue.source)
    rendered = render(dialogue.messages, tokenizer, data.template_arguments, tools=dialogue.tools)
    is_exact = all(is_prefix(written, rendered) for written in dialogue.written)
    generation = dict(settings)
    generation["finish"] = "length" if dialogue.was_cut else "stop"
    generation["greedy"] = (
        is_exact and settings["temperature"] == 0.0 and not dialogue.has_given_answers
    )
    if is_exact:
        num_tokens = len(dialogue.written[-1])
        generation |= {"num_tokens": num_tokens, "tokens": tokens_id(rendered[:num_tokens])}
    line: dict[str, Any] = {"id": dialogue.id, "messages": dialogue.messages}
    if dialogue.tools:
        line["tools"] = dialogue.tools
    return line | {"generation": generation}


def generation_settings(
    target: TargetConfig, data: DataConfig, config: RegenerateConfig
) -> dict[str, Any]:
    """What every line of one output has in common; sampling settings only where they count."""
    settings: dict[str, Any] = {
        "target": target_name(target),
        "target_weights": weights_id(resolve_target(target)),
        "temperature": config.temperature,
        "max_new_tokens": config.max_new_tokens,
    }
    if config.temperature > 0:
        settings |= {"top_p": config.top_p, "seed": config.seed}
    if config.turns != "every":
        settings["turns"] = config.turns
    if data.template_arguments:
        settings["template_arguments"] = data.template_arguments
    return settings


def answered_ids(path: Path, settings: Mapping[str, Any]) -> set[str]:
    """Ids that an output already holds; a line broken off by a crash is cut away.

    Raises:
        ValueError: The output holds something else, or answers made with other settings.
    """
    if not path.exists():
        return set()
    with path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
    found = set()
    for number, text in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            line = json.loads(text)
            found.add(line["id"])
            made_with = {key: line["generation"].get(key) for key in settings}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}:{number} was not written by regenerate; choose another regenerate.output"
            ) from error
        if made_with != json.loads(json.dumps(settings)):
            differing = [key for key in settings if made_with[key] != settings[key]]
            raise ValueError(
                f"{path}:{number} was made with another {', '.join(differing)};"
                " choose another regenerate.output or restore the settings"
            )
    return found


def append_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Appends JSON lines durably; a crash leaves at most one broken line at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        for each in records:
            file.write(json.dumps(each, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _parts_ending_with_user(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Given messages without answers, a new part after each user message; a tail is dropped."""
    parts: list[list[dict[str, Any]]] = []
    part: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            continue
        part.append(message)
        if message["role"] == "user":
            parts.append(part)
            part = []
    return parts


def _answers(dialogue: Dialogue) -> list[dict[str, Any]]:
    """The answers just written, without those that were given."""
    answers = [message for message in dialogue.messages if message["role"] == "assistant"]
    return answers[-len(dialogue.written) :]


def _usable(records: Iterator[dict[str, Any]], problems: Problems) -> list[dict[str, Any]]:
    """Takes the records that can be made; counts the others."""
    usable = []
    while True:
        try:
            usable.append(next(records))
        except StopIteration:
            return usable
        except UnusableConversationError as problem:
            problems.add(problem)


class _Progress:
    """One line a batch: how many are answered, how fast, how long it will take."""

    def __init__(self, num_dialogues: int):
        self._num_dialogues = num_dialogues
        self._num_answered = 0
        self._num_tokens = 0
        self._start_s = time.monotonic()

    def show(self, batch: Sequence[Dialogue]) -> None:
        elapsed_s = time.monotonic() - self._start_s
        self._num_answered += len(batch)
        self._num_tokens += sum(len(each.written[-1]) - len(each.prompt_ids) for each in batch)
        left_s = elapsed_s / self._num_answered * (self._num_dialogues - self._num_answered)
        print(
            f"answered {self._num_answered}/{self._num_dialogues}"
            f" | {self._num_tokens / elapsed_s:.0f} tok/s | {left_s / 60:.1f} min left",
            file=sys.stderr,
            flush=True,
        )
