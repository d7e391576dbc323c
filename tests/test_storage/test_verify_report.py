"""An interrupted check goes on where it stopped, and looks again where the store has changed."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from storage import verify
from storage.encodings import encode
from storage.schema import LayerRecord
from storage.verify import verify_store
from storage.writer import open_for_writing


def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The units that are looked at from now on."""
    seen: list[str] = []
    check = verify._check_shard

    def counted(files, unit, planned, full):  # type: ignore[no-untyped-def]
        seen.append(str(unit))
        return check(files, unit, planned, full)

    monkeypatch.setattr(verify, "_check_shard", counted)
    return seen


def test_what_was_checked_is_not_checked_again(
    filled_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_path, seen = tmp_path / "verify.jsonl", checks(monkeypatch)
    whole = verify_store(filled_dir, full=True, log_path=log_path)
    assert len(seen) == 3
    # Killed while it wrote the third line.
    lines = log_path.read_text().splitlines(keepends=True)
    log_path.write_text("".join([*lines[:2], lines[2][:40]]))
    assert verify_store(filled_dir, full=True, log_path=log_path) == whole
    assert len(seen) == 4
    assert verify_store(filled_dir, full=True, log_path=log_path) == whole
    assert len(seen) == 4


def test_sizes_alone_do_not_stand_for_bytes(
    filled_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_path, seen = tmp_path / "verify.jsonl", checks(monkeypatch)
    verify_store(filled_dir, full=False, log_path=log_path)
    verify_store(filled_dir, full=True, log_path=log_path)
    assert len(seen) == 6
    verify_store(filled_dir, full=False, log_path=log_path)
    assert len(seen) == 6


def test_problems_are_found_again_until_they_are_mended(filled_dir: Path, tmp_path: Path) -> None:
    log_path = tmp_path / "verify.jsonl"
    victim = next(filled_dir.glob("shards/*/*/layers/9/c/0/0"))
    data = bytearray(victim.read_bytes())
    data[0] ^= 1
    victim.write_bytes(data)
    found = verify_store(filled_dir, full=True, log_path=log_path)
    assert [problem.layer for problem in found.problems] == ["9"]
    assert verify_store(filled_dir, full=True, log_path=log_path) == found
    data[0] ^= 1
    victim.write_bytes(data)
    assert verify_store(filled_dir, full=True, log_path=log_path).problems == []


def test_a_shard_with_new_layers_is_checked_again(
    filled_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, making: SimpleNamespace
) -> None:
    log_path = tmp_path / "verify.jsonl"
    verify_store(filled_dir, full=True, log_path=log_path)
    seen = checks(monkeypatch)
    store = open_for_writing(filled_dir)
    store.add_layers([LayerRecord(name="5", encoding="bf16", hidden_size=16)])
    unit = store.units()[0]
    with store.start_layers(unit, ["5"]) as writer:
        for sequence_id in writer.sequence_ids:
            values = making.make_sequence(sequence_id)["states"]["9"].data
            writer.append(sequence_id=sequence_id, states={"5": encode("bf16", values)})
        writer.seal()
    assert verify_store(filled_dir, full=True, log_path=log_path).ok
    assert seen == [str(unit)]
