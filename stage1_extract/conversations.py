"""Conversations: the JSONL formats they come in, their stable ids, and what is refused.

A line is one JSON object with an optional `id` and one of
`messages` (role, content), ShareGPT `conversations` (from, value), `prompt` with `response`, or
pre-tokenised `token_ids` with `loss_mask`. Files are indexed once and lines are parsed on demand,
so that a million conversations cost memory for their ids only.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage1_extract.problems import Problems, UnusableConversationError

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
    """File and line it came from, for messages to the user."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    tools: tuple[Mapping[str, Any], ...] | None = None
    """Tool descriptions handed to the chat template."""
    token_ids: tuple[int, ...] | None = None
    loss_mask: tuple[bool, ...] | None = None
    generation: Mapping[str, Any] | None = None
    """How a target wrote the answers, as `regenerate` records it."""


@dataclass(frozen=True)
class _Line:
    path_index: int
    start_byte: int
    num_bytes: int
    line_number: int


class Conversations:
    """The usable conversations of some files, in file order; parsed when asked for."""

    def __init__(self, paths: Sequence[Path], lines: Mapping[str, _Line], problems: Problems):
        self._paths = paths
        self._lines = lines
        self.ids = list(lines)
        self.problems = problems

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, conversation_id: str) -> bool:
        return conversation_id in self._lines

    def __iter__(self) -> Iterator[Conversation]:
        return (self[each] for each in self.ids)

    def __getitem__(self, conversation_id: str) -> Conversation:
        """Reads one conversation again by its id."""
        line = self._lines[conversation_id]
        path = self._paths[line.path_index]
        with path.open("rb") as file:
            file.seek(line.start_byte)
            text = file.read(line.num_bytes)
        return parse_conversation(text, source=f"{path}:{line.line_number}", needs_answer=False)


def read_conversations(
    paths: Sequence[str | Path],
    *,
    limit: int | None = None,
    strict: bool = False,
    bad_line_limit: int = 100,
    needs_answer: bool = True,
) -> Conversations:
    """Indexes the conversations of JSONL files, in file order.

    Args:
        paths: JSONL files.
        limit: Usable conversations to take at most; None takes all.
        strict: Whether the first unusable line stops the run.
        bad_line_limit: Unusable lines that are counted and skipped before the run stops.
        needs_answer: Whether a conversation without an assistant turn is unusable.

    Raises:
        ValueError: A file is missing or unreadable, an id occurs twice (both lines are named),
            there are too many unusable lines, or no conversation is usable.
    """
    files = [Path(path) for path in paths]
    problems = Problems(strict=strict, limit=bad_line_limit)
    lines: dict[str, _Line] = {}
    for path_index, path in enumerate(files):
        for line_number, start_byte, text in _numbered_lines(path):
            if limit is not None and len(lines) >= limit:
                break
            source = f"{path}:{line_number}"
            try:
                conversation = parse_conversation(text, source=source, needs_answer=needs_answer)
                earlier = lines.get(conversation.id)
                if earlier is not None:
                    _refuse_duplicate(text, conversation, files, earlier)
            except UnusableConversationError as problem:
                problems.add(problem)
                continue
            lines[conversation.id] = _Line(path_index, start_byte, len(text), line_number)
    if not lines:
        where = ", ".join(map(str, files)) or "an empty list of files"
        raise ValueError(f"no usable conversation in {where}{problems.first()}")
    return Conversations(files, lines, problems)


def parse_conversation(text: bytes, *, source: str, needs_answer: bool = True) -> Conversation:
    """The conversation of one JSONL line.

    Raises:
        UnusableConversationError: The line is not JSON, has no known format, is empty, or has no
            assistant turn although one is needed.
    """

    def unusable(reason: str, detail: str = "") -> UnusableConversationError:
        return UnusableConversationError(reason, source=source, detail=detail)

    try:
        record = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise unusable("bad JSON", str(error)) from error
    if not isinstance(record, dict):
        raise unusable("unknown format", f"expected a JSON object with {_FORMATS}")
    content: dict[str, Any] = {}
    if "token_ids" in record:
        content = _parse_tokens(record, unusable)
    else:
        content["messages"] = _parse_messages(record, unusable)
        roles = [message["role"] for message in content["messages"]]
        if needs_answer and "assistant" not in roles:
            raise unusable("no assistant turn", "let the target answer it with `regenerate`")
        if record.get("tools"):
            content["tools"] = tuple(record["tools"])
    generation = record.get("generation")
    return Conversation(
        id=_stable_id(record, content, unusable),
        source=source,
        generation=generation if isinstance(generation, dict) else None,
        **content,
    )


def _numbered_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Line number from 1, first byte, and bytes of every line that is not blank."""
    try:
        with path.open("rb") as file:
            start_byte = 0
            for line_number, text in enumerate(file, start=1):
                if text.strip():
                    yield line_number, start_byte, text
                start_byte += len(text)
    except OSError as error:
        raise ValueError(
            f"cannot read {path} ({error.strerror}); check the path in the run file"
        ) from error


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
    calls_a_tool = content is None and message.get("tool_calls")
    if not isinstance(content, str) and not calls_a_tool:
        raise unusable("content is not text", f"message {index} ({message['role']})")
    if message["role"] == "assistant" and content is not None and not content.strip():
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
    if not all(type(token_id) is int and token_id >= 0 for token_id in token_ids):
        raise unusable("bad token id", "token_ids must be whole numbers from 0")
    if not all(value in (0, 1) for value in loss_mask):
        raise unusable("bad loss mask", "loss_mask must hold 0 or 1 (or false and true)")
    return {"token_ids": tuple(token_ids), "loss_mask": tuple(bool(each) for each in loss_mask)}


def _stable_id(record: dict[str, Any], content: dict[str, Any], unusable: _Unusable) -> str:
    """The given id, or a hash of the content: the same wherever the line stands."""
    given = record.get("id")
    if given is None:
        canonical = json.dumps(content, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
        raise unusable("bad id", f"`id` must be text or a whole number, got {given!r}")
    return str(given)


def _refuse_duplicate(
    text: bytes, conversation: Conversation, paths: Sequence[Path], earlier: _Line
) -> None:
    """Raises: a repeated given id stops the run, a repeated conversation without id is skipped."""
    first = f"{paths[earlier.path_index]}:{earlier.line_number}"
    if json.loads(text).get("id") is not None:
        raise ValueError(
            f"{conversation.source}: id {conversation.id!r} was already used at {first};"
            " give every conversation its own id, or none"
        )
    raise UnusableConversationError(
        "repeated conversation", source=conversation.source, detail=f"the same as {first}"
    )
