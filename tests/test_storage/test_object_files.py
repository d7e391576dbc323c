"""The same laws on object stores: one in memory, one in a folder behind obstore."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from obstore.store import MemoryStore

from storage.errors import (
    DamagedShardError,
    IdentityMismatchError,
    StoreNotFoundError,
    StoreWriteError,
)
from storage.files import Files, LocalFiles
from storage.object_files import ObjectFiles
from storage.reader import open_store
from storage.repair import bury_damaged
from storage.verify import verify_store

PLACE = "memory://test"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """Let PLACE be an object store in memory for everything that opens a store."""
    bucket = MemoryStore()
    monkeypatch.setattr(ObjectFiles, "at", lambda url: ObjectFiles(bucket, name=url))
    return bucket


@pytest.fixture(params=["folder", "memory", "obstore_folder"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    if request.param == "folder":
        return LocalFiles(tmp_path)
    if request.param == "memory":
        return ObjectFiles(MemoryStore(), name="memory")
    return ObjectFiles.at(tmp_path.as_uri())


def test_all_media_keep_one_contract(files: Files) -> None:
    assert files.names("") == []
    assert files.create("a/b/record", b"one")
    assert files.create("a/b/record", b"one")
    assert not files.create("a/b/record", b"two")
    assert files.read("a/b/record") == b"one"
    assert files.size("a/b/record") == 3
    assert files.create("a/other", b"")
    assert files.names("a") == ["b", "other"]
    assert files.names("nowhere") == []
    for missing in (lambda: files.read("x"), lambda: files.size("x")):
        with pytest.raises(FileNotFoundError):
            missing()
    stream = files.append_stream("s/data")
    stream.write(b"abc")
    stream.write(memoryview(b"defg"))
    stream.close()
    stream.abandon()
    files.sync_tree("s")
    reader = files.range_reader("s/data")
    first, second = bytearray(2), bytearray(3)
    reader.read_into(1, [memoryview(first), memoryview(second)])
    assert bytes(first + second) == b"bcdef"
    for offset in (5, 7, 100):
        with pytest.raises(DamagedShardError, match="too early"):
            reader.read_into(offset, [memoryview(bytearray(3))])
    reader.close()
    files.remove_tree("s")
    assert files.names("s") == []
    with pytest.raises(FileNotFoundError):
        files.range_reader("s/data").read_into(0, [memoryview(bytearray(1))])


def test_a_store_lives_in_a_bucket(
    bucket: MemoryStore, tmp_path: Path, making: SimpleNamespace
) -> None:
    with pytest.raises(StoreNotFoundError):
        open_store(PLACE)
    store = making.make_store(PLACE)
    making.fill(store)
    with pytest.raises(IdentityMismatchError):
        making.create_store(PLACE, making.make_identity(vocab_size=7))
    local = making.make_store(tmp_path / "local")
    making.fill(local)
    digest = open_store(tmp_path / "local").content_digest()
    opened = open_store(PLACE)
    assert opened.content_digest() == digest
    assert verify_store(PLACE, full=True).ok
    assert opened.is_complete()
    tokenizer = opened.head_path("tokenizer") / "tokenizer.json"
    assert tokenizer.read_bytes() == b"{}"
    written = making.make_sequence("s3")
    read = opened.snapshot().read(
        opened.snapshot().index_of("s3"), layers=["9"], tokens=slice(3, 9)
    )
    expected = written["states"]["9"].data[3:9]
    np.testing.assert_array_equal(read.states["9"].data, expected)


def test_the_first_of_two_attempts_wins_in_a_bucket(
    bucket: MemoryStore, making: SimpleNamespace
) -> None:
    store = making.make_store(PLACE)
    unit = store.units()[0]
    with store.start_shard(unit) as one, store.start_shard(unit) as two:
        for sequence_id in store.sequences_of(unit):
            one.append(**making.make_sequence(sequence_id))
            two.append(**making.make_sequence(sequence_id))
        assert one.seal()
        assert not two.seal()
    assert len(store.files.names(f"shards/{store.files.names('shards')[0]}")) == 1
    assert verify_store(PLACE, full=True).ok


def test_damage_in_a_bucket_is_found_and_buried(
    bucket: MemoryStore, making: SimpleNamespace
) -> None:
    import obstore

    store = making.make_store(PLACE)
    making.fill(store)
    digest = open_store(PLACE).content_digest()
    paths = [entry["path"] for page in obstore.list(bucket) for entry in page]
    path = next(path for path in paths if "00000-00001." in path and "layers/9/c" in path)
    data = bytes(obstore.get(bucket, path).bytes())
    obstore.put(bucket, path, data[:-1])
    report = verify_store(PLACE, full=False)
    assert [(p.shard, p.layer) for p in report.problems] == [("00000-00001", "9")]
    bury_damaged(PLACE, report.problems)
    again = making.make_store(PLACE)
    making.fill(again)
    assert open_store(PLACE).content_digest() == digest


def test_a_replaced_file_is_whole_or_as_before(files: Files) -> None:
    files.create("data", b"one")
    stream = files.replacing_stream("data")
    stream.write(b"two")
    assert files.read("data") == b"one"
    stream.close()
    assert files.read("data") == b"two"
    stream = files.replacing_stream("data")
    stream.write(b"three")
    stream.abandon()
    assert files.read("data") == b"two"
    assert files.names("") == ["data"]


@pytest.mark.parametrize("is_done", [True, False])
def test_a_lost_answer_is_told_from_a_failed_completion(
    bucket: MemoryStore, is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what lies there then: an object of the same size that was there before proves nothing."""
    from obstore.exceptions import GenericError

    files = ObjectFiles(bucket, name=PLACE)
    files.create("data", b"one")
    stream = files.replacing_stream("data")
    stream.write(b"two")
    close = stream._writer.close

    class Writer:
        def close(self) -> None:
            if is_done:
                close()
            raise GenericError("the answer was lost")

    monkeypatch.setattr(stream, "_writer", Writer())
    if is_done:
        stream.close()
        assert files.read("data") == b"two"
    else:
        with pytest.raises(StoreWriteError, match="the answer was lost"):
            stream.close()
        assert files.read("data") == b"one"
