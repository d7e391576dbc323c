"""Regenerate: the target answers prompts itself, because drafters learn from its own words.

Writes conversations as `extract` reads them, one JSON line each, appended batch by batch. A run
that is started again goes on with the ids that are missing.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from stage1_extract.config import DataConfig, RegenerateConfig, TargetConfig
from stage1_extract.conversations import Conversation, read_conversations
from stage1_extract.dialogues import Dialogue, record, render_prompt, start_dialogue
from stage1_extract.generation import Generator
from stage1_extract.problems import Problems, UnusableConversationError
from stage1_extract.server import answer_by_server
from stage1_extract.target import load_target, resolve_target, target_name
from stage1_extract.target_identity import weights_id
from stage1_extract.target_transformers import load_tokenizer


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
    problems = prompts.problems
    dialogues = [
        dialogue
        for prompt_id in open_ids
        if (dialogue := _start_or_skip(prompts[prompt_id], config, problems)) is not None
    ]
    tokenizer = load_tokenizer(target)
    if config.server is None:
        finished = answer_here(dialogues, target, data, config, problems, device=device)
    else:
        finished = answer_by_server(dialogues, config, data.template_arguments, problems)
    progress = _Progress(len(dialogues))
    for batch in finished:
        lines = _lines(batch, tokenizer, data.template_arguments, settings, problems)
        append_lines(output_path, lines)
        progress.show(batch)
    if problems.counts:
        summary = f"{problems.summary()}{problems.first()}"
        print(f"skipped: {summary}", file=sys.stderr)
    return output_path


def answer_here(
    dialogues: Sequence[Dialogue],
    target: TargetConfig,
    data: DataConfig,
    config: RegenerateConfig,
    problems: Problems,
    *,
    device: str | None = None,
) -> Iterator[list[Dialogue]]:
    """Answers dialogues with the target loaded here, batch by batch."""
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
    for batch in batches_by_length(usable, config.batch_size):
        answer_batch(batch, generator, loaded.tokenizer, data.template_arguments)
        yield batch


def batches_by_length(dialogues: Sequence[Dialogue], batch_size: int) -> Iterator[list[Dialogue]]:
    """Batches of prompts of similar length, the longest first, so that memory fails early."""
    by_length = sorted(dialogues, key=lambda each: (-len(each.prompt_ids), each.id))
    for start in range(0, len(by_length), batch_size):
        yield by_length[start : start + batch_size]


def answer_batch(
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
            dialogue.written.append(dialogue.prompt_ids + answer_ids)
            dialogue.add_answer(
                {"role": "assistant", "content": text},
                num_tokens=len(answer_ids),
                was_cut=not has_ended,
            )
        unfinished = [dialogue for dialogue in waiting if not dialogue.is_finished]
        waiting = []
        for dialogue in unfinished:
            num_messages = len(dialogue.messages)
            render_prompt(dialogue, tokenizer, template_arguments)
            if generator.fits(dialogue.prompt_ids):
                waiting.append(dialogue)
            else:
                del dialogue.messages[num_messages:]


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
    content = path.read_bytes()
    if content and b"\n" not in content:
        raise ValueError(f"{path} was not written by regenerate; choose another regenerate.output")
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
    # Only now is the file known to be ours.
    with path.open("rb+") as file:
        file.truncate(content.rfind(b"\n") + 1)
    return found


def append_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Appends JSON lines durably; a crash leaves at most one broken line at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        for each in records:
            file.write(json.dumps(each, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _start_or_skip(
    conversation: Conversation, config: RegenerateConfig, problems: Problems
) -> Dialogue | None:
    try:
        return start_dialogue(conversation, turns=config.turns)
    except UnusableConversationError as problem:
        problems.add(problem)
        return None


def _lines(
    batch: Sequence[Dialogue],
    tokenizer: PreTrainedTokenizerBase,
    template_arguments: Mapping[str, Any],
    settings: Mapping[str, Any],
    problems: Problems,
) -> list[dict[str, Any]]:
    """The lines of the dialogues that can be recorded; the others are counted."""
    lines = []
    for dialogue in batch:
        try:
            lines.append(record(dialogue, tokenizer, template_arguments, settings))
        except UnusableConversationError as problem:
            problems.add(problem)
    return lines


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
        self._num_tokens += sum(each.num_new_tokens for each in batch)
        num_left = self._num_dialogues - self._num_answered
        left_s = elapsed_s / max(1, self._num_answered) * num_left
        print(
            f"answered {self._num_answered}/{self._num_dialogues}"
            f" | {self._num_tokens / elapsed_s:.0f} tok/s | {left_s / 60:.1f} min left",
            file=sys.stderr,
            flush=True,
        )
