"""Extraction: what is stored is the target's own, whoever computed it and however often killed."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stage1_extract import extract
from stage1_extract.config import ExtractRun
from stage1_extract.extract import prepare_store, run_worker
from stage1_extract.target import load_target
from stage1_extract.target_transformers import TransformersTarget
from stage1_extract.worker import Worker
from storage.errors import IdentityMismatchError, StoreError, StoreWriteError
from storage.reader import open_store
from storage.verify import verify_store
from storage.writer import ShardWriter

MakeRun = Callable[..., ExtractRun]
FORK = multiprocessing.get_context("fork")


def extract_all(run: ExtractRun, *, num_workers: int = 1) -> str:
    """Runs all workers one after another; gives the content digest."""
    prepare_store(run)
    for index in range(num_workers):
        assert run_worker(run, worker_index=index, num_workers=num_workers) == 0
    return open_store(run.store_dir).content_digest()


def in_child(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> int | None:
    """Runs a function in a forked process; gives its exit code (negative: killed by a signal)."""
    process = FORK.Process(target=function, args=arguments, kwargs=keywords)
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.parametrize("encoding", ["bf16", "fp8"])
@torch.inference_mode()
def test_the_store_holds_the_targets_states(make_run: MakeRun, encoding: str) -> None:
    run = make_run(store={"encoding": encoding, "lm_head_input": True})
    extract_all(run)
    store = open_store(run.store_dir)
    snapshot = store.snapshot()
    assert snapshot.num_sequences == 24
    target: Any = load_target(run.target)
    for index in range(snapshot.num_sequences):
        token_ids, _ = snapshot.read_tokens(index)
        output = target.model(torch.from_numpy(token_ids).long()[None], output_hidden_states=True)
        states = store.sequence(snapshot.sequence_id(index)).hidden_states(
            layers=["0", "2", "lm_head_input"]
        )
        for column, entry in enumerate((1, 3, 4)):
            expected = output.hidden_states[entry][0].numpy()
            tolerance = 2.0**-8 if encoding == "bf16" else 2.0**-4
            largest = np.abs(expected).max(axis=-1, keepdims=True)
            assert (np.abs(states[:, column] - expected) <= tolerance * largest).all()


@torch.inference_mode()
def test_with_few_bits_the_final_state_keeps_eight(make_run: MakeRun) -> None:
    """The target's distribution is made from it."""
    run = make_run(store={"encoding": "int3", "lm_head_input": True})
    extract_all(run)
    extract_all(run)  # Again: the same settings fit the store.
    store = open_store(run.store_dir)
    kept = {name: record.encoding for name, record in store.layers.items()}
    assert kept == {"0": "int3", "2": "int3", "lm_head_input": "int8"}
    target: Any = load_target(run.target)
    snapshot = store.snapshot()
    token_ids, _ = snapshot.read_tokens(0)
    output = target.model(torch.from_numpy(token_ids).long()[None], output_hidden_states=True)
    expected = output.hidden_states[4][0].numpy()
    found = store.sequence(snapshot.sequence_id(0)).hidden_states(layers=["lm_head_input"])[:, 0]
    assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)


def test_a_packed_store_holds_the_same(make_run: MakeRun) -> None:
    packed = make_run(place="packed", store={"encoding": "bf16", "packing": "zstd"})
    assert extract_all(packed) == extract_all(make_run(place="plain", store={"encoding": "bf16"}))
    assert {each.packing for each in open_store(packed.store_dir).layers.values()} == {"zstd"}
    assert verify_store(packed.store_dir, full=True).ok


def test_the_store_does_not_depend_on_the_workers(make_run: MakeRun) -> None:
    one = make_run(place="one")
    assert len(prepare_store(one).units()) > 3
    assert extract_all(one) == extract_all(make_run(place="three"), num_workers=3)


