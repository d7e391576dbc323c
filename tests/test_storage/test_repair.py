import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from storage import catalog_file, layout
from storage.catalog import fold, read_catalog
from storage.errors import DamagedShardError, StoreNotFoundError
from storage.files import LocalFiles
from storage.identity import create_identity
from storage.object_files import ObjectFiles
from storage.reader import Store, open_store
from storage.repair import bury_damaged, collect_garbage, collect_garbage_of
from storage.verify import verify_store
from storage.writer import WritableStore


def test_a_shard_with_a_damaged_commit_can_be_buried(
    filled_dir: Path, making: SimpleNamespace
) -> None:
    digest = open_store(filled_dir).content_digest()
    (path,) = filled_dir.glob("commits/*/00000-00001.json")
    path.write_bytes(path.read_bytes()[:50])
    bury_damaged(filled_dir, verify_store(filled_dir, full=False).problems)
    assert open_store(filled_dir).snapshot().num_shards == 2
    store = making.make_store(filled_dir)
    making.fill(store)
    assert open_store(filled_dir).content_digest() == digest
    assert verify_store(filled_dir, full=True).ok


def test_burying_nothing_changes_nothing(filled_dir: Path) -> None:
    assert bury_damaged(filled_dir, []) == []
    assert not (filled_dir / "tombstones").exists()


def test_garbage_is_only_what_nobody_reads(filled_dir: Path, making: SimpleNamespace) -> None:
    store = making.make_store(filled_dir)
    store.plan_generation(["later"], num_units=1)
    digest = open_store(filled_dir).content_digest()
    (unit,) = set(store.units()) - store.committed()
    abandoned = store.start_shard(unit)
    abandoned.append(**making.make_sequence("later"))
    (filled_dir / "commits" / ".tmp-dead").write_bytes(b"half")
    files = LocalFiles(filled_dir)
    fold(files, read_catalog(files))

    assert collect_garbage(filled_dir) == []
    for folder, _, names in os.walk(filled_dir):
        for path in (Path(folder), *(Path(folder, name) for name in names)):
            os.utime(path, (0, 0))
    removed = collect_garbage(filled_dir)
    assert len(removed) == 2
    assert any("00001-00000." in path for path in removed)
    assert "commits/.tmp-dead" in removed
    assert open_store(filled_dir).content_digest() == digest
    assert verify_store(filled_dir, full=True).ok


def test_garbage_in_an_object_store_is_removed_likewise(making: SimpleNamespace) -> None:
    url = "memory:///garbage"
    files = ObjectFiles.at(url)
    store = WritableStore(files, making.make_identity())
    create_identity(files, store.identity)
    store.add_layers(making.LAYERS)
    store.plan_generation(["s1", "s2", "s3"], num_units=1)
    making.fill(store)
    path = f"{layout.attempt(store.units()[0], 'f' * 32)}/tokens.bin"
    files.create(path, b"left behind")
    assert collect_garbage_of(files, older_than_s=3600.0) == []
    assert collect_garbage_of(files, older_than_s=-60.0) == [path.removesuffix("/tokens.bin")]
    assert Store(files, store.identity).snapshot().num_sequences == 3
    assert len(files.names(f"{layout.SHARDS}/{layout.fan_out(store.units()[0])}")) == 1


def test_a_catalog_that_was_replaced_just_now_stays(
    making: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ObjectFiles.at("memory:///catalogs")
    store = WritableStore(files, making.make_identity())
    create_identity(files, store.identity)
    store.add_layers(making.LAYERS)
    store.plan_generation(["s1", "s2"], num_units=1)
    making.fill(store)
    fold(files, read_catalog(files))
    monkeypatch.setattr(catalog_file, "WHOLE_BYTES", 0)  # Its columns are read when they are used.
    snapshot = Store(files, store.identity).snapshot()
    store.plan_generation(["s3"], num_units=1)
    making.fill(store)
    fold(files, read_catalog(files))
    old, newer = (layout.catalog(name) for name in files.names(layout.CATALOG))
    written = {old: 0.0, newer: time.time()}
    monkeypatch.setattr(ObjectFiles, "last_written", lambda files, path: written[path])
    assert collect_garbage_of(files, older_than_s=60.0) == []
    assert snapshot.sequence_id(0) in ("s1", "s2")
    written[newer] -= 120.0
    assert collect_garbage_of(files, older_than_s=60.0) == [old]
    # A trainer whose epoch is longer than that goes on: with the commits, for they say the same.
    assert {snapshot.sequence_id(index) for index in range(2)} == {"s1", "s2"}
    assert snapshot.index_of("s2") in (0, 1)
    assert snapshot.num_tokens.shape == snapshot.held_out.shape == (2,)
    files.remove(layout.commit(store.units()[0]))
    files.remove(newer)
    lost = Store(files, store.identity).snapshot()
    assert lost.num_sequences == 1


def test_a_removed_catalog_whose_commits_are_lost_is_damage(
    making: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ObjectFiles.at("memory:///lost")
    store = WritableStore(files, making.make_identity())
    create_identity(files, store.identity)
    store.add_layers(making.LAYERS)
    store.plan_generation(["s1", "s2"], num_units=1)
    making.fill(store)
    fold(files, read_catalog(files))
    monkeypatch.setattr(catalog_file, "WHOLE_BYTES", 0)
    snapshot = Store(files, store.identity).snapshot()
    (name,) = files.names(layout.CATALOG)
    files.remove(layout.catalog(name))
    files.remove(layout.commit(store.units()[0]))
    with pytest.raises(DamagedShardError, match="commit records of its shards are missing"):
        snapshot.sequence_id(0)


def test_what_is_no_store_is_not_cleaned(tmp_path: Path) -> None:
    path = tmp_path / ".tmp-of-somebody"
    path.write_text("precious")
    with pytest.raises(StoreNotFoundError):
        collect_garbage(tmp_path, older_than_s=-1.0)
    assert path.read_text() == "precious"
