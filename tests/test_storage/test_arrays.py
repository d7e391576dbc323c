import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.arrays import ArrayWriter, block_checksums, chunk_index, open_with_zarr
from storage.files import LocalFiles


def write_array(root: Path, lengths: list[int], dtype: str, width: int) -> tuple[Any, np.ndarray]:
    rng = np.random.default_rng(len(lengths))
    rows = rng.integers(0, 200, (sum(lengths), width)).astype(dtype)
    writer = ArrayWriter(LocalFiles(root), "array", dtype=dtype, width=width)
    start = 0
    for length in lengths:
        writer.append(rows[start : start + length])
        start += length
    return writer.finish(axes=("tokens", "hidden"), attributes={"encoding": "x"}), rows


@pytest.mark.parametrize("lengths", [[], [1], [256], [255, 1], [300, 600, 7], [1024]])
@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "float32"])
def test_zarr_python_opens_our_arrays(tmp_path: Path, lengths: list[int], dtype: str) -> None:
    record, rows = write_array(tmp_path, lengths, dtype, width=12)
    array = open_with_zarr(tmp_path / "array")
    assert array.shape == rows.shape == (record.num_tokens, record.width)
    assert array.dtype == rows.dtype
    assert array.chunks == (256, 12)
    assert array.metadata.dimension_names == ("tokens", "hidden")
    np.testing.assert_array_equal(array[:], rows)
    if len(rows) > 40:
        np.testing.assert_array_equal(array[17:39, 2:5], rows[17:39, 2:5])


def test_the_file_is_the_tensor_then_padding_then_index(tmp_path: Path) -> None:
    record, rows = write_array(tmp_path, [300, 5], "uint16", width=8)
    data = (tmp_path / "array/c/0/0").read_bytes()
    assert len(data) == record.file_bytes == 512 * 16 + 2 * 16 + 4
    np.testing.assert_array_equal(np.frombuffer(data, "<u2", rows.size).reshape(rows.shape), rows)
    assert data[rows.nbytes : 512 * 16] == bytes(512 * 16 - rows.nbytes)
    index = np.frombuffer(data, "<u8", 4, 512 * 16)
    assert index.tolist() == [0, 4096, 4096, 4096]
    assert int.from_bytes(data[-4:], "little") == crc32c(data[512 * 16 : -4])
    assert record.tail_crc32c == crc32c(data[rows.nbytes :])


def test_our_bytes_equal_those_of_zarr_python(tmp_path: Path) -> None:
    """The reference implementation writes the same shard, so the layout is no dialect."""
    import zarr

    _, rows = write_array(tmp_path, [512], "uint8", width=8)
    metadata = json.loads((tmp_path / "array/zarr.json").read_text())
    array = zarr.create_array(
        tmp_path / "theirs",
        shape=rows.shape,
        dtype="uint8",
        chunks=(256, 8),
        shards=(512, 8),
        compressors=None,
        fill_value=0,
    )
    array[:] = rows
    theirs = json.loads((tmp_path / "theirs/zarr.json").read_text())
    assert (tmp_path / "theirs/c/0/0").read_bytes() == (tmp_path / "array/c/0/0").read_bytes()
    for key in ("shape", "data_type", "chunk_grid", "chunk_key_encoding", "zarr_format"):
        assert metadata[key] == theirs[key]


@settings(deadline=None)
@given(st.integers(0, 3000), st.integers(1, 64), st.lists(st.integers(0, 3000), max_size=4))
def test_checksums_do_not_depend_on_pieces(num_bytes: int, row_bytes: int, cuts: list[int]) -> None:
    data = memoryview(np.random.default_rng(0).bytes(num_bytes))
    bounds = sorted({0, num_bytes, *(cut for cut in cuts if cut < num_bytes)})
    pieces = [data[a:b] for a, b in itertools.pairwise(bounds)]
    expected = [crc32c(data[a : a + 256 * row_bytes]) for a in range(0, num_bytes, 256 * row_bytes)]
    assert list(block_checksums(pieces, row_bytes)) == expected


def test_an_empty_array_has_one_missing_chunk() -> None:
    assert chunk_index(0, 8)[:16] == b"\xff" * 16