def test_every_worker_finds_a_unit_of_its_own(make_run: MakeRun) -> None:
    def one_shard(place: str) -> ExtractRun:
        run = make_run(place=place)
        return run.model_copy(update={"store": run.store.model_copy(update={"shard_bytes": 10**9})})

    alone, shared = one_shard("alone"), one_shard("shared")
    assert len(prepare_store(alone).units()) == 1
    assert len(prepare_store(shared, fewest_units=3).units()) == 3
    assert len(prepare_store(shared, fewest_units=5).units()) == 3  # Nothing is new.
    assert extract_all(shared, num_workers=3) == extract_all(alone)


@pytest.mark.parametrize("num_batches", [0, 3, 7])
def test_resumed_after_sigkill_equals_uninterrupted(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, num_batches: int
) -> None:
    run = make_run(place="killed")
    prepare_store(run)
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "extract_batch", killed_after(num_batches))
        exit_code = in_child(run_worker, run, worker_index=0, num_workers=2)
    assert exit_code == -signal.SIGKILL
    assert extract_all(run, num_workers=3) == extract_all(make_run(place="whole"))


def killed_after(num_batches: int) -> Callable[..., None]:
    """`Worker.extract_batch` of a process that is killed at its next batch."""
    right, done = Worker.extract_batch, []

    def extract_batch(*arguments: Any) -> None:
        if len(done) == num_batches:
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(None)
        right(*arguments)

    return extract_batch


