"""Tool calls of assistant messages, in the spellings that chat templates want.

Servers give a call's arguments as JSON text; most templates take the object and write it down
themselves, some put text down as it is. Where a call stands without a word, most templates take an
empty text, some only no content at all. So the spellings are tried in turn, and one counts only
when the names of the called functions are in what the template wrote.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

Message = Mapping[str, Any]


def calls_of(message: Message) -> list[Mapping[str, Any]]:
    """The functions that a message calls, each with `name` and `arguments`."""
    calls = message.get("tool_calls")
    entries = calls if isinstance(calls, list) else []
    functions = (each.get("function", each) for each in entries if isinstance(each, Mapping))
    return [each for each in functions if isinstance(each, Mapping)]


def names_called(messages: Sequence[Message]) -> list[str]:
    """Names of all functions that assistant messages call."""
    return [
        str(call["name"])
        for message in messages
        if message.get("role") == "assistant"
        for call in calls_of(message)
        if call.get("name")
    ]


def spellings(messages: Sequence[Message]) -> Iterator[list[dict[str, Any]]]:
    """The same messages as templates may want them, the usual spelling first."""
    if not any(calls_of(message) for message in messages):
        yield [dict(message) for message in messages]
        return
    for as_text in (False, True):
        for silence in ("", None):
            yield [_spelled(message, as_text=as_text, silence=silence) for message in messages]


def without_calls(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The same messages, their words alone."""
    return [
        {name: each for name, each in message.items() if name != "tool_calls"}
        | {"content": message.get("content") or ""}
        for message in messages
    ]


def _spelled(message: Message, *, as_text: bool, silence: str | None) -> dict[str, Any]:
    spelled = dict(message)
    if not calls_of(message):
        return spelled
    if not spelled.get("content"):
        spelled["content"] = silence
    spelled["tool_calls"] = [_spelled_call(call, as_text=as_text) for call in spelled["tool_calls"]]
    return spelled


def _spelled_call(call: Any, *, as_text: bool) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _spelled_call(call["function"], as_text=as_text)}
    if "arguments" not in call:
        return call
    return {**call, "arguments": _spelled_arguments(call["arguments"], as_text=as_text)}


def _spelled_arguments(arguments: Any, *, as_text: bool) -> Any:
    if as_text:
        is_text = isinstance(arguments, str)
        return arguments if is_text else json.dumps(arguments, ensure_ascii=False)
    if isinstance(arguments, str):
        with suppress(ValueError):
            return json.loads(arguments)
    return arguments
