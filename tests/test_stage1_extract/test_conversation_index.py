"""The conversation index: kept, it says what reading the files says; changed files are read."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stage1_extract import conversation_index, conversations
from stage1_extract.conversations import Conversations, read_conversations

WriteJsonl = Callable[..., Path]
LINES: list[Any] = [
    {"id": "b", "prompt": "x", "response": "y"},
    "{broken",
    {"prompt": "ä\n", "response": "z"},
    {"id": "a\tb", "token_ids": [1, 2], "loss_mask": [1, 1]},
]


@pytest.fixture(autouse=True)
def kept_at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation_index, "MIN_KEPT", 1)


@pytest.fixture
def read_through(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows each time that files are read through."""
    calls: list[None] = []
    places = conversations._places

    def noted(*arguments: Any, **settings: Any) -> Any:
        calls.append(None)
        return places(*arguments, **settings)

    monkeypatch.setattr(conversations, "_places", noted)
    return calls


def content(found: Conversations) -> tuple[Any, ...]:
    return list(found), found.ids, found.problems.counts, found.problems.messages


def test_the_second_reading_is_the_first_one(
    write_jsonl: WriteJsonl, read_through: list[None]
) -> None:
    paths = [write_jsonl(*LINES), write_jsonl({"id": 7, **LINES[2]}, name="second.jsonl")]
    first, second = (content(read_conversations(paths)) for _ in range(2))
    assert first == second
    assert len(first[1]) == 4
    assert len(read_through) == 1


def test_changed_files_and_other_settings_are_read_through(
    write_jsonl: WriteJsonl, read_through: list[None], tmp_path: Path
) -> None:
    path = write_jsonl(*LINES)
    read_conversations([path])
    assert len(read_conversations([path], limit=1)) == 1
    write_jsonl({"id": "c", "prompt": "x", "response": "y"})
    assert read_conversations([path]).ids == ["c"]
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    read_conversations([path])
    assert len(read_through) == 4


def test_strict_finds_the_bad_line_every_time(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl(*LINES)
    read_conversations([path])
    for _ in range(2):
        with pytest.raises(ValueError, match="bad JSON"):
            read_conversations([path], strict=True)


@pytest.mark.parametrize("text", ["", "{}", '{"ids": ["a"], "starts": []}'])
def test_an_index_that_cannot_be_read_is_made_anew(
    write_jsonl: WriteJsonl, read_through: list[None], tmp_path: Path, text: str
) -> None:
    path = write_jsonl(*LINES)
    first = content(read_conversations([path]))
    (kept,) = (tmp_path / "cache" / "conversations").glob("*.index.json")
    kept.write_text(text)
    assert content(read_conversations([path])) == first
    assert len(read_through) == 2


def test_a_cache_that_cannot_be_written_costs_time_only(
    write_jsonl: WriteJsonl, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("not a folder")
    assert len(read_conversations([write_jsonl(*LINES)])) == 3


def test_few_conversations_are_not_worth_it(
    write_jsonl: WriteJsonl, read_through: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation_index, "MIN_KEPT", 4)
    for _ in range(2):
        read_conversations([write_jsonl(*LINES)])
    assert len(read_through) == 2


def test_of_a_growing_file_the_newest_indexes_stay(
    write_jsonl: WriteJsonl, read_through: list[None], tmp_path: Path
) -> None:
    for count in range(1, conversation_index.MAX_KEPT + 4):
        path = write_jsonl(*({"id": i, "prompt": "x", "response": "y"} for i in range(count)))
        read_conversations([path])
    kept = list((tmp_path / "cache" / "conversations").glob("*.index.json"))
    assert len(kept) == conversation_index.MAX_KEPT
    read_conversations([path])
    assert len(read_through) == count