def test_committed_units_are_never_computed_again(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    extract_all(run)

    def must_not_load(*_: Any, **__: Any) -> None:
        raise AssertionError("loaded for nothing")

    monkeypatch.setattr(extract, "load_workers_target", must_not_load)
    prepare_store(run)
    assert run_worker(run, worker_index=0, num_workers=1) == 0
    assert "all units are committed" in capsys.readouterr().out


def test_new_conversations_become_a_new_generation(make_run: MakeRun) -> None:
    run = make_run(num_conversations=10)
    extract_all(run)
    first = open_store(run.store_dir).snapshot()
    extract_all(make_run(num_conversations=24))
    second = open_store(run.store_dir).snapshot()
    assert (first.num_sequences, second.num_sequences) == (10, 24)
    assert {unit.generation for unit in prepare_store(run).units()} == {0, 1}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_drops_the_open_unit_and_exits_resumable(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    run = make_run(extract={"stop_grace_s": 0.0})
    prepare_store(run)
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "extract_batch", signalled_at_first_batch(number))
        assert run_worker(run, worker_index=0, num_workers=1) == 75
    store = open_store(run.store_dir)
    assert store.snapshot().num_shards == 0
    assert extract_all(run) == extract_all(make_run(place="whole"))


def test_a_signal_lets_the_open_unit_finish_in_time(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(extract={"stop_grace_s": 1000.0})
    prepare_store(run)
    monkeypatch.setattr(Worker, "extract_batch", signalled_at_first_batch(signal.SIGTERM))
    assert run_worker(run, worker_index=0, num_workers=1) == 75
    assert open_store(run.store_dir).snapshot().num_shards == 1


def signalled_at_first_batch(number: signal.Signals) -> Callable[..., None]:
    right, done = Worker.extract_batch, []

    def extract_batch(*arguments: Any) -> None:
        right(*arguments)
        if not done:
            os.kill(os.getpid(), number)
        done.append(None)

    return extract_batch


def test_a_unit_that_another_worker_committed_is_dropped(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    prepare_store(run)
    right, done = Worker.extract_batch, []

    def overtaken(worker: Worker, *arguments: Any) -> None:
        right(worker, *arguments)
        if not done:
            done.append(None)
            with monkeypatch.context() as patch:
                patch.setattr(Worker, "extract_batch", right)
                assert run_worker(run, worker_index=0, num_workers=1) == 0

    monkeypatch.setattr(Worker, "extract_batch", overtaken)
    assert run_worker(run, worker_index=0, num_workers=1) == 0
    assert open_store(run.store_dir).content_digest() == extract_all(make_run(place="whole"))


def last_metrics(run: ExtractRun) -> dict[str, Any]:
    path = run.run_dir / "extract" / "worker-00000.metrics.jsonl"
    lines = path.read_text().splitlines()
    assert json.loads(lines[0])["event"] == "start"
    metrics: dict[str, Any] = json.loads(lines[-1])
    return metrics


def test_metrics_count_what_is_in_the_store(make_run: MakeRun) -> None:
    run = make_run(data={"max_sequence_tokens": 50})
    extract_all(run)
    metrics, snapshot = last_metrics(run), open_store(run.store_dir).snapshot()
    assert metrics["event"] == "end"
    assert metrics["num_sequences"] == snapshot.num_sequences
    assert metrics["num_tokens"] == int(snapshot.num_tokens.sum())
    assert metrics["num_units"] == snapshot.num_shards
    assert metrics["num_truncated"] > 0
    assert metrics["num_bytes"] == metrics["num_tokens"] * (2 * 32 * 2 + 5)


def test_bad_conversations_are_skipped_and_counted(
    make_run: MakeRun, talks: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    unsupervised = {"id": "u", "token_ids": [5, 6], "loss_mask": [0, 1]}
    outside = {"id": "o", "token_ids": [5, 999], "loss_mask": [1, 1]}
    run = make_run(*talks(40), unsupervised, outside, "no json")
    extract_all(run)
    assert open_store(run.store_dir).snapshot().num_sequences == 40
    assert last_metrics(run)["skipped"] == {
        "no supervised pair of tokens": 1,
        "token id outside the vocabulary": 1,
    }
    output = capsys.readouterr()
    assert "skipped 1 x" in output.out
    assert "(id u): no supervised pair" in output.err
    assert "1 x bad JSON" in output.err


def test_the_store_says_which_settings_and_versions_filled_it(
    make_run: MakeRun, talks: Callable[..., list[dict[str, Any]]]
) -> None:
    run = make_run(*talks(3))
    for _ in range(2):  # Each worker and each later extraction notes the same.
        prepare_store(run)
    (origin,) = open_store(run.store_dir).origins()
    assert origin["settings"]["store"]["encoding"] == run.store.encoding
    assert origin["versions"]["torch"] == torch.__version__
    prepare_store(run.model_copy(update={"data": run.data.model_copy(update={"limit": 2})}))
    limits = [each["settings"]["data"]["limit"] for each in open_store(run.store_dir).origins()]
    assert sorted(limits, key=str) == [2, None]


def test_too_many_failures_show_in_the_exit_code(
    make_run: MakeRun, talks: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    unsupervised = {"id": "u", "token_ids": [5, 6], "loss_mask": [0, 1]}
    run = make_run(*talks(3), unsupervised)
    prepare_store(run)
    assert run_worker(run, worker_index=0, num_workers=1) == 1
    assert "25.0% of 4 sequences failed" in capsys.readouterr().err
    assert open_store(run.store_dir).snapshot().num_sequences == 3


def test_what_a_setting_leaves_out_is_no_failure(make_run: MakeRun) -> None:
    run = make_run(data={"max_sequence_tokens": 40, "long_conversations": "skip"})
    extract_all(run)
    metrics = last_metrics(run)
    assert metrics["num_failed"] == 0
    assert metrics["skipped"]["longer than data.max_sequence_tokens"] > 0


def test_nan_is_named_skipped_and_never_stored(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(extract={"max_failed_fraction": 0.5})
    prepare_store(run)
    right = TransformersTarget.hidden_states

    @torch.inference_mode()
    def poisoned(self: Any, token_ids: Any, **keywords: Any) -> Any:
        states = right(self, token_ids, **keywords)
        ends = np.cumsum([len(each) for each in token_ids])
        for each, end in zip(token_ids, ends, strict=True):
            if len(each) < 35:
                states["2"][end - 1, 5] = torch.nan
        return states

    monkeypatch.setattr(Worker, "prove", lambda *_: None)
    monkeypatch.setattr(TransformersTarget, "hidden_states", poisoned)
    assert run_worker(run, worker_index=0, num_workers=1) == 0
    skipped = last_metrics(run)["skipped"]
    assert list(skipped) == ["NaN or infinity in layer 2"]
    assert open_store(run.store_dir).snapshot().num_sequences == 24 - sum(skipped.values())
    assert "skipped sequence c5: NaN or infinity in layer 2" in capsys.readouterr().err


def test_units_without_a_usable_conversation_do_not_keep_the_head_away(make_run: MakeRun) -> None:
    good = [
        {"id": f"c{index}", "token_ids": [7] * 30, "loss_mask": [1] * 30} for index in range(150)
    ]
    store = prepare_store(make_run(*good))
    spoilt = {each for unit in store.units()[:9] for each in store.sequences_of(unit)}
    assert len(store.units()) > 9
    assert len(spoilt) < len(good)
    for line in good:
        line["loss_mask"] = [int(line["id"] not in spoilt)] * 30
    run = make_run(*good, extract={"max_failed_fraction": 1.0})
    assert run_worker(run, worker_index=0, num_workers=1) == 0
    stored = open_store(run.store_dir)
    assert stored.snapshot().num_sequences == len(good) - len(spoilt)
    assert stored.head_bytes("target.json")


def test_where_nothing_can_be_used_the_missing_head_is_said(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {"id": "c", "token_ids": [7] * 30, "loss_mask": [1] * 30}
    prepare_store(make_run(line))
    run = make_run({**line, "loss_mask": [0] * 30})
    assert run_worker(run, worker_index=0, num_workers=1) == 1
    assert "no head of the target is saved" in capsys.readouterr().err


def test_wrong_states_stop_before_anything_is_stored(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    prepare_store(run)
    right = TransformersTarget.hidden_states

    def off_by_one(self: Any, token_ids: Any, *, layers: Any) -> Any:
        states = right(self, token_ids, layers=["1", "3"])
        return {"0": states["1"], "2": states["3"]}

    monkeypatch.setattr(TransformersTarget, "hidden_states", off_by_one)
    with pytest.raises(ValueError, match="differ from a plain forward pass"):
        run_worker(run, worker_index=0, num_workers=1)
    assert open_store(run.store_dir).snapshot().num_shards == 0


def test_own_greedy_answers_are_marked(make_run: MakeRun, target_folder: Any) -> None:
    from stage1_extract.sequences import tokens_id
    from stage1_extract.target_identity import weights_id

    generation = {"greedy": True, "num_tokens": 3, "tokens": tokens_id([5, 6, 7])}
    answers = {"token_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
    own = generation | {"target_weights": weights_id(target_folder("llama"))}
    foreign = generation | {"target_weights": "0123"}
    run = make_run(
        {"id": "own", **answers, "generation": own},
        {"id": "foreign", **answers, "generation": foreign},
    )
    extract_all(run)
    snapshot = open_store(run.store_dir).snapshot()
    greedy = {snapshot.sequence_id(i): bool(snapshot.greedy[i]) for i in range(2)}
    assert greedy == {"own": True, "foreign": False}


@pytest.mark.parametrize(
    ("tables", "differing"),
    [
        ({"target": {"dtype": "bfloat16"}}, "compute_dtype"),
        ({"data": {"template_arguments": {"enable_thinking": False}}}, "template_arguments"),
        ({"data": {"max_sequence_tokens": 81}}, "max_sequence_tokens"),
        ({"store": {"held_out_fraction": 0.5}}, "held_out_fraction"),
    ],
)
def test_another_identity_is_refused(
    make_run: MakeRun, tables: dict[str, Any], differing: str
) -> None:
    prepare_store(make_run())
    with pytest.raises(IdentityMismatchError, match=differing):
        prepare_store(make_run(**tables))


def test_another_target_is_refused(make_run: MakeRun) -> None:
    prepare_store(make_run())
    with pytest.raises(IdentityMismatchError, match="target_weights_sha256"):
        prepare_store(make_run(kind="qwen2"))


@pytest.mark.parametrize("store", [{"target_layer_ids": (0, 3)}, {"encoding": "fp8"}])
def test_other_layers_or_encodings_are_refused(make_run: MakeRun, store: dict[str, Any]) -> None:
    prepare_store(make_run())
    with pytest.raises(StoreError, match="use another"):
        prepare_store(make_run(store=store))


def test_wrong_layers_are_refused_before_weights_load(
    make_run: MakeRun, tmp_path: Path, target_folder: Any
) -> None:
    import shutil

    folder = tmp_path / "no-weights"
    shutil.copytree(target_folder("llama"), folder)
    (folder / "model.safetensors").unlink()
    run = make_run(store={"target_layer_ids": (0, 4)}, target={"model": str(folder)})
    with pytest.raises(ValueError, match="4 out of range; the target has decoder layers 0 to 3"):
        prepare_store(run)
    assert not run.store_dir.exists()


def test_data_that_no_longer_holds_a_planned_conversation_is_refused(make_run: MakeRun) -> None:
    prepare_store(make_run())
    run = make_run(data={"limit": 5})
    prepare_store(run)
    with pytest.raises(ValueError, match=r"planned in the store but not in the data any more"):
        run_worker(run, worker_index=0, num_workers=1)


def test_data_of_which_nothing_can_be_used_is_refused_at_once(make_run: MakeRun) -> None:
    record = {"token_ids": [5, 6], "loss_mask": [0, 1]}
    with pytest.raises(ValueError, match="none of 1 conversations tried can be used; the first"):
        prepare_store(make_run(record))


def test_strict_stops_at_the_first_unusable_conversation(
    make_run: MakeRun, talks: Callable[..., Any]
) -> None:
    unsupervised = {"id": "u", "token_ids": [5, 6], "loss_mask": [0, 1]}
    run = make_run(*talks(3), unsupervised, data={"strict": True})
    with pytest.raises(ValueError, match=r"\(id u\): no supervised pair .*data.strict"):
        prepare_store(run)


def test_the_head_is_whole_and_made_once(make_run: MakeRun) -> None:
    run = make_run()
    extract_all(run)
    store = open_store(run.store_dir)
    assert json.loads(store.head_bytes("target.json"))["vocab_size"] == 288
    changed = {path: path.stat().st_mtime_ns for path in (run.store_dir / "head").rglob("*")}
    extract_all(make_run(num_conversations=30))
    assert changed == {
        path: path.stat().st_mtime_ns for path in (run.store_dir / "head").rglob("*")
    }


def test_a_full_disk_loses_the_open_shard_only(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    prepare_store(run)
    right, done = ShardWriter.append, []

    def full(shard: ShardWriter, **arguments: Any) -> None:
        done.append(None)
        if len(done) == 10:
            raise StoreWriteError("cannot write x: the disk is full; free space there")
        right(shard, **arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "append", full)
        with pytest.raises(StoreWriteError, match="the disk is full"):
            run_worker(run, worker_index=0, num_workers=1)
    assert extract_all(run) == extract_all(make_run(place="whole"))


def test_two_extractions_at_once_share_one_store(make_run: MakeRun) -> None:
    run = make_run()

    def whole_extraction() -> None:
        prepare_store(run)
        os._exit(run_worker(run, worker_index=0, num_workers=1))

    processes = [FORK.Process(target=whole_extraction) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert open_store(run.store_dir).content_digest() == extract_all(make_run(place="whole"))


def test_a_full_gpu_names_the_setting_to_lower(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    prepare_store(run)

    def full(*_: Any, **__: Any) -> None:
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(Worker, "prove", lambda *_: None)
    monkeypatch.setattr(TransformersTarget, "hidden_states", full)
    with pytest.raises(ValueError, match=r"extract\.batch_tokens = 200: .* lower it"):
        run_worker(run, worker_index=0, num_workers=1)


def test_every_worker_takes_the_same_proof(make_run: MakeRun) -> None:
    store = prepare_store(make_run())
    units = store.units()
    assert extract.proof_units(store, units[2:]) == units
    assert extract.proof_units(store, reversed(units)) == units
