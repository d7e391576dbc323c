from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from storage import catalog as catalog_module
from storage.catalog import (
    Catalog,
    catalog_of,
    fold,
    newest_catalog,
    read_catalog,
    select,
)
from storage.commits import committed_units, read_commit
from storage.errors import StoreWriteError
from storage.files import LocalFiles
from storage.reader import open_store


def assert_equal(one: Catalog, two: Catalog) -> None:
    for field in fields(Catalog):
        columns = getattr(one, field.name), getattr(two, field.name)
        np.testing.assert_array_equal(*columns, err_msg=field.name)


@pytest.fixture
def files(filled_dir: Path) -> LocalFiles:
    return LocalFiles(filled_dir)


def test_joining_does_not_depend_on_the_order_of_parts(files: LocalFiles) -> None:
    commits = [read_commit(files, unit) for unit in sorted(committed_units(files))]
    whole = catalog_of(commits)
    assert_equal(whole, catalog_of(commits[::-1]))
    parts = [catalog_of(commits[2:]), catalog_of(commits[:1]), catalog_of(commits[1:2])]
    assert_equal(whole, select(parts))
    kept = select([whole], keep=np.array([True, False, True]))
    assert_equal(kept, catalog_of([commits[0], commits[2]]))


def test_a_folded_store_reads_the_same(
    filled_dir: Path, files: LocalFiles, making: SimpleNamespace
) -> None:
    before = open_store(filled_dir).snapshot()
    fold(files, read_catalog(files))
    folded = open_store(filled_dir).snapshot()
    assert folded.id == before.id
    assert [folded.sequence_id(i) for i in range(12)] == [before.sequence_id(i) for i in range(12)]
    store = making.make_store(filled_dir)
    store.plan_generation(["later one", "later two"], num_units=1)
    assert open_store(filled_dir).snapshot().id == before.id
    making.fill(store)
    grown = open_store(filled_dir).snapshot()
    assert grown.num_sequences == 14
    assert grown.index_of("later two") >= 12


def test_a_complete_catalog_saves_reading_commits(
    filled_dir: Path, files: LocalFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    fold(files, read_catalog(files))
    assert newest_catalog(files)[1] == 1
    monkeypatch.setattr(catalog_module, "committed_units", None)
    monkeypatch.setattr(catalog_module, "read_commit_values", None)
    assert open_store(filled_dir).snapshot().num_sequences == 12


def test_an_incomplete_catalog_says_so(store_dir: Path, making: SimpleNamespace) -> None:
    store = making.make_store(store_dir)
    making.fill_unit(store, store.units()[0])
    files = LocalFiles(store_dir)
    fold(files, read_catalog(files))
    assert newest_catalog(files)[1] == 0
    making.fill(store)
    assert open_store(store_dir).snapshot().num_shards == 3


def test_readers_fold_many_new_commits(
    filled_dir: Path, files: LocalFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_module, "FOLD_COMMITS", 2)
    open_store(filled_dir).snapshot()
    assert len(newest_catalog(files)[0]) == 3


def test_the_last_commits_are_folded_though_they_are_few(
    store_dir: Path, making: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = making.make_store(store_dir, num_sequences=40, num_units=12)
    *most, before_last, last = store.units()
    for unit in most:
        making.fill_unit(store, unit)
    files = LocalFiles(store_dir)
    fold(files, read_catalog(files))
    monkeypatch.setattr(catalog_module, "FOLD_COMMITS", 1)
    making.fill_unit(store, before_last)
    open_store(store_dir).snapshot()
    assert len(newest_catalog(files)[0]) == len(most)
    making.fill_unit(store, last)
    open_store(store_dir).snapshot()
    assert len(newest_catalog(files)[0]) == len(most) + 2
    assert newest_catalog(files)[1] == 1


def test_readers_that_may_not_write_do_without(
    filled_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> bool:
        raise StoreWriteError("cannot write: the file system is read-only")

    monkeypatch.setattr(catalog_module, "FOLD_COMMITS", 2)
    monkeypatch.setattr(LocalFiles, "replacing_stream", refuse)
    assert open_store(filled_dir).snapshot().num_shards == 3
