"""Conversations: the formats they come in, their stable ids, and what is refused.

A row (a JSON line, or a row of a Parquet or Arrow file) has an optional `id` and one of
`messages` (role, content), ShareGPT `conversations` (from, value), `prompt` with `response`, or
pre-tokenised `token_ids` with `loss_mask`. Files are indexed once and rows are parsed on demand,
so that a million conversations cost memory for their ids only.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage1_extract.conversation_files import RowFile, files_of, open_file, parse_line
from stage1_extract.conversation_index import Index, Place, index_path, keep_index, load_index
from stage1_extract.problems import Problems, UnusableConversationError
from stage1_extract.tool_calls import calls_of

_Unusable = Callable[..., UnusableConversationError]
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
_FORMATS = "`messages`, `conversations`, `prompt` with `response`, or `token_ids` with `loss_mask`"


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One conversation: either messages for the chat template or tokens with their mask."""

    id: str
    source: str
    """File and line or row it came from, for messages to the user."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    tools: tuple[Mapping[str, Any], ...] | None = None
    """Tool descriptions handed to the chat template."""
    token_ids: tuple[int, ...] | None = None
    loss_mask: tuple[bool, ...] | None = None
    generation: Mapping[str, Any] | None = None
    """How a target wrote the answers, as `regenerate` records it."""


class Conversations:
    """The usable conversations of some files, in file order; parsed when asked for."""

    def __init__(self, files: Sequence[RowFile], places: Mapping[str, Place], problems: Problems):
        self._files = files
        self._places = places
        self.ids = list(places)
        self.problems = problems

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, conversation_id: str) -> bool:
        return conversation_id in self._places

    def __iter__(self) -> Iterator[Conversation]:
        return (self[each] for each in self.ids)

    def __getitem__(self, conversation_id: str) -> Conversation:
        """Reads one conversation again by its id."""
        place = self._places[conversation_id]
        file = self._files[place.file_index]
        record = file.parse(place.row, file.read(place.row))
        return conversation_of(record, source=file.source(place.row), needs_answer=False)


def read_conversations(
    paths: Sequence[str | Path],
    *,
    limit: int | None = None,
    strict: bool = False,
    bad_line_limit: int = 100,
    needs_answer: bool = True,
) -> Conversations:
    """Indexes the conversations of files, in file order; large unchanged files are read once.

    Args:
        paths: JSONL, Parquet and Arrow files, folders of them, saved datasets.
        limit: Usable conversations to take at most; None takes all.
        strict: Whether the first unusable row stops the run.
        bad_line_limit: Unusable rows that are counted and skipped before the run stops.
        needs_answer: Whether a conversation without an assistant turn is unusable.

    Raises:
        ValueError: A file is missing or unreadable, an id occurs twice (both places are named),
            there are too many unusable rows, or no conversation is usable.
    """
    file_paths = [file for path in paths for file in files_of(Path(path))]
    files = [open_file(path) for path in file_paths]
    kept_at = index_path(file_paths, [limit, strict, bad_line_limit, needs_answer])
    problems = Problems(strict=strict, limit=bad_line_limit)
    index = None if kept_at is None else load_index(kept_at)
    if index is None:
        places = _places(files, problems, limit=limit, needs_answer=needs_answer)
        index = Index(places, problems.counts, problems.messages)
        if kept_at is not None:
            keep_index(kept_at, index)
    problems.counts, problems.messages = index.counts, index.messages
    if not index.places:
        if not paths:
            raise ValueError("no file of conversations is named (data.conversations is empty)")
        where = ", ".join(map(str, paths))
        raise ValueError(f"no usable conversation in {where}{problems.first()}")
    return Conversations(files, index.places, problems)


def _places(
    files: Sequence[RowFile], problems: Problems, *, limit: int | None, needs_answer: bool
) -> dict[str, Place]:
    """Where each usable conversation lies, by id; every row is read and checked."""
    places: dict[str, Place] = {}
    for file_index, file in enumerate(files):
        for row, content in file.rows():
            if limit is not None and len(places) >= limit:
                return places
            try:
                record = file.parse(row, content)
                conversation = conversation_of(
                    record, source=file.source(row), needs_answer=needs_answer
                )
                earlier = places.get(conversation.id)
                if earlier is not None:
                    first = files[earlier.file_index].source(earlier.row)
                    raise _duplicate(record, conversation, first)
            except UnusableConversationError as problem:
                problems.add(problem)
                continue
            places[conversation.id] = Place(file_index, row)
    return places


def parse_conversation(text: bytes, *, source: str, needs_answer: bool = True) -> Conversation:
    """The conversation of one JSONL line; see `conversation_of`."""
    return conversation_of(
        parse_line(text, source=source), source=source, needs_answer=needs_answer
    )


def conversation_of(
    record: dict[str, Any], *, source: str, needs_answer: bool = True
) -> Conversation:
    """The conversation of one row.

    Raises:
        UnusableConversationError: It has no known format, is empty, or has no assistant turn
            although one is needed.
    """

    def unusable(reason: str, detail: str = "") -> UnusableConversationError:
        return UnusableConversationError(reason, source=source, detail=detail)

    content: dict[str, Any] = {}
    if "token_ids" in record:
        content = _parse_tokens(record, unusable)
    else:
        content["messages"] = _parse_messages(record, unusable)
        roles = [message["role"] for message in content["messages"]]
        if needs_answer and "assistant" not in roles:
            raise unusable("no assistant turn", "let the target answer it with `regenerate`")
        if record.get("tools"):
            content["tools"] = tuple(_as_list(record["tools"], "tools", unusable))
    generation = record.get("generation")
    return Conversation(
        id=_stable_id(record, content, unusable),
        source=source,
        generation=generation if isinstance(generation, dict) else None,
        **content,
    )


def _parse_messages(record: dict[str, Any], unusable: _Unusable) -> tuple[dict[str, Any], ...]:
    if "messages" in record:
        messages = _as_list(record["messages"], "messages", unusable)
    elif "conversations" in record:
        turns = _as_list(record["conversations"], "conversations", unusable)
        messages = [_from_sharegpt(turn, unusable) for turn in turns]
    elif "prompt" in record:
        messages = [{"role": "user", "content": record["prompt"]}]
        if record.get("response") is not None:
            messages.append({"role": "assistant", "content": record["response"]})
    else:
        raise unusable("unknown format", f"expected {_FORMATS}")
    if not messages:
        raise unusable("empty conversation")
    for index, message in enumerate(messages):
        _check_message(index, message, unusable)
    return tuple(messages)


def _as_list(value: Any, key: str, unusable: _Unusable) -> list[Any]:
    if not isinstance(value, list):
        raise unusable("unknown format", f"`{key}` is not a list")
    return value


def _from_sharegpt(turn: Any, unusable: _Unusable) -> dict[str, Any]:
    if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
        raise unusable("unknown format", "a ShareGPT turn needs `from` and `value`")
    role = _SHAREGPT_ROLES.get(turn["from"])
    if role is None:
        raise unusable("unknown role", f"{turn['from']!r} is no ShareGPT role")
    return {"role": role, "content": turn["value"]}


def _check_message(index: int, message: Any, unusable: _Unusable) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise unusable("unknown format", f"message {index} has no role")
    content = message.get("content")
    if calls_of(message) and content in (None, ""):
        return
    if not isinstance(content, str):
        raise unusable("content is not text", f"message {index} ({message['role']})")
    if message["role"] == "assistant" and not content.strip() and not calls_of(message):
        raise unusable("empty answer", f"message {index}")


def _parse_tokens(record: dict[str, Any], unusable: _Unusable) -> dict[str, Any]:
    token_ids, loss_mask = record["token_ids"], record.get("loss_mask")
    if not isinstance(token_ids, list) or not isinstance(loss_mask, list):
        raise unusable("unknown format", "`token_ids` and `loss_mask` must both be lists")
    if len(token_ids) != len(loss_mask):
        detail = f"{len(token_ids)} token_ids, {len(loss_mask)} values in loss_mask"
        raise unusable("lengths differ", detail)
    if not token_ids:
        raise unusable("empty conversation")
    # Sets and not a loop over tokens: every start of an extraction reads all of them.
    if set(map(type, token_ids)) != {int} or min(token_ids) < 0:
        raise unusable("bad token id", "token_ids must be whole numbers from 0")
    if not set(map(type, loss_mask)) <= {int, bool} or not set(loss_mask) <= {0, 1}:
        raise unusable("bad loss mask", "loss_mask must hold 0 or 1 (or false and true)")
    return {"token_ids": tuple(token_ids), "loss_mask": tuple(map(bool, loss_mask))}


def _stable_id(record: dict[str, Any], content: dict[str, Any], unusable: _Unusable) -> str:
    """The given id, or a hash of the content: the same wherever the line stands."""
    given = record.get("id")
    if given is None:
        canonical = json.dumps(content, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
        raise unusable("bad id", f"`id` must be text or a whole number, got {given!r}")
    if "\n" in str(given):
        raise unusable("bad id", f"`id` must hold no line break, got {given!r}")
    return str(given)


def _duplicate(record: dict[str, Any], conversation: Conversation, first: str) -> ValueError:
    """A repeated given id stops the run, a repeated conversation without id is skipped."""
    if record.get("id") is not None:
        return ValueError(
            f"{conversation.source}: id {conversation.id!r} was already used at {first};"
            " give every conversation its own id, or none"
        )
    return UnusableConversationError(
        "repeated conversation", source=conversation.source, detail=f"the same as {first}"
    )
