"""Room: what cannot fit is refused before anything runs, with the numbers and the ways out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stage1_extract import plan_room
from stage1_extract.config import ExtractConfig, ExtractRun
from stage1_extract.extract import prepare_store, run_worker
from stage1_extract.plan_room import free_space, in_units
from storage.errors import StoreError
from storage.reader import open_store

MakeRun = Callable[..., ExtractRun]


@pytest.fixture
def make_run(make_run: MakeRun) -> MakeRun:
    """Stores without the target's last layers, which would be larger than all states here."""

    def make(*records: Any, store: dict[str, Any] | None = None, **others: Any) -> ExtractRun:
        return make_run(*records, store={"last_layers": 0} | (store or {}), **others)

    return make


@pytest.fixture
def small_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes every disk as small as a test says."""

    def shrink(*, free_bytes: int = 10**15, free_inodes: int | None = 10**9) -> None:
        monkeypatch.setattr(plan_room, "free_space", lambda _: (free_bytes, free_inodes))

    return shrink


def test_a_disk_too_small_is_refused_unless_forced(
    make_run: MakeRun, small_disk: Callable[..., None]
) -> None:
    small_disk(free_bytes=150_000)
    with pytest.raises(ValueError, match=r"needs about \d+ kB more and \S+ has 150 kB free; ") as e:
        prepare_store(make_run())
    assert "\n" not in str(e.value)
    assert 'store.encoding = "fp8"' in str(e.value)
    assert "data.limit = " in str(e.value)
    assert len(prepare_store(make_run(extract={"force": True})).units()) > 0


def test_too_few_inodes_are_refused(make_run: MakeRun, small_disk: Callable[..., None]) -> None:
    small_disk(free_inodes=50)
    with pytest.raises(ValueError, match=r"files and folders and \S+ has 50 inodes free"):
        prepare_store(make_run())
    small_disk(free_inodes=None)
    prepare_store(make_run())


def test_a_disk_that_cannot_hold_the_rest_is_refused_on_resume(
    make_run: MakeRun, small_disk: Callable[..., None]
) -> None:
    """What is planned and not committed needs room again; what is committed does not."""
    run = make_run()
    prepare_store(run)
    small_disk(free_bytes=1_000)
    with pytest.raises(ValueError, match="needs about") as e:
        prepare_store(run)
    assert "store.encoding" not in str(e.value), "a plan stands"
    # A worker does not ask: what others have written already would count against it.
    prepare_store(run, is_worker=True)
    assert run_worker(run, worker_index=0, num_workers=1) == 0
    prepare_store(run)


def test_a_store_is_fitted_to_a_size(make_run: MakeRun) -> None:
    small = {"max_store_bytes": "150kB"}
    with pytest.raises(ValueError, match=r"extract.max_store_bytes = 150 kB leaves 150 kB") as e:
        prepare_store(make_run(extract=small))
    way = next(part for part in str(e.value).split(" or ") if "data.limit" in part)
    limit = int(way.split("data.limit = ")[1].split()[0])
    run = make_run(extract=small, data={"limit": limit})
    prepare_store(run)
    assert run_worker(run, worker_index=0, num_workers=1) == 0
    files = [path for path in run.store_dir.rglob("*") if path.is_file()]
    # The tokenizer is larger than this whole store, and nothing beside any real one.
    written = sum(path.stat().st_size for path in files if "tokenizer" not in path.parts)
    assert 100_000 < written <= 150_000


def test_what_a_refusal_names_can_then_be_asked_for(make_run: MakeRun) -> None:
    """Nothing is recorded before there is room: layers could not be changed any more."""
    small = {"max_store_bytes": "150kB"}
    with pytest.raises(ValueError, match=r'store\.encoding = "fp8"'):
        prepare_store(make_run(extract=small))
    store = prepare_store(make_run(extract=small, store={"encoding": "fp8"}))
    assert {layer.encoding for layer in store.layers.values()} == {"fp8"}


@pytest.mark.parametrize(
    ("store", "says"),
    [
        ({"encoding": "int4"}, 'store.encoding.*this run wants.*set store.encoding = "bf16"'),
        ({"target_layer_ids": [1]}, "store.target_layer.*this run wants.*restore the setting"),
    ],
)
def test_a_store_keeps_its_layers(make_run: MakeRun, store: dict[str, object], says: str) -> None:
    prepare_store(make_run())
    with pytest.raises(StoreError, match=says):
        prepare_store(make_run(store=store))


def test_the_limit_counts_what_is_stored_already(make_run: MakeRun) -> None:
    run = make_run(num_conversations=10)
    prepare_store(run)
    assert run_worker(run, worker_index=0, num_workers=1) == 0
    stored = int(open_store(run.store_dir).snapshot().num_tokens.sum()) * 133
    grown = make_run(num_conversations=20, extract={"max_store_bytes": stored + 30_000})
    with pytest.raises(ValueError, match=r"extract\.max_store_bytes"):
        prepare_store(grown)


def test_force_is_for_the_disk_alone(make_run: MakeRun) -> None:
    with pytest.raises(ValueError, match=r"extract\.max_store_bytes"):
        prepare_store(make_run(extract={"max_store_bytes": 1_000, "force": True}))


def test_an_answer_within_the_error_is_counted_out(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The small sample says no, all conversations counted say yes."""
    from stage1_extract import planning

    counted: list[int] = []
    right = planning.count_tokens

    def watched(ids: object, to_sequence: object, *, max_counted: int) -> object:
        counted.append(max_counted)
        return right(ids, to_sequence, max_counted=max_counted)  # type: ignore[arg-type]

    monkeypatch.setattr(planning, "_SAMPLED_CONVERSATIONS", 4)
    monkeypatch.setattr(planning, "count_tokens", watched)
    prepare_store(make_run(place="wide"))
    assert counted == [4]
    prepare_store(make_run(place="close", extract={"max_store_bytes": 260_000}))
    assert counted[1:] == [4, 20_000]


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("1.5TB", 1_500_000_000_000), (7, 7), ("200 GiB", 200 * 2**30)]
)
def test_sizes_are_read_as_people_write_them(text: str | int, num_bytes: int) -> None:
    assert ExtractConfig(max_store_bytes=text).max_store_bytes == num_bytes


def test_bytes_are_written_as_people_read_them() -> None:
    texts = [in_units(each) for each in (7, 20_500, 999_600, 1.5e12, 2.2e15, 5e18)]
    assert texts == ["7 B", "20.5 kB", "1 MB", "1.5 TB", "2.2 PB", "5,000.0 PB"]


def test_free_space_of_a_folder_to_come(tmp_path: Path) -> None:
    free_bytes, _ = free_space(tmp_path / "not" / "yet")
    assert free_bytes > 0
