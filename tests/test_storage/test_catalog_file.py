"""A catalog survives its file, whole or column by column, and damage in it is found."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage import catalog_file
from storage.catalog import Catalog, fold, newest_catalog, read_catalog
from storage.catalog_file import open_catalog, parse_catalog, write_catalog
from storage.errors import DamagedShardError
from storage.files import LocalFiles
from storage.order import epoch_order
from storage.reader import open_store

NAMES = [field.name for field in fields(Catalog)]


@pytest.fixture
def files(filled_dir: Path) -> LocalFiles:
    return LocalFiles(filled_dir)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every catalog file for a large one, of which columns are read alone."""
    monkeypatch.setattr(catalog_file, "WHOLE_BYTES", 0)
    monkeypatch.setattr(catalog_file, "READ_BYTES", 64)


def catalog_path(files: LocalFiles) -> Path:
    (path,) = (files.root / "catalog").iterdir()
    return path


def test_what_is_written_is_what_is_read(files: LocalFiles, request: pytest.FixtureRequest) -> None:
    catalog = read_catalog(files)
    name = write_catalog(files, catalog, num_generations=3)
    assert write_catalog(files, catalog, num_generations=3) == name
    whole = open_catalog(files, name)
    request.getfixturevalue("large")
    for read, num_generations in (whole, open_catalog(files, name)):
        assert num_generations == 3
        assert len(read) == len(catalog)
        assert read.text(1, 3) == catalog.text(1, 3)
        for column in NAMES:
            found, written = getattr(read, column), getattr(catalog, column)
            assert found.dtype == written.dtype
            np.testing.assert_array_equal(found, written, err_msg=column)


@pytest.mark.usefixtures("large")
def test_planning_reads_no_ids(filled_dir: Path, files: LocalFiles) -> None:
    ids = [open_store(filled_dir).snapshot().sequence_id(i) for i in range(12)]
    fold(files, read_catalog(files))
    snapshot = open_store(filled_dir).snapshot()
    epoch_order(snapshot, seed=0, epoch=0, window_shards=2)
    read = set(vars(snapshot._catalog)) & set(NAMES)
    assert read == {"generation", "unit_index", "num_sequences"}
    assert [snapshot.sequence_id(i) for i in range(12)] == ids
    assert "id_text" not in vars(snapshot._catalog)
    for _ in range(catalog_file.FEW_TEXTS):
        snapshot.sequence_id(3)
    assert "id_text" in vars(snapshot._catalog)
    assert [snapshot.sequence_id(i) for i in range(12)] == ids
    assert [snapshot.index_of(name) for name in ids] == list(range(12))


def test_every_flipped_bit_is_found(files: LocalFiles) -> None:
    fold(files, read_catalog(files))
    path = catalog_path(files)
    data = path.read_bytes()
    header = data[:4096].rstrip()
    columns = [value["offset"] for value in _header(data)["columns"].values()]
    for place in (0, 9, len(header) // 2, 4092, *columns):
        damaged = bytearray(data)
        damaged[place] ^= 4
        with pytest.raises(DamagedShardError):
            parse_catalog(bytes(damaged))
    for size in (0, 100, 4096, len(data) - 64):
        with pytest.raises(DamagedShardError):
            parse_catalog(data[:size])


def test_a_damaged_file_is_passed_over(filled_dir: Path, files: LocalFiles) -> None:
    fold(files, read_catalog(files))
    path = catalog_path(files)
    data = bytearray(path.read_bytes())
    data[4100] ^= 4
    path.write_bytes(data)
    assert len(newest_catalog(files)[0]) == 0
    assert open_store(filled_dir).snapshot().num_sequences == 12


@pytest.mark.usefixtures("large")
def test_damage_in_a_large_file_is_found_when_it_is_used(
    filled_dir: Path, files: LocalFiles
) -> None:
    fold(files, read_catalog(files))
    path = catalog_path(files)
    data = bytearray(path.read_bytes())
    for column in ("id_hash", "id_text"):
        data[_header(bytes(data))["columns"][column]["offset"]] ^= 4
    path.write_bytes(data)
    snapshot = open_store(filled_dir).snapshot()
    with pytest.raises(DamagedShardError, match=r"column id_hash .* remove this file"):
        _ = snapshot.held_out
    data[_header(bytes(data))["columns"]["id_hash"]["offset"]] ^= 4
    path.write_bytes(data)
    snapshot = open_store(filled_dir).snapshot()
    with pytest.raises(DamagedShardError, match="does not match its hash"):
        snapshot.sequence_id(0)
    snapshot.sequence_id(1)


def _header(data: bytes) -> dict[str, Any]:
    import json

    return dict(json.loads(data[16:4092]))


def test_the_first_format_is_still_read(request: pytest.FixtureRequest) -> None:
    files = LocalFiles(Path(__file__).parent / "golden" / "v1")
    (name,) = files.names("catalog")
    for _ in range(2):
        catalog, num_generations = open_catalog(files, name)
        assert (len(catalog), num_generations) == (1, 1)
        request.getfixturevalue("large")
    data = bytearray(files.read(f"catalog/{name}"))
    data[len(data) // 2] ^= 1
    with pytest.raises(DamagedShardError):
        parse_catalog(bytes(data))
