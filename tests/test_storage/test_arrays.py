import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.arrays import (
    ArrayWriter,
    block_checksums,
    chunk_index,
    end_of_data,
    open_with_zarr,
    read_rows,
    stored_range,
    unpack_rows,
)
from storage.files import LocalFiles


def write_array(
    root: Path, lengths: list[int], dtype: str, width: int, packing: str | None = None
) -> tuple[Any, np.ndarray]:
    rng = np.random.default_rng(len(lengths))
    rows = rng.integers(0, 100, (sum(lengths), width)).astype(dtype)
    writer = ArrayWriter(LocalFiles(root), "array", dtype=dtype, width=width, packing=packing)
    start = 0
    for length in lengths:
        writer.append(rows[start : start + length])
        start += length
    return writer.finish(axes=("tokens", "hidden"), attributes={"encoding": "x"}), rows


@pytest.mark.parametrize("lengths", [[], [1], [256], [255, 1], [300, 600, 7], [1024]])
@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "float32"])
@pytest.mark.parametrize("packing", [None, "zstd"])
def test_zarr_python_opens_our_arrays(
    tmp_path: Path, lengths: list[int], dtype: str, packing: str | None
) -> None:
    record, rows = write_array(tmp_path, lengths, dtype, width=12, packing=packing)
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


def read(root: Path, record: Any, start: int, stop: int) -> np.ndarray:
    """Rows start..stop-1 through `read_rows`."""
    memory = bytearray((stop - start) * record.row_bytes)
    reader = LocalFiles(root).range_reader("array/c/0/0")
    read_rows(reader, record, start, memoryview(memory))
    reader.close()
    return np.frombuffer(memory, record.dtype).reshape(-1, record.width)


@pytest.mark.parametrize("packing", [None, "zstd"])
@pytest.mark.parametrize(
    "span", [(0, 0), (0, 1), (255, 257), (256, 512), (0, 907), (250, 800), (906, 907), (512, 907)]
)
def test_any_rows_are_read_whichever_way_they_lie(
    tmp_path: Path, packing: str | None, span: tuple[int, int]
) -> None:
    record, rows = write_array(tmp_path, [300, 600, 7], "uint16", width=6, packing=packing)
    np.testing.assert_array_equal(read(tmp_path, record, *span), rows[slice(*span)])
    assert end_of_data(record) == record.file_bytes - len(tail_of(tmp_path, record))


def tail_of(root: Path, record: Any) -> bytes:
    """What the record's tail checksum covers, found by its length."""
    data = (root / "array/c/0/0").read_bytes()
    tail = data[end_of_data(record) :]
    assert crc32c(tail) == record.tail_crc32c
    return tail


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(0, 700))
def test_rows_are_unpacked_into_any_pieces(sizes: list[int], start: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        record, rows = write_array(Path(folder), [700, 200], "int8", width=5, packing="zstd")
        stop = start + sum(sizes)
        offset, num_bytes = stored_range(record, start, stop)
        stored = Path(folder, "array/c/0/0").read_bytes()[offset : offset + num_bytes]
        pieces = [memoryview(bytearray(size * record.row_bytes)) for size in sizes]
        unpack_rows(record, memoryview(stored), start, pieces)
        assert b"".join(pieces) == rows[start:stop].tobytes()


def test_packed_states_are_smaller_and_their_metadata_say_how(tmp_path: Path) -> None:
    record, rows = write_array(tmp_path, [512], "uint16", width=64, packing="zstd")
    assert record.file_bytes < 0.7 * rows.nbytes
    metadata = json.loads((tmp_path / "array/zarr.json").read_text())
    _, blosc, checksum = metadata["codecs"][0]["configuration"]["codecs"]
    assert blosc["configuration"] == {
        "cname": "zstd",
        "clevel": 1,
        "shuffle": "shuffle",
        "typesize": 2,
        "blocksize": 2**19,
    }
    assert checksum == {"name": "crc32c"}


def test_an_empty_array_has_one_missing_chunk() -> None:
    assert chunk_index([])[:16] == b"\xff" * 16
