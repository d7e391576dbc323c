"""Regenerate: the target answers prompts itself, because drafters learn from its own words.

Writes conversations as `extract` reads them, one JSON line each, appended as they are finished. A
run that is started again goes on with the ids that are missing.
"""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from stage1_extract.answering import answer_here
from stage1_extract.config import DataConfig, RegenerateConfig, TargetConfig
from stage1_extract.conversations import Conversation, read_conversations
from stage1_extract.dialogues import Dialogue, record, start_dialogue
from stage1_extract.problems import Problems, UnusableConversationError
from stage1_extract.server import answer_by_server
from stage1_extract.signals import stop_requests
from stage1_extract.target import resolve_target, target_name
from stage1_extract.target_files import load_tokenizer
from stage1_extract.target_identity import weights_id

_WRITE_INTERVAL_S = 1.0


def regenerate(
    target: TargetConfig,
    data: DataConfig,
    config: RegenerateConfig,
    *,
    output_path: Path,
    device: str | None = None,
) -> bool:
    """Lets the target answer every prompt that the output does not hold yet.

    A first Ctrl-C (or SIGTERM, SIGUSR1) writes what is finished and ends; a second ends at once.

    Args:
        target: The model that answers.
        data: Gives the template arguments and the tolerance for unusable lines.
        config: The prompts and how answers are decoded.
        output_path: JSONL file to append to; made, with its folder, when missing.
        device: Where the target runs; None takes a GPU if there is one.

    Returns:
        Whether it came to its end; False when it was stopped and prompts are left.

    Raises:
        ValueError: No prompts, unusable prompts, an output that other settings made, or none of
            the open prompts could be answered.
    """
    if not config.prompts:
        raise ValueError("regenerate.prompts is empty; name at least one file of prompts")
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
        return True
    problems = prompts.problems
    dialogues = [
        dialogue
        for prompt_id in open_ids
        if (dialogue := _start_or_skip(prompts[prompt_id], config, problems)) is not None
    ]
    tokenizer = load_tokenizer(target)
    num_unusable = len(problems)
    with stop_requests() as stop:
        if config.server is None:
            finished = answer_here(dialogues, target, data, config, problems, stop, device=device)
        else:
            finished = answer_by_server(dialogues, config, data.template_arguments, problems, stop)
        with _Output(output_path, num_dialogues=len(dialogues)) as written:
            for batch in finished:
                lines = _lines(batch, tokenizer, data.template_arguments, settings, problems)
                written.add(batch, lines)
    if problems.counts:
        print(f"skipped: {problems.summary()}{problems.first()}", file=sys.stderr)
    num_left = len(dialogues) - written.num_lines - (len(problems) - num_unusable)
    if stop and num_left > 0:
        print(f"stopped with {num_left} prompts left; run the same command again", file=sys.stderr)
        return False
    if written.num_lines == 0:
        raise ValueError(f"none of {len(open_ids)} prompts could be answered{problems.first()}")
    return True


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


class _Output:
    """The output file while answers come in: what is finished is written once a second.

    A context manager; however it is left, what was added is written. A line to the user says how
    many are answered, how fast, how long it will take.
    """

    def __init__(self, path: Path, *, num_dialogues: int):
        self.num_lines = 0
        self.num_dialogues_done = 0
        self._path = path
        self._num_dialogues = num_dialogues
        self._num_tokens = 0
        self._waiting: list[Mapping[str, Any]] = []
        self._start_s = self._written_s = time.monotonic()

    def add(self, batch: Sequence[Dialogue], lines: Sequence[Mapping[str, Any]]) -> None:
        """Takes finished dialogues and the lines of those that can be recorded."""
        self._waiting += lines
        self.num_lines += len(lines)
        self.num_dialogues_done += len(batch)
        self._num_tokens += sum(each.num_new_tokens for each in batch)
        if time.monotonic() - self._written_s >= _WRITE_INTERVAL_S:
            self._write()

    def _write(self) -> None:
        append_lines(self._path, self._waiting)
        self._waiting = []
        self._written_s = time.monotonic()
        elapsed_s = self._written_s - self._start_s
        num_left = self._num_dialogues - self.num_dialogues_done
        left_s = elapsed_s / max(1, self.num_dialogues_done) * num_left
        print(
            f"answered {self.num_dialogues_done}/{self._num_dialogues}"
            f" | {self._num_tokens / max(elapsed_s, 1e-9):.0f} tok/s | {left_s / 60:.1f} min left",
            file=sys.stderr,
            flush=True,
        )

    def __enter__(self) -> "_Output":
        return self

    def __exit__(self, *_: object) -> None:
        self._write()
