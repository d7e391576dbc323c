"""What filled a store stands in it, once, goes where the store goes, and is checked."""

from pathlib import Path

import pytest

from storage.copy import copy_store
from storage.derive import derive_store
from storage.errors import DamagedShardError
from storage.joined import join_stores
from storage.reader import open_store
from storage.verify import verify_store
from storage.writer import open_for_writing

FIRST, SECOND = {"versions": {"torch": "2.13"}, "settings": {"a": 1}}, {"versions": {}}


@pytest.fixture
def noted_dir(filled_dir: Path) -> Path:
    store = open_for_writing(filled_dir)
    for origin in (FIRST, SECOND, FIRST):
        store.note_origin(origin)
    return filled_dir


def test_equal_origins_are_kept_once(noted_dir: Path) -> None:
    found = open_store(noted_dir).origins()
    assert sorted(found, key=len) == [SECOND, FIRST]


def test_origins_go_where_the_store_goes(noted_dir: Path, tmp_path: Path) -> None:
    expected = open_store(noted_dir).origins()
    copy_store(noted_dir, tmp_path / "copy")
    derive_store(noted_dir, tmp_path / "derived", encoding="bf16")
    join_stores(tmp_path / "joined", [noted_dir])
    for name in ("copy", "derived", "joined"):
        assert open_store(tmp_path / name).origins() == expected, name


def test_a_damaged_origin_is_found(noted_dir: Path) -> None:
    path = next((noted_dir / "origins").iterdir())
    path.write_bytes(path.read_bytes().replace(b"versions", b"versionz"))
    assert not verify_store(noted_dir, full=False).ok
    with pytest.raises(DamagedShardError, match="is damaged"):
        open_store(noted_dir).origins()
