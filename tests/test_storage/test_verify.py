import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from storage.catalog import fold, read_catalog
from storage.errors import StoreError
from storage.files import LocalFiles
from storage.reader import open_store
from storage.verify import verify_store


def files_of(store_dir: Path) -> list[Path]:
    return sorted(path for path in store_dir.rglob("*") if path.is_file())


@pytest.fixture
def folded_dir(filled_dir: Path) -> Path:
    files = LocalFiles(filled_dir)
    fold(files, read_catalog(files))
    return filled_dir


def test_a_whole_store_has_no_problem(folded_dir: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = verify_store(folded_dir, full=True, progress=lambda *counts: seen.append(counts))
    assert report.ok
    assert (report.num_shards, report.num_sequences) == (3, 12)
    assert report.num_bytes > 10_000
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert verify_store(folded_dir, full=False).ok


def test_flipped_bits_anywhere_are_found(
    store_dir: Path, flip_bit: Callable[..., Any], making: SimpleNamespace
) -> None:
    """Every kind of file, at its start, its end and at random places between."""
    making.fill(making.make_store(store_dir, num_sequences=3, num_units=1))
    files = LocalFiles(store_dir)
    fold(files, read_catalog(files))
    folded_dir, rng = store_dir, random.Random(0)
    for path in files_of(folded_dir):
        if not path.stat().st_size:
            continue
        num_bits = path.stat().st_size * 8
        for bit in {0, num_bits - 1, rng.randrange(num_bits), rng.randrange(num_bits)}:
            original = path.read_bytes()
            flip_bit(path, bit)
            try:
                found = not verify_store(folded_dir, full=True).ok
            except StoreError:
                found = True
            assert found, f"bit {bit} of {path.relative_to(folded_dir)}"
            path.write_bytes(original)
    assert verify_store(folded_dir, full=True).ok


@pytest.mark.slow
def test_a_thousand_flipped_bits_are_found(folded_dir: Path, flip_bit: Callable[..., Any]) -> None:
    rng = random.Random(2)
    paths = [path for path in files_of(folded_dir) if path.stat().st_size]
    for _ in range(1000):
        path = rng.choice(paths)
        original = path.read_bytes()
        flip_bit(path, rng.randrange(len(original) * 8))
        try:
            found = not verify_store(folded_dir, full=True).ok
        except StoreError:
            found = True
        assert found, path.relative_to(folded_dir)
        path.write_bytes(original)


def test_flipped_bits_never_reach_a_reader(
    filled_dir: Path, flip_bit: Callable[..., Any], making: SimpleNamespace
) -> None:
    """A read of everything gives what was written or raises; it never gives other bytes."""
    rng = random.Random(1)
    digest = open_store(filled_dir).content_digest()
    for path in files_of(filled_dir):
        if path.name == "zarr.json" or "head" in path.relative_to(filled_dir).parts[0]:
            continue
        original = path.read_bytes()
        flip_bit(path, rng.randrange(len(original) * 8))
        with contextlib.suppress(StoreError):
            assert open_store(filled_dir).content_digest() == digest
        path.write_bytes(original)


def test_damage_is_named_by_shard_layer_chunk_and_sequence(
    filled_dir: Path, flip_bit: Callable[..., Any]
) -> None:
    snapshot = open_store(filled_dir).snapshot()
    members = np.flatnonzero(snapshot.shard_index == 0)
    lengths = snapshot.num_tokens[members]
    (path,) = filled_dir.glob("shards/*/00000-00000.*/layers/9/c/0/0")
    token = int(lengths[0])  # the first of the second sequence
    flip_bit(path, token * 32 * 8)
    (problem,) = verify_store(filled_dir, full=True).problems
    assert problem.shard == "00000-00000"
    assert problem.layer == "9"
    assert problem.chunk == token // 256
    assert problem.sequence_ids == (snapshot.sequence_id(int(members[1])),)
    assert "shard 00000-00000, layer 9, chunk" in str(problem)
    assert verify_store(filled_dir, full=False).ok


def test_sizes_are_checked_without_reading(filled_dir: Path) -> None:
    (short,) = filled_dir.glob("shards/*/00000-00000.*/layers/9/c/0/0")
    short.write_bytes(short.read_bytes()[:-1])
    (lost,) = filled_dir.glob("shards/*/00000-00001.*/tokens.bin")
    lost.unlink()
    problems = verify_store(filled_dir, full=False).problems
    assert {(p.shard, p.layer) for p in problems} == {
        ("00000-00000", "9"),
        ("00000-00001", "tokens"),
    }
    assert all(p.sequence_ids for p in problems)


def test_a_lost_commit_is_found_through_the_catalog(folded_dir: Path) -> None:
    (path,) = folded_dir.glob("commits/*/00000-00001.json")
    path.unlink()
    (problem,) = verify_store(folded_dir, full=False).problems
    assert problem.shard == "00000-00001"
    assert "lost" in problem.message


def test_a_place_without_a_store_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store"):
        verify_store(tmp_path, full=False)


@pytest.mark.parametrize("lost", ["layers/9.json", "generations/00000.json", "plans", "tokenizer"])
def test_lost_records_are_found_and_no_shard_is_blamed(folded_dir: Path, lost: str) -> None:
    path = next(path for path in files_of(folded_dir) if lost in str(path.relative_to(folded_dir)))
    path.unlink()
    problems = verify_store(folded_dir, full=False).problems
    assert len(problems) == 1
    assert problems[0].shard is None
