"""A power loss at any step of planning and committing loses no sealed shard.

The calls that `storage.files` makes are recorded, then replayed on a model of a disk which keeps
only what was flushed: a file's bytes since its last fsync and a folder's names since its own are
gone. In the second mode names survive and only bytes are lost, as on a journalling file system.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from storage.copy import copy_store
from storage.errors import StoreNotFoundError
from storage.reader import open_store
from storage.schema import LayerRecord
from storage.verify import verify_store


class File:
    def __init__(self) -> None:
        self.data = b""
        self.flushed = b""


class Folder:
    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.flushed: dict[str, Any] = {}


class Disk:
    """Files and folders below a root, as they are now and as a power loss would leave them."""

    def __init__(self, root: Path):
        self.root = root
        self.top = Folder()

    def find(self, path: str) -> Any:
        node: Any = self.top
        for name in Path(path).relative_to(self.root).parts:
            node = node.names[name]
        return node

    def parent(self, path: str) -> tuple[Folder, str]:
        return self.find(str(Path(path).parent)), Path(path).name

    def apply(self, call: str, path: str, more: Any) -> None:
        if call in ("create", "mkdir"):
            folder, name = self.parent(path)
            folder.names[name] = File() if call == "create" else Folder()
        elif call == "write":
            self.find(path).data += more
        elif call == "fsync":
            node = self.find(path)
            if isinstance(node, File):
                node.flushed = node.data
            else:
                node.flushed = dict(node.names)
        elif call == "link":
            folder, name = self.parent(more)
            folder.names[name] = self.find(path)
        elif call == "unlink":
            folder, name = self.parent(path)
            del folder.names[name]
        elif call == "replace":
            node = self.find(path)
            folder, name = self.parent(path)
            del folder.names[name]
            folder, name = self.parent(more)
            folder.names[name] = node

    def lose_power(self, target: Path, *, names_survive: bool) -> None:
        """Writes what is left to `target`."""
        self._restore(self.top, target, names_survive)

    def _restore(self, folder: Folder, target: Path, names_survive: bool) -> None:
        target.mkdir()
        for name, node in (folder.names if names_survive else folder.flushed).items():
            if isinstance(node, File):
                (target / name).write_bytes(node.flushed)
            else:
                self._restore(node, target / name, names_survive)


class Recorder:
    """Notes each call below a root that changed the disk."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch):
        self.root = root
        self.calls: list[tuple[str, str, Any]] = []
        self.paths: dict[int, str] = {}
        for name in ("open", "write", "fsync", "link", "mkdir", "unlink", "replace"):
            monkeypatch.setattr(os, name, self.recorded(name, getattr(os, name)))

    def recorded(self, name: str, call: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            result = call(*arguments, **options)
            self.note(name, arguments, result)
            return result

        return run

    def note(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        if name == "open":
            self.paths[result] = str(arguments[0])
            if not arguments[1] & os.O_CREAT:
                return
            entry = ("create", str(arguments[0]), None)
        elif name in ("write", "fsync"):
            data = bytes(arguments[1][:result]) if name == "write" else None
            entry = (name, self.paths.get(arguments[0], ""), data)
        else:
            has_two_paths = name in ("link", "replace")
            entry = (name, str(arguments[0]), str(arguments[1]) if has_two_paths else None)
        if Path(entry[1]).is_relative_to(self.root):
            self.calls.append(entry)


@pytest.fixture
def recorded(tmp_path: Path, making: SimpleNamespace) -> tuple[Recorder, list[int]]:
    """The calls of a store being made and filled, and after how many each shard was sealed."""
    root = tmp_path / "disk"
    root.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(root, patch)
        store = making.make_store(root / "deep" / "store", num_sequences=4, num_units=2)
        sealed = []
        for unit in store.units():
            assert making.fill_unit(store, unit)
            sealed.append(len(recorder.calls))
    return recorder, sealed


@pytest.fixture
def recorded_growth(tmp_path: Path, making: SimpleNamespace) -> tuple[Recorder, int]:
    """The calls of a store to which a layer is added, and after how many readers may see it."""
    root = tmp_path / "disk"
    root.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(root, patch)
        store = making.make_store(root / "store", num_sequences=3, num_units=2)
        making.fill(store)
        store.pend_layers([LayerRecord(name="5", encoding="bf16", hidden_size=16)])
        for unit in store.units_lacking(["5"]):
            with store.start_layers(unit, ["5"]) as writer:
                for sequence_id in writer.sequence_ids:
                    states = making.make_sequence(sequence_id)["states"]["9"]
                    writer.append(sequence_id=sequence_id, states={"5": states})
                assert writer.seal()
        store.publish_layers(["5"])
        return recorder, len(recorder.calls)


def test_added_layers_survive_a_power_loss_and_are_never_seen_in_part(
    recorded_growth: tuple[Recorder, int], tmp_path: Path
) -> None:
    recorder, published = recorded_growth
    disk = Disk(recorder.root)
    points = sorted(crash_points(recorder))
    points = {*points[::4], *points[-12:], published}
    for number, call in enumerate(recorder.calls, start=1):
        disk.apply(*call)
        if number not in points:
            continue
        left = tmp_path / f"left-{number}"
        disk.lose_power(left, names_survive=False)
        try:
            store = open_store(left / "store")
        except StoreNotFoundError:
            continue
        assert verify_store(left / "store", full=True).problems == []
        assert ("5" in store.layers) or number < published
        # Reads every layer that readers see, of every shard.
        store.content_digest()


@pytest.mark.parametrize("names_survive", [False, True])
def test_a_copy_that_lost_power_is_a_good_store_and_is_completed(
    filled_dir: Path, tmp_path: Path, names_survive: bool
) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(root, patch)
        copy_store(filled_dir, root / "copy", num_threads=1)
    assert any(call == "replace" for call, _, _ in recorder.calls)
    disk = Disk(root)
    points = sorted(crash_points(recorder))
    points = {*points[::9], *points[-6:]}
    digest = open_store(filled_dir).content_digest()
    for number, call in enumerate(recorder.calls, start=1):
        disk.apply(*call)
        if number not in points:
            continue
        left = tmp_path / f"left-{number}"
        disk.lose_power(left, names_survive=names_survive)
        try:
            store = open_store(left / "copy")
        except StoreNotFoundError:
            continue
        assert verify_store(left / "copy", full=True).problems == []
        store.content_digest()
        if number % 4 == 0:
            copy_store(filled_dir, left / "copy")
            assert open_store(left / "copy").content_digest() == digest
    assert open_store(left / "copy").content_digest() == digest


def crash_points(recorder: Recorder) -> Iterator[int]:
    """After every flush and every change of names; writes between change nothing durable."""
    for number, (call, _, _) in enumerate(recorder.calls, start=1):
        if call in ("fsync", "link", "unlink", "replace"):
            yield number


@pytest.mark.parametrize("names_survive", [False, True])
def test_sealed_shards_survive_a_power_loss(
    recorded: tuple[Recorder, list[int]], tmp_path: Path, names_survive: bool
) -> None:
    recorder, sealed = recorded
    disk = Disk(recorder.root)
    points = set(crash_points(recorder))
    if names_survive:
        # Then a flush of a folder changes nothing, and every third step says as much.
        points = set(sorted(points)[::3]) | set(sealed)
    for number, call in enumerate(recorder.calls, start=1):
        disk.apply(*call)
        if number not in points:
            continue
        left = tmp_path / f"left-{number}"
        disk.lose_power(left, names_survive=names_survive)
        expected = sum(number >= end for end in sealed)
        try:
            report = verify_store(left / "deep" / "store", full=True)
        except StoreNotFoundError:
            assert expected == 0
            continue
        assert report.problems == []
        assert report.num_shards >= expected
        open_store(left / "deep" / "store").content_digest()


def test_the_model_loses_what_is_not_flushed(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    path = str(tmp_path / "file")
    disk.apply("create", path, None)
    disk.apply("write", path, b"data")
    disk.apply("fsync", path, None)
    disk.lose_power(tmp_path / "one", names_survive=False)
    assert not (tmp_path / "one" / "file").exists()
    disk.apply("fsync", str(tmp_path), None)
    disk.apply("write", path, b" lost")
    disk.lose_power(tmp_path / "two", names_survive=False)
    assert (tmp_path / "two" / "file").read_bytes() == b"data"
