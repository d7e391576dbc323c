import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from storage.encodings import EncodedStates
from storage.errors import IdentityMismatchError, StoreError, StoreNotFoundError
from storage.files import LocalFiles
from storage.reader import open_store
from storage.schema import LayerRecord, is_held_out
from storage.verify import verify_store
from storage.writer import create_store, open_for_writing


def attempts(store_dir: Path) -> list[Path]:
    return sorted(store_dir.glob("shards/*/*"))


def test_same_identity_opens_the_store_again(store_dir: Path, making: SimpleNamespace) -> None:
    first = create_store(store_dir, making.make_identity())
    again = create_store(store_dir, making.make_identity())
    assert first.identity == again.identity == open_for_writing(store_dir).identity


def test_another_identity_is_refused_with_every_field(
    store_dir: Path, making: SimpleNamespace
) -> None:
    create_store(store_dir, making.make_identity())
    other = making.make_identity(compute_dtype="bfloat16", template_arguments={"x": 1})
    with pytest.raises(IdentityMismatchError) as caught:
        create_store(store_dir, other)
    message = str(caught.value)
    for part in ("compute_dtype", "'bfloat16'", "'float32'", "template_arguments"):
        assert part in message
    assert "vocab_size" not in message
    assert "\n" not in message


def test_a_folder_with_other_files_is_refused(tmp_path: Path, making: SimpleNamespace) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(StoreError, match="other files"):
        create_store(tmp_path, making.make_identity())
    with pytest.raises(StoreError, match="is a file"):
        create_store(tmp_path / "thesis.tex", making.make_identity())
    with pytest.raises(StoreNotFoundError, match="no store"):
        open_for_writing(tmp_path)


def test_layers_are_immutable_and_adding_is_idempotent(
    store_dir: Path, making: SimpleNamespace
) -> None:
    store = making.make_store(store_dir)
    store.add_layers(making.LAYERS)
    assert list(store.layers) == ["1", "9", "lm_head_input"]
    with pytest.raises(StoreError, match="layer 1 is stored as fp8"):
        store.add_layers([LayerRecord(name="1", encoding="bf16", hidden_size=16)])


def test_decoder_layers_come_in_numeric_order(store_dir: Path, making: SimpleNamespace) -> None:
    store = making.make_store(store_dir)
    store.add_layers([LayerRecord(name="10", encoding="bf16", hidden_size=16)])
    assert list(open_store(store_dir).layers) == ["1", "9", "10", "lm_head_input"]


def test_head_files_are_exclusive(store_dir: Path, making: SimpleNamespace) -> None:
    store = making.make_store(store_dir)
    store.put_head_file("target.json", b"one")
    store.put_head_file("target.json", b"one")
    with pytest.raises(StoreError, match="differs"):
        store.put_head_file("target.json", b"two")
    assert open_store(store_dir).head_bytes("target.json") == b"one"
    assert open_store(store_dir).head_path("tokenizer").joinpath("tokenizer.json").exists()


