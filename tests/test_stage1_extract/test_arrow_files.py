"""Parquet and Arrow files give the conversations that the same JSON lines give."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from stage1_extract import arrow_files
from stage1_extract.config import ExtractRun
from stage1_extract.conversations import Conversations, read_conversations
from stage1_extract.extract import prepare_store, run_worker
from storage.reader import open_store

TALKS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": f"say {index}"},
            {"role": "assistant", "content": f"said {index} \u00e9\U0001f600"},
        ]
    }
    for index in range(7)
]
CALL = {
    "messages": [
        {"role": "user", "content": "time?"},
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "clock", "arguments": {"zone": "UTC"}}}],
        },
        {"role": "tool", "content": "12:00"},
        {"role": "assistant", "content": "noon"},
    ],
    "tools": [{"type": "function", "function": {"name": "clock"}}],
}
FORMATS: dict[str, list[dict[str, Any]]] = {
    "messages": TALKS,
    "with ids": [{"id": index, **talk} for index, talk in enumerate(TALKS)],
    "tool calls": [CALL, *TALKS],
    "sharegpt": [
        {"conversations": [{"from": "human", "value": f"{i}"}, {"from": "gpt", "value": "b"}]}
        for i in range(3)
    ],
    "prompts": [{"prompt": f"p{i}", "response": "r"} for i in range(3)],
    "tokens": [{"token_ids": [5, 6, i], "loss_mask": [0, 1, 1]} for i in range(3)],
}


def save(table: pyarrow.Table, path: Path, *, batch_rows: int = 3) -> Path:
    """Saves a table in the format that a suffix or name asks for."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=batch_rows)
    elif path.name.startswith("file"):
        with pyarrow.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=batch_rows)
    else:
        with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=batch_rows)
    return path


def contents(conversations: Conversations) -> list[dict[str, Any]]:
    """All there is to a conversation but where it came from."""
    return [{**vars(each), "source": None} for each in conversations]


@pytest.mark.parametrize("records", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("name", ["data.parquet", "stream.arrow", "file.arrow"])
def test_columns_and_lines_give_the_same_conversations(
    tmp_path: Path,
    write_jsonl: Callable[..., Path],
    records: list[dict[str, Any]],
    name: str,
) -> None:
    lines = read_conversations([write_jsonl(*records)])
    table = pyarrow.Table.from_pylist(records).append_column(
        "score", pyarrow.array([1.0] * len(records))
    )
    columns = read_conversations([save(table, tmp_path / name)])
    assert columns.ids == lines.ids
    assert contents(columns) == contents(lines)
    # Any row again, in any order.
    for conversation_id in reversed(columns.ids):
        assert columns[conversation_id].id == conversation_id
    assert columns[columns.ids[2]].source == f"{tmp_path / name} row 2"


def save_dataset(folder: Path, records: list[dict[str, Any]], *, num_files: int = 2) -> Path:
    """What datasets' `save_to_disk` leaves of a data set."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{num_files:05d}.arrow" for i in range(num_files)]
    for index, name in enumerate(names):
        save(pyarrow.Table.from_pylist(records[index::num_files]), folder / name)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_saved_dataset_is_read_as_its_state_lists_it(tmp_path: Path) -> None:
    folder = save_dataset(tmp_path / "set", TALKS)
    save(pyarrow.Table.from_pylist(TALKS), folder / "cache-1234.arrow")
    found = read_conversations([folder])
    assert len(found) == len(TALKS)
    assert found[found.ids[0]].source == f"{folder}/data-00000-of-00002.arrow row 0"


def test_a_dataset_of_one_split_is_that_split(tmp_path: Path) -> None:
    folder = tmp_path / "sets"
    save_dataset(folder / "only", TALKS)
    (folder / "dataset_dict.json").write_text('{"splits": ["only"]}')
    assert len(read_conversations([folder])) == len(TALKS)
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=r"splits train, test; name one, for example \S+/train"):
        read_conversations([folder])


def test_a_dataset_with_an_index_is_refused(tmp_path: Path) -> None:
    folder = save_dataset(tmp_path / "set", TALKS)
    state = json.loads((folder / "state.json").read_text())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match="flatten_indices"):
        read_conversations([folder])


def test_a_folder_of_mixed_files_is_read_by_name(
    tmp_path: Path, write_jsonl: Callable[..., Path]
) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    save(pyarrow.Table.from_pylist(TALKS[:2]), folder / "b.parquet")
    save(pyarrow.Table.from_pylist(TALKS[2:4]), folder / "a.arrow")
    write_jsonl(*TALKS[4:]).rename(folder / "c.jsonl")
    (folder / "README.md").write_text("about")
    in_order = [*TALKS[2:4], *TALKS[:2], *TALKS[4:]]
    assert read_conversations([folder]).ids == read_conversations([write_jsonl(*in_order)]).ids


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"is a folder without conversations: expected \.jsonl"):
        read_conversations([tmp_path / "empty"])


@pytest.mark.parametrize("name", ["data.parquet", "stream.arrow"])
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ["a"], "score": [1]}, r"has the columns text, score; expected one of messages"),
        ({"messages": ["[]"]}, "column messages is string; expected a list"),
        ({"prompt": [1], "response": ["a"]}, "column prompt is int64; expected text"),
    ],
)
def test_bad_columns_are_named(
    tmp_path: Path, name: str, columns: dict[str, Any], message: str
) -> None:
    path = save(pyarrow.table(columns), tmp_path / name)
    with pytest.raises(ValueError, match=message) as caught:
        read_conversations([path])
    assert str(path) in str(caught.value)


def test_a_bad_row_is_counted_and_named(tmp_path: Path) -> None:
    table = pyarrow.table({"prompt": ["a", None, "c"], "response": ["b", "b", ""]})
    found = read_conversations([save(table, tmp_path / "data.parquet")])
    assert len(found) == 1
    assert found.problems.counts == {"unknown format": 1, "empty answer": 1}
    assert "data.parquet row 1: unknown format" in found.problems.first()


@pytest.mark.parametrize("name", ["data.parquet", "data.arrow"])
def test_a_file_that_is_something_else_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("no columns here")
    with pytest.raises(ValueError, match=f"cannot read .*{name}"):
        read_conversations([tmp_path / name])
    with pytest.raises(ValueError, match=r"cannot read .*absent"):
        read_conversations([tmp_path / f"absent-{name}"])


def test_a_parquet_file_is_copied_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(pyarrow.Table.from_pylist(TALKS), tmp_path / "data.parquet")
    assert len(read_conversations([path])) == 7
    copies = list((tmp_path / "cache" / "conversations").iterdir())
    assert len(copies) == 1

    def must_not_copy(*_: Any) -> None:
        raise AssertionError("copied again")

    with monkeypatch.context() as patch:
        patch.setattr(arrow_files, "_copy_columns", must_not_copy)
        assert len(read_conversations([path])) == 7
    save(pyarrow.Table.from_pylist(TALKS[:3]), path)
    os.utime(path, ns=(1, 1))
    assert len(read_conversations([path])) == 3


def test_a_store_from_columns_is_the_store_from_lines(
    make_run: Callable[..., ExtractRun], talks: Callable[..., Any], tmp_path: Path
) -> None:
    def digest(run: ExtractRun) -> str:
        prepare_store(run)
        assert run_worker(run, worker_index=0, num_workers=1) == 0
        return open_store(run.store_dir).content_digest()

    table = pyarrow.Table.from_pylist(talks(24))
    path = save(table, tmp_path / "talks.parquet")
    columns = make_run(place="columns", data={"conversations": (str(path),)})
    assert digest(columns) == digest(make_run(place="lines"))
