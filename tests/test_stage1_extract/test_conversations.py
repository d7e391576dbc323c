"""Conversations: formats, stable ids, and every kind of bad line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stage1_extract.conversations import parse_conversation, read_conversations
from stage1_extract.problems import UnusableConversationError

WriteJsonl = Callable[..., Path]
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def parse(record: Any, **arguments: Any) -> Any:
    text = record if isinstance(record, bytes) else json.dumps(record).encode()
    return parse_conversation(text, source="data.jsonl:1", **arguments)


@pytest.mark.parametrize(
    "record",
    [
        {"messages": MESSAGES},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"prompt": "a", "response": "b"},
    ],
)
def test_formats_mean_the_same(record: dict[str, Any]) -> None:
    conversation = parse(record)
    assert list(conversation.messages) == MESSAGES
    assert conversation.id == parse({"messages": MESSAGES}).id


def test_tokens_are_read_with_their_mask() -> None:
    conversation = parse({"id": 4, "token_ids": [5, 6], "loss_mask": [0, True]})
    assert conversation.id == "4"
    assert conversation.token_ids == (5, 6)
    assert conversation.loss_mask == (False, True)


def test_ids_are_given_or_follow_the_content() -> None:
    assert parse({"id": "x", "messages": MESSAGES}).id == "x"
    assert parse({"messages": MESSAGES}).id == parse({"more": 1, "messages": MESSAGES}).id
    other = [MESSAGES[0], {"role": "assistant", "content": "c"}]
    assert parse({"messages": MESSAGES}).id != parse({"messages": other}).id


@pytest.mark.parametrize("content", [None, ""])
def test_further_keys_of_a_message_reach_the_template(content: str | None) -> None:
    calls = [{"function": {"name": "f"}}]
    call = {"role": "assistant", "content": content, "tool_calls": calls}
    conversation = parse({"messages": [MESSAGES[0], call], "tools": [{"name": "f"}]})
    assert conversation.messages[1] == call
    assert conversation.tools == ({"name": "f"},)


BAD_LINES = [
    (b"{not json", "bad JSON"),
    (b'{"messages": ' + b"[" * 100_000, "bad JSON"),
    (b'{"id": ' + b"9" * 5_000 + b"}", "bad JSON"),
    (b'{"id": "\\ud800", "prompt": "a", "response": "b"}', "bad JSON"),
    (b'{"prompt": "a", "response": "b \\uD83D"}', "bad JSON"),
    ({"id": "a\nb", "prompt": "a", "response": "b"}, "bad id"),
    (b'{"prompt": "\xff"}', "bad JSON"),
    ([1, 2], "unknown format"),
    ({"text": "a"}, "unknown format"),
    ({"messages": "a"}, "unknown format"),
    ({"messages": [{"content": "a"}]}, "unknown format"),
    ({"conversations": [{"from": "human"}]}, "unknown format"),
    ({"conversations": [{"from": "narrator", "value": "a"}]}, "unknown role"),
    ({"messages": []}, "empty conversation"),
    ({"token_ids": [], "loss_mask": []}, "empty conversation"),
    ({"messages": MESSAGES[:1]}, "no assistant turn"),
    ({"prompt": "a"}, "no assistant turn"),
    ({"prompt": "a", "response": "  "}, "empty answer"),
    ({"messages": [MESSAGES[0], {"role": "assistant", "content": ""}]}, "empty answer"),
    ({"messages": [{"role": "assistant", "tool_calls": []}]}, "content is not text"),
    ({"messages": [{"role": "user", "content": [{"image": "x"}]}]}, "content is not text"),
    ({"token_ids": [1, 2], "loss_mask": [1]}, "lengths differ"),
    ({"token_ids": [1, 2]}, "unknown format"),
    ({"token_ids": [1, -2], "loss_mask": [1, 1]}, "bad token id"),
    ({"token_ids": [1, 2.0], "loss_mask": [1, 1]}, "bad token id"),
    ({"token_ids": [1, 2], "loss_mask": [1, 2]}, "bad loss mask"),
    ({"id": {}, "messages": MESSAGES}, "bad id"),
    ({"id": "", "messages": MESSAGES}, "bad id"),
]


@pytest.mark.parametrize(("record", "reason"), BAD_LINES)
def test_a_bad_line_is_named(record: Any, reason: str) -> None:
    with pytest.raises(UnusableConversationError) as raised:
        parse(record)
    assert raised.value.reason == reason
    assert str(raised.value).startswith(f"data.jsonl:1: {reason}")
    assert "\n" not in str(raised.value)


def test_prompts_need_no_answer() -> None:
    assert parse({"prompt": "a"}, needs_answer=False).messages == (MESSAGES[0],)


def test_conversations_come_in_file_order(write_jsonl: WriteJsonl) -> None:
    first = write_jsonl({"id": 2, "messages": MESSAGES}, "", {"id": 1, "messages": MESSAGES})
    second = write_jsonl({"id": 0, "messages": MESSAGES}, name="second.jsonl")
    conversations = read_conversations([first, second])
    assert conversations.ids == ["2", "1", "0"]
    assert [each.source for each in conversations] == [
        f"{first}:1",
        f"{first}:3",
        f"{second}:1",
    ]
    assert conversations["1"].id == "1"
    assert "1" in conversations
    assert "3" not in conversations


def test_the_limit_counts_usable_conversations(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl("no", *({"id": index, "messages": MESSAGES} for index in range(5)))
    assert read_conversations([path], limit=2).ids == ["0", "1"]


def test_bad_lines_are_counted_and_skipped(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl("no", {"messages": MESSAGES}, {"messages": MESSAGES[:1]}, "no")
    conversations = read_conversations([path], bad_line_limit=3)
    assert len(conversations) == 1
    assert conversations.problems.counts == {"bad JSON": 2, "no assistant turn": 1}
    assert conversations.problems.summary() == "2 x bad JSON, 1 x no assistant turn"


def test_too_many_bad_lines_stop_the_run(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl({"messages": MESSAGES}, "no", "no")
    with pytest.raises(ValueError, match=r"more than 1 unusable lines .*conversations.jsonl:2"):
        read_conversations([path], bad_line_limit=1)


def test_strict_stops_at_the_first_bad_line(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl({"messages": MESSAGES}, "no")
    with pytest.raises(ValueError, match=r"conversations.jsonl:2: bad JSON.*data.strict"):
        read_conversations([path], strict=True)


def test_a_repeated_id_names_both_lines(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl({"id": "x", "messages": MESSAGES}, "", {"id": "x", "messages": MESSAGES})
    with pytest.raises(ValueError, match=r"jsonl:3: id 'x' was already used at .*jsonl:1"):
        read_conversations([path])


def test_a_conversation_repeated_without_id_is_skipped(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl({"messages": MESSAGES}, {"messages": MESSAGES})
    conversations = read_conversations([path])
    assert len(conversations) == 1
    assert conversations.problems.counts == {"repeated conversation": 1}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*absent.jsonl \(No such file"):
        read_conversations([tmp_path / "absent.jsonl"])


def test_no_usable_conversation_is_an_error(write_jsonl: WriteJsonl) -> None:
    with pytest.raises(ValueError, match=r"no usable conversation in .*; the first is .*:1"):
        read_conversations([write_jsonl("no")])


def test_whole_pairs_of_escapes_are_text() -> None:
    record = b'{"prompt": "a", "response": "\\uD83D\\uDE00"}'
    assert parse(record).messages[1]["content"] == "\U0001f600"


def test_a_compressed_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(b"\x1f\x8b")
    with pytest.raises(ValueError, match=r"data\.jsonl\.gz is compressed; unpack it first"):
        read_conversations([path])
