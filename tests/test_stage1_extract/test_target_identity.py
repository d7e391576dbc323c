"""Identity of a target: its content, not its place or its age; read once per file."""

import os
from pathlib import Path

import pytest

from stage1_extract import target_identity
from stage1_extract.target_identity import tokenizer_sha256, weights_id, weights_sha256


def model_folder(folder: Path, *, weights: bytes = b"weights") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_the_place_does_not_matter(tmp_path: Path) -> None:
    one, two = model_folder(tmp_path / "one"), model_folder(tmp_path / "two")
    assert weights_sha256(one) == weights_sha256(two)
    assert tokenizer_sha256(one) == tokenizer_sha256(two)
    assert weights_id(one) == weights_sha256(one)[:16]


def test_every_weight_file_counts(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    before = weights_sha256(folder)
    (folder / "model-2.safetensors").write_bytes(b"more")
    assert weights_sha256(folder) != before


def test_other_files_do_not_count(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    weights, tokenizer = weights_sha256(folder), tokenizer_sha256(folder)
    (folder / "README.md").write_text("changed")
    (folder / "pytorch_model.bin").write_bytes(b"the same weights once more")
    assert (weights_sha256(folder), tokenizer_sha256(folder)) == (weights, tokenizer)
    (folder / "tokenizer_config.json").write_text("{}")
    assert tokenizer_sha256(folder) != tokenizer


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "model")
    first = weights_sha256(folder)

    def must_not_read(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(target_identity.hashlib, "file_digest", must_not_read)
    assert weights_sha256(folder) == first


@pytest.mark.parametrize("change", ["size", "time"])
def test_a_changed_file_is_read_again(tmp_path: Path, change: str) -> None:
    folder = model_folder(tmp_path / "model")
    first = weights_sha256(folder)
    model_folder(folder, weights=b"longer weights" if change == "size" else b"WEIGHTS")
    if change == "time":
        os.utime(folder / "model.safetensors", ns=(10**18, 10**18))
    assert weights_sha256(folder) != first


def test_a_cache_that_cannot_be_written_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    folder = model_folder(tmp_path / "model")
    expected = weights_sha256(folder)
    monkeypatch.setenv("DFLASH_OFFLINE_CACHE", str(blocked))
    assert weights_sha256(folder) == expected


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no weight files"):
        weights_sha256(tmp_path)
