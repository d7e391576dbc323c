import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zarr

from storage import layout
from storage.commits import committed_units, read_commit
from storage.copy import copy_store
from storage.derive import derive_store
from storage.errors import DamagedShardError, StoreError
from storage.files import LocalFiles
from storage.joined import join_stores
from storage.packing import pack, side_by_side, unpack
from storage.reader import open_store
from storage.verify import verify_store


@pytest.fixture
def packed_dir(tmp_path: Path, making: SimpleNamespace) -> Path:
    making.fill(making.make_store(tmp_path / "packed", packing="zstd"))
    return tmp_path / "packed"


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_a_chunk_survives(dtype: str) -> None:
    chunk = np.random.default_rng(0).integers(0, 200, (256, 12)).astype(dtype)
    out = memoryview(bytearray(chunk.nbytes))
    unpack(memoryview(pack("zstd", chunk)), out)
    assert bytes(out) == chunk.tobytes()


def test_no_damaged_byte_reaches_the_unpacker() -> None:
    chunk = np.arange(256 * 12, dtype=np.uint16).reshape(256, 12)
    packed = pack("zstd", chunk)
    out = memoryview(bytearray(chunk.nbytes))
    for place in range(len(packed)):
        damaged = bytearray(packed)
        damaged[place] ^= 4
        with pytest.raises(DamagedShardError, match="checksum"):
            unpack(memoryview(damaged), out)


def test_all_is_done_before_an_error_is_raised() -> None:
    done: list[int] = []

    def fail() -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        side_by_side([fail, lambda: done.append(1), lambda: done.append(2)])
    assert sorted(done) == [1, 2]


def test_a_packed_store_holds_what_a_raw_one_holds(packed_dir: Path, filled_dir: Path) -> None:
    packed, raw = open_store(packed_dir), open_store(filled_dir)
    assert packed.content_digest() == raw.content_digest()
    assert verify_store(packed_dir, full=True).ok
    one, two = packed.snapshot(), raw.snapshot()
    for index in range(one.num_sequences):
        other = two.index_of(one.sequence_id(index))
        tokens = slice(int(one.num_tokens[index]) // 3, int(one.num_tokens[index]) * 2 // 3 + 1)
        for name in packed.layers:
            found = one.read(index, layers=[name], tokens=tokens).states[name]
            wanted = two.read(other, layers=[name], tokens=tokens).states[name]
            np.testing.assert_array_equal(found.data, wanted.data)


def test_zarr_reads_packed_shards(packed_dir: Path) -> None:
    files = LocalFiles(packed_dir)
    snapshot = open_store(packed_dir).snapshot()
    commit = read_commit(files, min(committed_units(files)))
    rows = zarr.open_array(packed_dir / layout.array(commit.attempt_dir, "9"), mode="r")[:]
    first = snapshot.index_of(commit.sequence_ids[0])
    read = snapshot.read(first, layers=["9"]).states["9"].data
    np.testing.assert_array_equal(rows[: len(read)], read)


def test_every_flipped_bit_of_a_packed_array_is_found(packed_dir: Path, flip_bit: object) -> None:
    rng = np.random.default_rng(0)
    paths = sorted(packed_dir.glob("shards/*/*/layers/*/c/0/0"))
    for path in rng.choice(np.array(paths, dtype=object), 40):
        bit = int(rng.integers(8 * path.stat().st_size))
        flip_bit(path, bit)  # type: ignore[operator]
        report = verify_store(packed_dir, full=True)
        assert [problem.layer for problem in report.problems], (path, bit)
        flip_bit(path, bit)  # type: ignore[operator]
    assert verify_store(packed_dir, full=True).ok


def test_damage_read_names_chunk_layer_and_sequence(packed_dir: Path, flip_bit: object) -> None:
    files = LocalFiles(packed_dir)
    commit = read_commit(files, min(committed_units(files)))
    flip_bit(packed_dir / layout.array(commit.attempt_dir, "9") / "c/0/0", 80)  # type: ignore[operator]
    snapshot = open_store(packed_dir).snapshot()
    index = snapshot.index_of(commit.sequence_ids[0])
    with pytest.raises(DamagedShardError, match=r"layer 9.*packed chunk") as caught:
        snapshot.read(index, layers=["1", "9"])
    assert (caught.value.layer, caught.value.chunk) == ("9", 0)
    assert caught.value.sequence_id == commit.sequence_ids[0]
    snapshot.read(index, layers=["1"])


def test_a_store_is_derived_packed_and_back(filled_dir: Path, tmp_path: Path) -> None:
    derive_store(filled_dir, tmp_path / "packed", encoding="bf16", packing="zstd")
    derive_store(filled_dir, tmp_path / "plain", encoding="bf16")
    derive_store(tmp_path / "packed", tmp_path / "back", encoding="bf16")
    digests = {open_store(tmp_path / name).content_digest() for name in ("packed", "plain", "back")}
    assert len(digests) == 1
    assert {each.packing for each in open_store(tmp_path / "packed").layers.values()} == {"zstd"}
    with pytest.raises(StoreError, match="stored as bf16 of hidden size 16, packed with zstd"):
        derive_store(filled_dir, tmp_path / "packed", encoding="bf16")


def test_a_packed_store_is_copied_as_it_is(packed_dir: Path, tmp_path: Path) -> None:
    copy_store(packed_dir, tmp_path / "copy")
    for path in packed_dir.glob("shards/**/c/0/0"):
        assert (tmp_path / "copy" / path.relative_to(packed_dir)).read_bytes() == path.read_bytes()
    assert verify_store(tmp_path / "copy", full=True).ok


def test_packed_and_raw_stores_are_read_as_one(packed_dir: Path, making: SimpleNamespace) -> None:
    other = making.make_store(packed_dir.with_name("raw"), num_sequences=0)
    other.plan_generation(["another"], num_units=1)
    making.fill(other)
    joined = join_stores(packed_dir.with_name("joined"), [packed_dir, packed_dir.with_name("raw")])
    assert joined.snapshot().num_sequences == open_store(packed_dir).snapshot().num_sequences + 1


def test_an_unknown_packing_is_refused(store_dir: Path, making: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="unknown packing 'gzip'; expected one of zstd"):
        making.make_store(store_dir, packing="gzip")


def test_readers_pass_over_what_later_versions_record(packed_dir: Path, tmp_path: Path) -> None:
    """A record may get members that this version does not know."""
    from storage.records import dump_record, read_record

    shutil.copytree(packed_dir, tmp_path / "later")
    files = LocalFiles(tmp_path / "later")
    for folder in ("layers",):
        for name in files.names(folder):
            value = read_record(files, f"{folder}/{name}") | {"colour": "red"}
            (tmp_path / "later" / folder / name).write_bytes(dump_record(value))
    for path in (tmp_path / "later/commits").glob("*/*.json"):
        value = read_record(files, str(path.relative_to(tmp_path / "later")))
        for array in value["layers"].values():
            array["colour"] = "red"
        path.write_bytes(dump_record(value | {"colour": "red"}))
    assert (
        open_store(tmp_path / "later").content_digest() == open_store(packed_dir).content_digest()
    )
