"""A copied store is the store: whole, resumable, incremental; damage never travels."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from obstore.store import MemoryStore

from storage import copy as copying
from storage.copy import copy_store
from storage.derive import derive_store
from storage.errors import DamagedShardError, IdentityMismatchError, StoreError
from storage.files import LocalFiles
from storage.object_files import ObjectFiles
from storage.reader import open_store
from storage.repair import bury_damaged
from storage.schema import LayerRecord
from storage.verify import verify_store

BUCKET = "memory://test"


@pytest.fixture(autouse=True)
def bucket(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    bucket = MemoryStore()
    monkeypatch.setattr(ObjectFiles, "at", lambda url: ObjectFiles(bucket, name=url))
    return bucket


def test_a_copy_is_the_store_wherever_it_goes(filled_dir: Path, tmp_path: Path) -> None:
    snapshot = open_store(filled_dir).snapshot()
    places = (filled_dir, tmp_path / "folder", BUCKET, (tmp_path / "url").as_uri())
    for source, target in itertools.pairwise(places):
        report = copy_store(source, target)
        assert (report.num_shards, report.num_copied) == (3, 3)
        assert verify_store(target, full=True).ok
        copied = open_store(target)
        assert copied.content_digest() == open_store(filled_dir).content_digest()
        assert copied.snapshot(snapshot.id).id == snapshot.id
        assert copied.head_bytes("tokenizer/tokenizer.json") == b"{}"
        assert copied.is_complete()


def test_a_second_copy_moves_what_is_new(making: SimpleNamespace, tmp_path: Path) -> None:
    store = making.make_store(tmp_path / "one")
    making.fill_unit(store, store.units()[0])
    assert copy_store(tmp_path / "one", BUCKET).num_copied == 1
    assert not open_store(BUCKET).is_complete()
    making.fill(store)
    report = copy_store(tmp_path / "one", BUCKET)
    assert (report.num_shards, report.num_copied) == (3, 2)
    assert copy_store(tmp_path / "one", BUCKET).num_copied == 0
    digest = open_store(tmp_path / "one").content_digest()
    assert open_store(BUCKET).content_digest() == digest


def test_layers_that_were_added_later_follow(filled_dir: Path, making: SimpleNamespace) -> None:
    copy_store(filled_dir, BUCKET)
    store = making.make_store(filled_dir)
    record = LayerRecord(name="2", encoding="bf16", hidden_size=making.HIDDEN_SIZE)
    store.add_layers([record])
    for unit in store.units_lacking(["2"]):
        with store.start_layers(unit, ["2"]) as layers:
            for sequence_id in layers.sequence_ids:
                made = making.make_sequence(sequence_id, layers=(record,))
                layers.append(sequence_id=sequence_id, states=made["states"])
            layers.seal()
    for _ in range(2):
        assert copy_store(filled_dir, BUCKET).num_copied == 0
        assert open_store(BUCKET).content_digest() == open_store(filled_dir).content_digest()
    assert verify_store(BUCKET, full=True).ok


def test_an_interrupted_copy_goes_on(
    filled_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "copy"
    num_files = 0

    def count(source: object, target: object, path: str, size: int) -> None:
        nonlocal num_files
        num_files += 1
        original(source, target, path, size)

    original = copying._copy_file
    monkeypatch.setattr(copying, "_copy_file", count)
    copy_store(filled_dir, tmp_path / "uninterrupted")
    in_all, num_files = num_files, 0
    for stop_at in range(1, in_all, 5):
        left = iter(range(stop_at - num_files))

        def interrupt(
            source: object, target: object, path: str, size: int, left: object = left
        ) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            count(source, target, path, size)

        monkeypatch.setattr(copying, "_copy_file", interrupt)
        with pytest.raises(KeyboardInterrupt):
            copy_store(filled_dir, target, num_threads=1)
        assert verify_store(target, full=True).ok
    monkeypatch.setattr(copying, "_copy_file", count)
    copy_store(filled_dir, target, num_threads=1)
    assert num_files == in_all
    assert verify_store(target, full=True).ok
    assert open_store(target).content_digest() == open_store(filled_dir).content_digest()


def test_what_an_interrupted_copy_left_damaged_is_copied_again(
    filled_dir: Path, tmp_path: Path
) -> None:
    copy_store(filled_dir, tmp_path / "copy")
    files = LocalFiles(tmp_path / "copy")
    (commit,) = (tmp_path / "copy" / "commits").glob("*/00000-00001.json")
    (data,) = (tmp_path / "copy" / "shards").glob("*/00000-00001.*/layers/9/c/0/0")
    commit.unlink()
    data.write_bytes(bytes(data.stat().st_size))
    assert copy_store(filled_dir, tmp_path / "copy").num_copied == 1
    assert verify_store(files.root, full=True).ok


def test_damage_stops_the_copy_until_it_is_buried(
    filled_dir: Path, tmp_path: Path, flip_bit, making: SimpleNamespace
) -> None:
    digest = open_store(filled_dir).content_digest()
    (data,) = (filled_dir / "shards").glob("*/00000-00001.*/layers/9/c/0/0")
    flip_bit(data, 1000)
    with pytest.raises(DamagedShardError, match=r"00000-00001.*store repair"):
        copy_store(filled_dir, tmp_path / "copy")
    assert verify_store(tmp_path / "copy", full=True).ok
    bury_damaged(filled_dir, verify_store(filled_dir, full=True).problems)
    making.fill(making.make_store(filled_dir))
    copy_store(filled_dir, tmp_path / "copy")
    assert open_store(tmp_path / "copy").content_digest() == digest


def test_another_store_is_not_overwritten(
    filled_dir: Path, tmp_path: Path, making: SimpleNamespace
) -> None:
    making.create_store(tmp_path / "other", making.make_identity(vocab_size=7))
    with pytest.raises(IdentityMismatchError):
        copy_store(filled_dir, tmp_path / "other")
    making.make_store(tmp_path / "apart", num_sequences=5)
    with pytest.raises(StoreError, match="grew apart"):
        copy_store(filled_dir, tmp_path / "apart")


@pytest.mark.parametrize("is_copied_before", [True, False])
def test_readers_of_a_copy_see_added_layers_when_all_shards_hold_them(
    filled_dir: Path,
    making: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    is_copied_before: bool,
) -> None:
    if is_copied_before:
        copy_store(filled_dir, BUCKET)
    store = making.make_store(filled_dir)
    record = LayerRecord(name="2", encoding="bf16", hidden_size=making.HIDDEN_SIZE)
    store.pend_layers([record])
    for unit in store.units_lacking(["2"]):
        with store.start_layers(unit, ["2"]) as layers:
            for sequence_id in layers.sequence_ids:
                made = making.make_sequence(sequence_id, layers=(record,))
                layers.append(sequence_id=sequence_id, states=made["states"])
            layers.seal()
    store.publish_layers(["2"])
    copy_added, seen = copying._copy_added, []

    def read_meanwhile(*arguments: Any) -> int:
        meanwhile = open_store(BUCKET)
        meanwhile.content_digest()
        seen.append("2" in meanwhile.layers)
        return copy_added(*arguments)

    monkeypatch.setattr(copying, "_copy_added", read_meanwhile)
    copy_store(filled_dir, BUCKET)
    assert seen == [False] * 3
    assert open_store(BUCKET).content_digest() == open_store(filled_dir).content_digest()


def test_a_source_that_grows_meanwhile_leaves_no_shard_without_its_plan(
    filled_dir: Path, making: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, copy_plans = making.make_store(filled_dir), copying._copy_plans

    def grow(*arguments: Any) -> None:
        copy_plans(*arguments)
        store.plan_generation(["later"], num_units=1)
        making.fill(store)

    monkeypatch.setattr(copying, "_copy_plans", grow)
    assert copy_store(filled_dir, BUCKET).num_copied == 3
    assert verify_store(BUCKET, full=True).ok


def test_a_store_is_not_written_onto_itself(filled_dir: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(filled_dir.parent)
    copy_store(filled_dir, BUCKET)
    for source, target in (
        (filled_dir, filled_dir.name),
        (filled_dir, filled_dir.as_uri()),
        (BUCKET, f"{BUCKET}/"),
    ):
        with pytest.raises(StoreError, match="is the source itself"):
            copy_store(source, target)
    with pytest.raises(StoreError, match="is the source itself"):
        derive_store(filled_dir, filled_dir, encoding="bf16")
