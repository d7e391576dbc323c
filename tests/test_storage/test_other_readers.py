"""Our arrays are ordinary Zarr v3: zarr-python, zarrs and tensorstore read the golden store."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from storage import layout
from storage.arrays import read_rows
from storage.commits import ArrayRecord, read_commit
from storage.files import LocalFiles, LocalRangeReader
from storage.reader import open_store
from storage.schema import UnitId

GOLDEN = Path(__file__).parent / "golden"


def arrays() -> list[Any]:
    """(folder, record) of every array of the golden stores, raw and packed."""
    return [
        pytest.param(GOLDEN / store / folder, record, id=f"{store}-{name}")
        for store in ("v1", "v1-grown")
        for name, folder, record in read_commit(LocalFiles(GOLDEN / store), UnitId(0, 0)).arrays()
    ]


def read_zarr_python(folder: Path) -> np.ndarray:
    return np.asarray(zarr.open_array(folder, mode="r")[:])


def read_zarrs(folder: Path) -> np.ndarray:
    pytest.importorskip("zarrs", reason="zarrs has no wheel for this Python or platform")
    pipeline = {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}
    with zarr.config.set({**pipeline, "codec_pipeline.strict": True}):
        return np.asarray(zarr.open_array(folder, mode="r")[:])


def read_tensorstore(folder: Path) -> np.ndarray:
    tensorstore = pytest.importorskip(
        "tensorstore", reason="tensorstore has no wheel for this Python or platform"
    )
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/"}}
    return np.asarray(tensorstore.open(spec, open=True).result().read().result())


READERS: dict[str, Callable[[Path], np.ndarray]] = {
    "zarr-python": read_zarr_python,
    "zarrs": read_zarrs,
    "tensorstore": read_tensorstore,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("folder", "record"), arrays())
def test_every_zarr_reader_gets_the_stored_rows(
    reader: str, folder: Path, record: ArrayRecord
) -> None:
    found = READERS[reader](folder)
    assert found.shape == (record.num_tokens, record.width)
    assert found.dtype == record.dtype
    rows = bytearray(found.nbytes)
    read_rows(LocalRangeReader(folder / "c/0/0"), record, 0, memoryview(rows))
    assert found.tobytes() == rows


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("store", ["v1", "v1-grown"])
def test_rows_are_those_that_our_reader_gives(reader: str, store: str) -> None:
    commit = read_commit(LocalFiles(GOLDEN / store), UnitId(0, 0))
    snapshot = open_store(GOLDEN / store).snapshot()
    for name in commit.layers:
        rows = READERS[reader](GOLDEN / store / layout.array(commit.attempt_dir, name))
        start = 0
        for sequence_id, num_tokens in zip(commit.sequence_ids, commit.num_tokens, strict=True):
            ours = snapshot.read(snapshot.index_of(sequence_id), layers=[name]).states[name].data
            np.testing.assert_array_equal(ours, rows[start : start + num_tokens])
            start += num_tokens