def test_asking_for_all_units_lists_nothing_for_each(
    store_dir: Path, making: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    making.make_store(store_dir, num_sequences=40)
    store = open_for_writing(store_dir)
    units = store.units()
    monkeypatch.setattr(store.files, "names", lambda _: pytest.fail("listed once more"))
    assert sum(len(store.sequences_of(unit)) for unit in units) == 40


def test_the_last_shard_costs_what_the_first_one_did(
    store_dir: Path, making: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is listed, read again or rewritten that grows with the store."""
    store = making.make_store(store_dir, num_sequences=90, num_units=30)
    units, calls = store.units(), Counter()

    def counted(name: str) -> Callable[..., Any]:
        plain = getattr(LocalFiles, name)

        def call(self: LocalFiles, *arguments: Any) -> Any:
            calls[name] += 1
            return plain(self, *arguments)

        return call

    for name in ("create", "read", "size", "names", "append_stream", "range_reader", "sync_tree"):
        monkeypatch.setattr(LocalFiles, name, counted(name))
    costs = []
    for unit in units:
        calls.clear()
        making.fill_unit(store, unit)
        costs.append(dict(calls))
    assert len(costs) > 20
    assert all(cost == costs[0] for cost in costs)


def test_generations_hold_only_new_ids(store_dir: Path, making: SimpleNamespace) -> None:
    store = making.make_store(store_dir, num_sequences=10)
    before = {f"s{i}": store.unit_of(f"s{i}") for i in range(10)}
    assert store.plan_generation([f"s{i}" for i in range(10)], num_units=5) == 0
    assert store.plan_generation([f"s{i}" for i in range(14)], num_units=5) == 4
    assert {name: store.unit_of(name) for name in before} == before
    assert {store.unit_of(f"s{i}").generation for i in range(10, 14)} == {1}
    assert store.unit_of("unknown") is None
    members = [name for unit in store.units() for name in store.sequences_of(unit)]
    assert sorted(members) == sorted(f"s{i}" for i in range(14))
    assert str(store.units()[0]).startswith("00000-0000")


def test_planners_that_race_make_one_plan(store_dir: Path, making: SimpleNamespace) -> None:
    one, two = making.make_store(store_dir), open_for_writing(store_dir)
    ids = [f"new{i}" for i in range(9)]
    one.units(), two.units()
    assert one.plan_generation(ids, num_units=2) == 9
    assert two.plan_generation(ids[::-1], num_units=4) == 0
    assert one.units() == two.units()


@pytest.mark.parametrize("name", ["", "two\nlines"])
def test_ids_that_cannot_be_listed_are_refused(
    store_dir: Path, making: SimpleNamespace, name: str
) -> None:
    with pytest.raises(ValueError, match="line break"):
        making.make_store(store_dir).plan_generation(["fine", name], num_units=1)


def test_a_shard_is_sealed_whole_or_not_at_all(store_dir: Path, making: SimpleNamespace) -> None:
    store = making.make_store(store_dir)
    unit = store.units()[0]
    ids = store.sequences_of(unit)
    with store.start_shard(unit) as shard:
        shard.append(**making.make_sequence(ids[0]))
        with pytest.raises(ValueError, match="lacks"):
            shard.seal()
    assert attempts(store_dir) == []
    assert not store.is_committed(unit)


def test_leaving_without_seal_removes_the_attempt(store_dir: Path, making: SimpleNamespace) -> None:
    store = making.make_store(store_dir)
    unit = store.units()[0]
    first = making.make_sequence(store.sequences_of(unit)[0])
    with store.start_shard(unit) as shard:
        shard.append(**first)
        assert len(attempts(store_dir)) == 1
    assert attempts(store_dir) == []


def test_of_two_attempts_the_first_commit_wins(store_dir: Path, making: SimpleNamespace) -> None:
    store = making.make_store(store_dir)
    unit = store.units()[0]
    with store.start_shard(unit) as one, store.start_shard(unit) as two:
        for sequence_id in store.sequences_of(unit):
            one.append(**making.make_sequence(sequence_id))
            two.append(**making.make_sequence(sequence_id))
        assert len(attempts(store_dir)) == 2
        assert two.seal()
        winner = two._id
        assert not one.seal()
    assert [path.suffix for path in attempts(store_dir)] == [f".{winner}"]
    assert verify_store(store_dir, full=True).ok
    assert store.committed() == {unit}


def test_skipped_sequences_are_committed_but_not_read(
    store_dir: Path, making: SimpleNamespace
) -> None:
    store = making.make_store(store_dir, num_units=1)
    (unit,) = store.units()
    first, *rest = store.sequences_of(unit)
    with store.start_shard(unit) as shard:
        shard.skip(sequence_id=first, reason="hidden states hold NaN")
        for sequence_id in rest:
            shard.append(**making.make_sequence(sequence_id))
        assert shard.seal()
    snapshot = open_store(store_dir).snapshot()
    assert snapshot.num_sequences == len(rest)
    with pytest.raises(StoreError, match=first):
        snapshot.index_of(first)
    assert snapshot.skipped() == {first: "hidden states hold NaN"}
    assert verify_store(store_dir, full=True).ok


def test_a_unit_of_skipped_sequences_only_is_fine(store_dir: Path, making: SimpleNamespace) -> None:
    store = making.make_store(store_dir, num_units=1)
    (unit,) = store.units()
    with store.start_shard(unit) as shard:
        for sequence_id in store.sequences_of(unit):
            shard.skip(sequence_id=sequence_id, reason="no assistant turn")
        assert shard.seal()
    assert open_store(store_dir).snapshot().num_sequences == 0
    assert verify_store(store_dir, full=True).ok


def test_wrong_arguments_are_refused(store_dir: Path, making: SimpleNamespace) -> None:
    store = making.make_store(store_dir)
    unit, other = store.units()[:2]
    name = store.sequences_of(unit)[0]
    good = making.make_sequence(name)
    with store.start_shard(unit) as shard:
        with pytest.raises(ValueError, match="not planned"):
            shard.append(**making.make_sequence(store.sequences_of(other)[0]))
        with pytest.raises(ValueError, match="layers"):
            shard.append(**{**good, "states": {"1": good["states"]["1"]}})
        states = good["states"] | {"9": EncodedStates(data=np.zeros((1, 3), dtype=np.uint16))}
        with pytest.raises(ValueError, match="layer 9"):
            shard.append(**{**good, "states": states})
        states = good["states"] | {"1": EncodedStates(data=good["states"]["1"].data)}
        with pytest.raises(ValueError, match="scales"):
            shard.append(**{**good, "states": states})
        shard.append(**good)
        with pytest.raises(ValueError, match="already"):
            shard.append(**good)
    with pytest.raises(ValueError, match="generation"):
        store.start_shard(type(unit)(7, 0))


def test_progress_counts_what_was_written(store_dir: Path, making: SimpleNamespace) -> None:
    store = making.make_store(store_dir, num_units=1)
    (unit,) = store.units()
    with store.start_shard(unit) as shard:
        for sequence_id in store.sequences_of(unit):
            shard.append(**making.make_sequence(sequence_id))
        files = sum(p.stat().st_size for p in attempts(store_dir)[0].rglob("*") if p.is_file())
        assert shard.num_bytes == files
        assert shard.num_tokens == files // (5 + 16 + 32 + 16 + 8)


def test_the_held_out_share_is_a_function_of_the_id() -> None:
    ids = [f"id-{i}" for i in range(4000)]
    held = [name for name in ids if is_held_out(name, 0.25)]
    assert 0.22 < len(held) / len(ids) < 0.28
    assert all(is_held_out(name, 0.5) for name in held)
    assert not any(is_held_out(name, 0.0) for name in ids)


def test_memory_does_not_grow_with_the_shard(store_dir: Path, making: SimpleNamespace) -> None:
    store = making.make_store(store_dir, num_sequences=60, num_units=1)
    (unit,) = store.units()
    largest = 700 * (5 + 16 + 32 + 16 + 8)
    with store.start_shard(unit) as shard:
        tracemalloc.start()
        for sequence_id in store.sequences_of(unit):
            shard.append(**making.make_sequence(sequence_id))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert shard.seal()
    # The sequence itself, float32 on its way to being encoded, and the shard's checksums.
    assert peak < 12 * largest
    assert shard.num_bytes > 1.5 * peak
