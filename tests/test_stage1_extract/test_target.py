"""The target by name: folders, hub ids, embedded ones, and everything that is not there."""

from pathlib import Path
from typing import Any

import pytest

from stage1_extract import target
from stage1_extract.config import TargetConfig
from stage1_extract.target import load_target, resolve_target, target_name


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_target(TargetConfig(model=str(tmp_path))) == str(tmp_path)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        resolve_target(TargetConfig(model=str(tmp_path)))


@pytest.mark.parametrize("name", ["absent", "absent/deep"])
def test_a_missing_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        resolve_target(TargetConfig(model=str(tmp_path / name)))


@pytest.fixture(autouse=True)
def no_memory_of_the_hub() -> None:
    """Each test asks the hub anew."""
    target._hub_snapshot.cache_clear()


def test_what_the_hub_does_not_give_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_hub(*_: Any, **__: Any) -> str:
        raise OSError("We could not\nreach the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", no_hub)
    with pytest.raises(ValueError, match="no folder here and the hub does not give it") as raised:
        resolve_target(TargetConfig(model="someone/some-model"))
    assert "\n" not in str(raised.value)


def test_a_hub_id_is_fetched_at_its_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def hub(model: str, *, revision: str | None, **_: Any) -> str:
        asked.update(model=model, revision=revision)
        return "/fetched"

    monkeypatch.setattr("huggingface_hub.snapshot_download", hub)
    config = TargetConfig(model="someone/some-model", revision="v2")
    assert resolve_target(config) == "/fetched"
    assert asked == {"model": "someone/some-model", "revision": "v2"}


def test_a_stores_name_of_the_target_has_no_path(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert target_name(TargetConfig(model=str(folder))) == "my-model"
    assert target_name(TargetConfig(model="someone/some-model")) == "someone/some-model"
    assert target_name(TargetConfig(model="embedded:x")) == "embedded:x"


def test_an_unknown_backend_lists_the_known() -> None:
    with pytest.raises(ValueError, match="known: transformers"):
        load_target(TargetConfig(model="x"), backend="abacus")
