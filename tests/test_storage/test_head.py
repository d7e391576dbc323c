from pathlib import Path

import pytest

from storage import head
from storage.errors import DamagedShardError, StoreError
from storage.files import LocalFiles
from storage.head import (
    NEEDED,
    check_head_file,
    head_files,
    lacking_head_files,
    put_head_file,
    read_head_file,
)


@pytest.mark.parametrize("size", [0, 1, 1000, 1024, 2500])
def test_files_are_read_as_they_were_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(head, "READ_BYTES", 1024)
    files, data = LocalFiles(tmp_path), bytes(i % 251 for i in range(size))
    put_head_file(files, "folder/weights.bin", data)
    put_head_file(files, "folder/weights.bin", data)
    assert read_head_file(files, "folder/weights.bin") == data
    assert head_files(files) == ["folder/weights.bin"]
    with pytest.raises(StoreError, match="differs"):
        put_head_file(files, "folder/weights.bin", data + b"x")


@pytest.mark.parametrize("damage", ["flip", "cut", "lose"])
def test_damage_is_found(tmp_path: Path, damage: str) -> None:
    files = LocalFiles(tmp_path)
    put_head_file(files, "weights", b"0123456789")
    path = tmp_path / "head" / "weights"
    if damage == "lose":
        path.unlink()
    else:
        path.write_bytes(b"0123456788" if damage == "flip" else b"012345678")
    for read in (read_head_file, check_head_file):
        with pytest.raises(DamagedShardError, match="run `extract`"):
            read(files, "weights")


def test_a_put_that_was_cut_short_is_completed(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    put_head_file(files, "weights", b"0123")
    (tmp_path / "head_records" / "weights.json").unlink()
    assert head_files(files) == []
    put_head_file(files, "weights", b"0123")
    assert read_head_file(files, "weights") == b"0123"


@pytest.mark.parametrize("damage", ["flip", "cut", "lose"])
def test_a_damaged_file_is_put_again(tmp_path: Path, damage: str) -> None:
    files = LocalFiles(tmp_path)
    for name in (*NEEDED, "tokenizer/tokenizer.json"):
        put_head_file(files, name, b"0123456789")
    assert lacking_head_files(files) == []
    path = tmp_path / "head" / "tokenizer" / "tokenizer.json"
    if damage == "lose":
        path.unlink()
    else:
        path.write_bytes(b"0123456788" if damage == "flip" else b"012345678")
    lacking = [] if damage == "flip" else ["tokenizer/tokenizer.json"]
    assert lacking_head_files(files) == lacking
    put_head_file(files, "tokenizer/tokenizer.json", b"0123456789")
    assert read_head_file(files, "tokenizer/tokenizer.json") == b"0123456789"
    assert lacking_head_files(files) == []


def test_what_every_drafter_needs_is_lacking_until_it_is_put(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    assert lacking_head_files(files) == sorted(NEEDED)
