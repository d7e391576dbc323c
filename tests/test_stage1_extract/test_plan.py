"""The plan's sizes are those of a real store; every way it offers fits."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stage1_extract.config import ExtractRun
from stage1_extract.extract import prepare_store, run_worker
from stage1_extract.plan import StoreShape, store_size, ways_to_fit
from stage1_extract.plan_counts import TokenCount
from stage1_extract.preparation import store_shape
from stage1_extract.target_files import load_config
from storage.reader import open_store

SHAPE = StoreShape(
    layers=("1", "9", "17", "25", "33"),
    encoding="bf16",
    hidden_size=4096,
    shard_bytes=1_000_000_000,
    head_bytes=2_500_000_000,
)


def count_of(num_conversations: int, *, mean_tokens: int, error: int = 0) -> TokenCount:
    return TokenCount(
        num_conversations=num_conversations,
        num_counted=num_conversations,
        num_sequences=num_conversations,
        num_tokens=num_conversations * mean_tokens,
        num_tokens_error=error,
        mean_context_tokens=mean_tokens / 2,
        longest_tokens=mean_tokens,
        num_truncated=0,
    )


def on_disk(folder: Path) -> tuple[int, int]:
    """Bytes and inodes of a folder."""
    num_bytes = num_inodes = 0
    for parent, _, files in os.walk(folder):
        num_inodes += 1 + len(files)
        num_bytes += sum((Path(parent) / name).stat().st_size for name in files)
    return num_bytes, num_inodes


@pytest.mark.parametrize("encoding", ["bf16", "fp8", "int3"])
def test_a_real_store_takes_what_was_planned(
    make_run: Callable[..., ExtractRun], encoding: str
) -> None:
    run = make_run(num_conversations=200, store={"encoding": encoding, "lm_head_input": True})
    prepare_store(run)
    assert run_worker(run, worker_index=0, num_workers=1) == 0
    snapshot = open_store(run.store_dir).snapshot()
    num_tokens = int(snapshot.num_tokens.sum())
    count = TokenCount(
        num_conversations=200,
        num_counted=200,
        num_sequences=200,
        num_tokens=num_tokens,
        num_tokens_error=0,
        mean_context_tokens=20.0,
        longest_tokens=80,
        num_truncated=0,
    )
    planned = store_size(count, store_shape(run, load_config(run.target)))
    num_bytes, num_inodes = on_disk(run.store_dir)
    assert planned.num_shards == pytest.approx(snapshot.num_shards, abs=1)
    # Shards of 40 kB are nearly all metadata: at real sizes the states decide.
    assert planned.num_bytes == pytest.approx(num_bytes, rel=0.1)
    assert planned.num_inodes == pytest.approx(num_inodes, rel=0.1)
    num_files = sum(path.is_file() for path in run.store_dir.rglob("*"))
    assert planned.num_objects == pytest.approx(num_files, rel=0.1)


def test_bytes_of_an_8b_target_are_the_published_ones() -> None:
    """20.5 kB a token in fp8 and 41 kB in bf16 for five layers of 4,096."""
    count = count_of(1_000_000, mean_tokens=1_000)
    for encoding, token_bytes in (("bf16", 40_960), ("fp8", 20_500)):
        shape = StoreShape(**{**vars(SHAPE), "encoding": encoding})
        assert shape.state_bytes == token_bytes
        size = store_size(count, shape)
        assert size.num_bytes == pytest.approx(count.num_tokens * token_bytes, rel=0.01)
        assert size.num_shards == -(-count.num_tokens * token_bytes // 10**9)


def test_an_error_of_tokens_is_an_error_of_bytes() -> None:
    size = store_size(count_of(1_000, mean_tokens=1_000, error=10_000), SHAPE)
    assert size.num_bytes_error == 10_000 * (40_960 + 5)
    assert size.most_bytes == size.num_bytes + size.num_bytes_error


def test_every_way_fits() -> None:
    count = count_of(10_000, mean_tokens=1_000, error=100_000)
    max_bytes = store_size(count, SHAPE).num_bytes * 7 // 10
    ways = ways_to_fit(count, SHAPE, max_bytes=max_bytes, encodings=("bf16", "fp8"))
    assert [way.setting.partition(" =")[0] for way in ways] == [
        "store.encoding",
        "3 of 5 layers",
        "data.limit",
    ]
    assert all(0 < way.num_bytes <= max_bytes for way in ways)
    limit = int(ways[-1].setting.rpartition(" ")[2])
    fewer = store_size(count_of(limit, mean_tokens=1_000), SHAPE)
    assert 0.95 * max_bytes < fewer.num_bytes <= max_bytes


def test_where_nothing_fits_no_way_is_offered() -> None:
    count = count_of(10_000, mean_tokens=1_000)
    assert ways_to_fit(count, SHAPE, max_bytes=10**9, encodings=("bf16", "fp8")) == []


def test_no_encoding_is_offered_that_cannot_keep_the_states() -> None:
    count = count_of(10_000, mean_tokens=1_000)
    odd = replace(SHAPE, hidden_size=36, head_bytes=0)
    half = store_size(count, odd).num_bytes * 6 // 10
    encodings = ("bf16", "fp8", "int8", "int3")
    offered = [way.setting for way in ways_to_fit(count, odd, max_bytes=half, encodings=encodings)]
    assert offered[:2] == ['store.encoding = "fp8"', 'store.encoding = "int8"']
    assert not any("int3" in setting for setting in offered)
