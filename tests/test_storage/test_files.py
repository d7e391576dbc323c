"""Refused writes and interrupted ones: nothing half-written under a final name."""

import errno
import os
import stat
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from storage import files
from storage.errors import StoreError, StoreWriteError, explain_os_errors
from storage.files import LocalFiles
from storage.reader import open_store
from storage.verify import verify_store
from storage.writer import create_store

REFUSALS = {
    errno.ENOSPC: "the disk is full",
    errno.EROFS: "read-only",
    errno.EACCES: "permission denied",
    errno.EDQUOT: "quota",
}


class FailingDisk:
    """Lets a number of write calls pass, then refuses every one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int, after: int):
        self.left, self.code = after, code
        for name in ("write", "fsync", "link", "mkdir"):
            monkeypatch.setattr(f"storage.files.os.{name}", self.guard(getattr(os, name)))

    def guard(self, call: object) -> object:
        def guarded(*arguments: object, **options: object) -> object:
            self.left -= 1
            if self.left < 0:
                raise OSError(self.code, os.strerror(self.code))
            return call(*arguments, **options)  # type: ignore[operator]

        return guarded


@pytest.mark.parametrize("code", REFUSALS)
def test_a_refusing_disk_gives_one_line_and_leaves_nothing(
    store_dir: Path, making: SimpleNamespace, code: int
) -> None:
    store = making.make_store(store_dir)
    done, unit = store.units()[:2]
    making.fill_unit(store, done)
    for after in range(0, 200, 5 if code == errno.ENOSPC else 17):
        with pytest.MonkeyPatch.context() as patch:
            FailingDisk(patch, code, after)
            refusal = None
            try:
                making.fill_unit(store, unit)
            except StoreWriteError as error:
                refusal = str(error)
        assert verify_store(store_dir, full=True).ok
        if refusal is None:
            break
        assert REFUSALS[code] in refusal
        assert "\n" not in refusal
        if store.is_committed(unit):
            continue
        assert len(list(store_dir.glob("shards/*/*"))) == 1
        assert open_store(store_dir).snapshot().num_shards == 1
    else:
        pytest.fail("never got through")
    making.fill(store)
    assert open_store(store_dir).snapshot().num_sequences == 12


def test_a_refused_store_leaves_no_identity(store_dir: Path, making: SimpleNamespace) -> None:
    with pytest.MonkeyPatch.context() as patch:
        FailingDisk(patch, errno.ENOSPC, 3)
        with pytest.raises(StoreWriteError, match="disk is full"):
            create_store(store_dir, making.make_identity())
    create_store(store_dir, making.make_identity())


def test_unknown_refusals_keep_their_own_words() -> None:
    with pytest.raises(OSError, match="odd") as caught, explain_os_errors("write", "x"):
        raise OSError(errno.EXDEV, "odd")
    assert not isinstance(caught.value, StoreError)


def test_creation_is_exclusive_among_threads(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    start = threading.Barrier(8)
    won: list[int] = []

    def create(number: int) -> None:
        start.wait()
        if files.create("folder/record", b"%d" % number):
            won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert files.read("folder/record") == b"%d" % won[0]
    assert len(won) == 1
    assert os.listdir(tmp_path / "folder") == ["record"]


def test_equal_bytes_count_as_ours(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    assert files.create("record", b"x")
    assert files.create("record", b"x")
    assert not files.create("record", b"y")


def test_unfinished_files_have_no_name(tmp_path: Path) -> None:
    (tmp_path / ".tmp-abc").write_bytes(b"")
    (tmp_path / "seen").write_bytes(b"")
    assert LocalFiles(tmp_path).names("") == ["seen"]
    assert LocalFiles(tmp_path).names("nowhere") == []


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP])
def test_a_file_system_without_links_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("os.link", refuse)
    with pytest.raises(StoreWriteError, match="no hard links"):
        LocalFiles(tmp_path).create("record", b"x")
    assert os.listdir(tmp_path) == []


def test_folders_that_cannot_be_flushed_are_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flush(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "no")

    monkeypatch.setattr("os.fsync", flush)
    assert LocalFiles(tmp_path).create("folder/record", b"x")


def test_after_a_failed_write_a_shard_takes_no_more(
    store_dir: Path, making: SimpleNamespace
) -> None:
    store = making.make_store(store_dir, num_units=1)
    (unit,) = store.units()
    first, second, *_ = store.sequences_of(unit)
    with store.start_shard(unit) as shard:
        with pytest.MonkeyPatch.context() as patch:
            # The third write fails: tokens and one layer are there, the others are not.
            FailingDisk(patch, errno.ENOSPC, 2)
            with pytest.raises(StoreWriteError, match="disk is full"):
                shard.append(**making.make_sequence(first))
        with pytest.raises(StoreError, match="start the unit again"):
            shard.append(**making.make_sequence(second))
        for sequence_id in store.sequences_of(unit):
            shard.skip(sequence_id=sequence_id, reason="to get as far as sealing")
        with pytest.raises(StoreError, match="start the unit again"):
            shard.seal()
    assert list(store_dir.glob("shards/*/*")) == []
    making.fill(store)
    assert verify_store(store_dir, full=True).ok


def test_a_file_that_the_client_remembers_as_missing_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS and Lustre: a look-up fails until the folder is listed again."""
    files = LocalFiles(tmp_path)
    files.create("commits/00/record", b"committed elsewhere")
    stale = {tmp_path / "commits" / "00" / "record"}
    really_open, really_list = os.open, os.listdir

    def forgetful_open(path: Any, *arguments: Any, **options: Any) -> int:
        if Path(path) in stale:
            raise FileNotFoundError(path)
        return really_open(path, *arguments, **options)

    def listdir(folder: Any) -> list[str]:
        stale.difference_update({path for path in stale if path.parent == Path(folder)})
        return really_list(folder)

    monkeypatch.setattr("os.open", forgetful_open)
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda path: _read(forgetful_open(path, 0)))
    monkeypatch.setattr("os.listdir", listdir)
    for use in (files.read, files.range_reader):
        stale.add(tmp_path / "commits" / "00" / "record")
        use("commits/00/record")
        assert not stale


