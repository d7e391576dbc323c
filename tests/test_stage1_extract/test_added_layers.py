"""Added layers are those that an extraction of all layers at once would have stored."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage1_extract import added_layers
from stage1_extract.added_layers import add_layers, consecutive_batches, prepare_layers
from stage1_extract.config import ExtractRun
from stage1_extract.extract import prepare_store, run_worker
from storage.errors import IdentityMismatchError, StoreError, StoreNotFoundError
from storage.reader import open_store
from storage.verify import verify_store
from storage.writer import open_for_writing

MakeRun = Callable[..., ExtractRun]


@given(st.lists(st.integers(1, 60), max_size=30), st.sampled_from(["packed", "padded", "single"]))
def test_batches_are_consecutive_whole_and_within_the_budget(
    lengths: list[int], batching: Any
) -> None:
    parts = list(consecutive_batches(lengths, batching=batching, batch_tokens=100))
    assert [i for part in parts for i in range(len(lengths))[part]] == list(range(len(lengths)))
    assert all(one.stop == two.start for one, two in pairwise(parts))
    for part in parts:
        taken = lengths[part]
        size = sum(taken) if batching == "packed" else max(taken) * len(taken)
        assert len(taken) == 1 or (size <= 100 and batching != "single")


def extracted(run: ExtractRun) -> ExtractRun:
    prepare_store(run)
    assert run_worker(run, worker_index=0, num_workers=1) == 0
    return run


@pytest.mark.parametrize("encoding", ["bf16", "int8"])
def test_layers_added_later_equal_layers_captured_at_once(make_run: MakeRun, encoding: str) -> None:
    single = {"batching": "single"}
    run = extracted(make_run(store={"encoding": encoding}, extract=single))
    before = open_store(run.store_dir)
    digest, snapshot_id = before.content_digest(), before.snapshot().id
    lacking = prepare_layers(run, ["1", "lm_head_input"])
    assert lacking == [before.snapshot().unit_of_shard(i) for i in range(len(lacking))]
    assert list(open_store(run.store_dir).layers) == ["0", "2"]
    assert add_layers(run, ["1", "lm_head_input"]) == 0
    assert verify_store(run.store_dir, full=True).ok
    after = open_store(run.store_dir)
    assert list(after.layers) == ["0", "1", "2", "lm_head_input"]
    assert after.snapshot().id == snapshot_id
    assert digest != after.content_digest()
    if encoding == "bf16":
        settings = {"target_layer_ids": (0, 1, 2), "lm_head_input": True}
        whole = extracted(make_run(place="whole", store=settings, extract=single))
        assert after.content_digest() == open_store(whole.store_dir).content_digest()


def test_stopped_it_goes_on_where_it_stopped(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = extracted(make_run())
    lacking = prepare_layers(run, ["1"])
    added: list[Any] = []
    add_to = added_layers._Adder.add_to

    def failing(self: Any, unit: Any) -> None:
        if len(added) == 2:
            raise OSError("pulled the plug")
        add_to(self, unit)
        added.append(unit)

    monkeypatch.setattr(added_layers._Adder, "add_to", failing)
    with pytest.raises(OSError, match="plug"):
        add_layers(run, ["1"])
    assert "1" not in open_store(run.store_dir).layers
    assert prepare_layers(run, ["1"]) == lacking[2:]
    monkeypatch.setattr(added_layers._Adder, "add_to", add_to)
    assert add_layers(run, ["1"]) == 0
    assert "1" in open_store(run.store_dir).layers
    assert prepare_layers(run, ["1"]) == []
    assert add_layers(run, ["1"]) == 0


def test_what_cannot_be_added_is_refused(make_run: MakeRun) -> None:
    with pytest.raises(StoreNotFoundError, match="no store"):
        prepare_layers(make_run(), ["1"])
    run = extracted(make_run())
    with pytest.raises(ValueError, match=r"--layers x: expected decoder layers"):
        prepare_layers(run, ["x"])
    with pytest.raises(ValueError, match="out of range"):
        prepare_layers(run, ["99"])
    with pytest.raises(IdentityMismatchError, match="compute_dtype"):
        prepare_layers(make_run(target={"dtype": "bfloat16"}), ["1"])
    assert prepare_layers(run, ["1"])
    with pytest.raises(StoreError, match="lack layers 1"):
        open_for_writing(run.store_dir).publish_layers(["1"])


def test_of_two_calibrations_at_once_the_first_recorded_holds(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tasks of a job array do it, each on its own device."""
    run = extracted(make_run(store={"encoding": "int8"}))
    scales = iter([2.0, 1.0])

    def calibrate(*_: Any, **__: Any) -> dict[str, tuple[float, ...]]:
        scale = next(scales)
        if scale == 2.0:
            prepare_layers(run, ["1"])
        return {"1": (scale,) * 32}

    monkeypatch.setattr(added_layers, "calibrate", calibrate)
    assert prepare_layers(run, ["1"])
    assert set(open_for_writing(run.store_dir).pending_layers["1"].channel_scales or ()) == {1.0}


@pytest.mark.parametrize(
    ("first", "second", "is_mixed"),
    [("bf16", "int3", True), ("int3", "int3", False), ("bf16", "bf16", False)],
)
def test_a_mixture_that_takes_no_conversations_is_said(
    make_run: MakeRun,
    capsys: pytest.CaptureFixture[str],
    first: str,
    second: str,
    is_mixed: bool,
) -> None:
    extracted(make_run(store={"encoding": first}))
    run = make_run(store={"encoding": second})
    capsys.readouterr()
    prepare_layers(run, ["1", "lm_head_input"])
    mixture = f"0 as {first}, 2 as {first}, 1 as {second}"
    assert (mixture in capsys.readouterr().err) is is_mixed
    assert add_layers(run, ["1", "lm_head_input"]) == 0
    grown = make_run(
        store={"encoding": second, "target_layer_ids": (0, 1, 2), "lm_head_input": True}
    )
    if is_mixed:
        with pytest.raises(StoreError, match="layer 0 is stored as"):
            prepare_store(grown)
    else:
        prepare_store(grown)
