import errno
import os
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from storage.files import LocalFiles
from storage.object_files import ObjectFiles
from storage.probe import check_mark, leave_mark, probe_place


def test_a_good_folder_has_no_problem_and_stays_clean(tmp_path: Path) -> None:
    assert probe_place(tmp_path) == []
    assert os.listdir(tmp_path) == []


def test_an_object_store_without_conditions_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = MemoryStore()
    monkeypatch.setattr(ObjectFiles, "at", lambda url: ObjectFiles(bucket, name=url))
    assert probe_place("memory://good") == []

    def overwrite(self: ObjectFiles, path: str, data: bytes) -> bool:
        import obstore

        obstore.put(bucket, path, bytes(data), mode="overwrite")
        return True

    monkeypatch.setattr(ObjectFiles, "create", overwrite)
    (problem,) = probe_place("memory://bad")
    assert "8 of 8 writers" in problem


def test_a_folder_that_refuses_writes_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr("os.mkdir", refuse)
    (problem,) = probe_place(tmp_path)
    assert "read-only" in problem


def test_a_late_listing_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalFiles, "names", lambda self, folder: [])
    (problem,) = probe_place(tmp_path)
    assert "not listed at once" in problem


def test_a_mark_is_seen_by_the_other_host_and_removed(tmp_path: Path) -> None:
    name = leave_mark(tmp_path)
    assert os.listdir(tmp_path) == [name]
    assert LocalFiles(tmp_path).names("") == []
    assert check_mark(tmp_path, name) == []
    assert os.listdir(tmp_path) == []


def test_another_place_under_the_same_name_is_found_out(tmp_path: Path) -> None:
    name = leave_mark(tmp_path / "of the one host")
    (problem,) = check_mark(tmp_path / "of the other", name)
    assert "must not write one store" in problem


def test_a_mark_may_come_late_but_must_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps: list[float] = []
    missing = iter(range(3))
    really_read = LocalFiles.read

    def read(self: LocalFiles, path: str) -> bytes:
        if next(missing, None) is not None:
            raise FileNotFoundError(path)
        return really_read(self, path)

    monkeypatch.setattr(LocalFiles, "read", read)
    assert check_mark(tmp_path, leave_mark(tmp_path), sleep=naps.append) == []
    assert len(naps) == 3
    missing = iter(range(1000))
    (problem,) = check_mark(tmp_path, leave_mark(tmp_path), sleep=naps.append)
    assert "not visible here after 90 s" in problem