def _read(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


@pytest.mark.parametrize("is_known", [True, False])
def test_what_is_written_goes_to_disk_early_each_byte_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """Whether or not the system can be asked for it, the file is the same."""
    asked: list[tuple[int, int]] = []

    def note(_: int, offset: int, num_bytes: int, __: int) -> int:
        asked.append((offset, num_bytes))
        return 0

    monkeypatch.setattr(files, "_WRITE_BACK_BYTES", 10)
    monkeypatch.setattr(files, "_sync_file_range", lambda: note if is_known else None)
    stream = LocalFiles(tmp_path).append_stream("a/file")
    pieces = [b"0123", b"456", b"789abc", b"d" * 25, b"e"]
    for piece in pieces:
        stream.write(piece)
    stream.close()
    assert (tmp_path / "a/file").read_bytes() == b"".join(pieces)
    assert asked == ([(0, 13), (13, 25)] if is_known else [])


def test_the_system_takes_the_hint(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.write(b"x" * 5000)
        file.flush()
        files.begin_write_back(file.fileno(), offset=0, num_bytes=5000)
    assert (tmp_path / "file").read_bytes() == b"x" * 5000


def test_a_folder_that_cannot_be_removed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(top: Path) -> None:
        raise PermissionError(errno.EACCES, "denied", str(top))

    (tmp_path / "full" / "inner").mkdir(parents=True)
    monkeypatch.setattr("shutil.rmtree", refuse)
    with pytest.raises(StoreWriteError, match=r"cannot remove .*full: permission denied"):
        LocalFiles(tmp_path).remove_tree("full")
    LocalFiles(tmp_path).remove_tree("absent")
    monkeypatch.undo()
    LocalFiles(tmp_path).remove_tree("full")
    assert not (tmp_path / "full").exists()


def test_an_attempt_that_cannot_be_removed_does_not_hide_the_error(
    store_dir: Path, making: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = making.make_store(store_dir, num_units=1)
    unit = store.units()[0]

    def refuse(files: LocalFiles, folder: str) -> None:
        raise StoreWriteError("cannot remove: permission denied")

    monkeypatch.setattr(LocalFiles, "remove_tree", refuse)
    with pytest.raises(KeyError, match="mine"), store.start_shard(unit):
        raise KeyError("mine")
    assert not store.is_committed(unit)
