"""The pipeline: what it writes is what writing at once writes, and its errors are heard."""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stage1_extract import extract
from stage1_extract.config import ExtractRun
from stage1_extract.encode import EncodedBatch, encode_on_host
from stage1_extract.extract import prepare_store, run_worker
from stage1_extract.loss_sample import take_sample
from stage1_extract.open_shard import OpenShard
from stage1_extract.pipeline import Pipeline, ShardInProgress
from stage1_extract.sequences import TokenSequence
from stage1_extract.worker import UnitContent, Worker
from stage1_extract.worker_metrics import Part, WorkerMetrics
from storage.errors import StoreWriteError
from storage.reader import open_store
from storage.schema import LayerRecord, StoreIdentity, UnitId
from storage.writer import ShardWriter, WritableStore, create_store

LAYERS = ("1", "4")
HIDDEN_SIZE = 16
NUM_SEQUENCES = 12


class FakeArrival:
    """A batch that was encoded at once, in one of the ring's buffers."""

    def __init__(self, batch: EncodedBatch, sample: Any, buffers: threading.Semaphore):
        self._batch, self._sample, self._buffers = batch, sample, buffers
        self.is_released = False

    def wait(self) -> EncodedBatch:
        return self._batch

    def sample(self) -> Any:
        return self._sample

    def seconds(self) -> Mapping[Part, float]:
        return {"forward": 1.0, "copy": 0.5}

    def release(self) -> None:
        assert not self.is_released
        self.is_released = True
        self._buffers.release()


class FakeTransfer:
    """Encodes on the host; has as few buffers as the real one may have."""

    def __init__(self, layers: Mapping[str, LayerRecord], *, num_buffers: int = 2):
        self.buffers = threading.Semaphore(num_buffers)
        self.arrivals: list[FakeArrival] = []
        self._layers = layers

    def begin(self) -> None:
        pass

    def start(self, states: Mapping[str, torch.Tensor], *, with_sample: bool) -> FakeArrival:
        assert self.buffers.acquire(timeout=60), "no buffer came back"
        sample = take_sample(states) if with_sample else None
        arrival = FakeArrival(encode_on_host(states, self._layers), sample, self.buffers)
        self.arrivals.append(arrival)
        return arrival


def sequence(number: int) -> TokenSequence:
    num_tokens = 5 + number
    return TokenSequence(
        id=f"s{number}",
        token_ids=np.arange(num_tokens, dtype=np.int32),
        loss_mask=np.ones(num_tokens, dtype=np.bool_),
        greedy=False,
        is_truncated=False,
    )


def states(sequences: list[TokenSequence]) -> dict[str, torch.Tensor]:
    """States that tell layer, sequence and position apart."""
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in LAYERS}
    for each in sequences:
        for name in LAYERS:
            generator = torch.Generator().manual_seed(int(name) * 1000 + each.num_tokens)
            parts[name].append(torch.randn(each.num_tokens, HIDDEN_SIZE, generator=generator))
    return {name: torch.cat(of_layer) for name, of_layer in parts.items()}


@pytest.fixture
def make_store(tmp_path: Path) -> Callable[[str], WritableStore]:
    """Gives an empty store of three units."""

    def make(name: str) -> WritableStore:
        hashes = ("target_weights_sha256", "tokenizer_sha256", "chat_template_sha256")
        identity: dict[str, Any] = dict.fromkeys(hashes, "")
        store = create_store(
            tmp_path / name,
            StoreIdentity(
                target_name="tiny",
                target_revision=None,
                template_arguments={},
                mask_rule_version=1,
                max_sequence_tokens=64,
                long_conversations="truncate",
                compute_dtype="float32",
                attention_backend="default",
                hidden_size=HIDDEN_SIZE,
                num_target_layers=6,
                vocab_size=64,
                held_out_fraction=0.0,
                **identity,
            ),
        )
        store.add_layers(
            LayerRecord(name=name, encoding="fp8", hidden_size=HIDDEN_SIZE) for name in LAYERS
        )
        store.plan_generation([f"s{number}" for number in range(NUM_SEQUENCES)], num_units=3)
        return store

    return make


def metrics_in(tmp_path: Path) -> WorkerMetrics:
    return WorkerMetrics(tmp_path / "metrics.jsonl", worker_index=0, num_workers=1)


def fill(shard: ShardInProgress, ids: list[str]) -> None:
    """Adds sequences, two a batch."""
    sequences = [sequence(int(name[1:])) for name in ids]
    for start in range(0, len(sequences), 2):
        batch = sequences[start : start + 2]
        with shard.forward_pass():
            made = states(batch)
        shard.add(batch, made)
    shard.finish()


@contextmanager
def fake_pipeline_of(worker: Worker) -> Iterator[Pipeline]:
    """A pipeline of a worker without a GPU."""
    with Pipeline(FakeTransfer(worker.layers), worker.metrics, num_threads=2) as pipeline:
        yield pipeline
        pipeline.drain()


def test_a_worker_that_writes_and_reads_beside_stores_the_same(
    make_run: Callable[..., ExtractRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shards are written in threads, the next unit's conversations are read in another."""
    readers: list[str] = []
    read_unit = Worker.read_unit

    def noted(worker: Worker, unit: UnitId) -> UnitContent:
        readers.append(threading.current_thread().name)
        return read_unit(worker, unit)

    plain, piped = make_run(place="plain"), make_run(place="piped")
    for run in (plain, piped):
        prepare_store(run)
    assert run_worker(plain, worker_index=0, num_workers=1) == 0
    monkeypatch.setattr(extract, "pipeline_of", fake_pipeline_of)
    monkeypatch.setattr(Worker, "read_unit", noted)
    assert run_worker(piped, worker_index=0, num_workers=1) == 0
    proof, *others = readers
    assert not proof.startswith("ahead")
    assert len(others) > 3
    assert all(name.startswith("ahead") for name in others)
    digests = [open_store(run.store_dir).content_digest() for run in (plain, piped)]
    assert digests[0] == digests[1]


def test_after_a_stop_no_other_unit_is_read(
    make_run: Callable[..., ExtractRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grace time is for the open one."""
    num_read = 0
    run = make_run()
    assert len(prepare_store(run).units()) > 3

    def read_unit(worker: Worker, unit: UnitId) -> UnitContent:
        nonlocal num_read
        num_read += 1
        return UnitContent()

    monkeypatch.setattr(extract, "pipeline_of", fake_pipeline_of)
    monkeypatch.setattr(Worker, "prove", lambda *_: None)
    monkeypatch.setattr(Worker, "read_unit", read_unit)
    monkeypatch.setattr(Worker, "extract_unit", lambda worker, *_: worker.stop.note())
    assert run_worker(run, worker_index=0, num_workers=1) == 75
    assert num_read == 2  # The one that was stopped, and the one read meanwhile.


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_store_is_that_of_writing_at_once(
    tmp_path: Path, make_store: Callable[[str], WritableStore], num_threads: int
) -> None:
    plain, piped = make_store("plain"), make_store("piped")
    metrics = [metrics_in(tmp_path / name) for name in ("plain", "piped")]
    for unit in plain.units():
        with OpenShard(plain.start_shard(unit), plain.layers, metrics[0]) as shard:
            fill(shard, plain.sequences_of(unit))
    transfer = FakeTransfer(piped.layers)
    with Pipeline(transfer, metrics[1], num_threads=num_threads) as pipeline:
        for unit in piped.units():
            shard = OpenShard(piped.start_shard(unit), piped.layers, metrics[1])
            with pipeline.open(shard) as opened:
                fill(opened, piped.sequences_of(unit))
        pipeline.drain()
    assert all(arrival.is_released for arrival in transfer.arrivals)
    digests = [open_store(tmp_path / name).content_digest() for name in ("plain", "piped")]
    assert digests[0] == digests[1]
    assert metrics[0].counts == metrics[1].counts
    assert metrics[1].counts.num_units == 3


def test_an_unfinished_shard_is_dropped_with_its_counts(
    tmp_path: Path, make_store: Callable[[str], WritableStore]
) -> None:
    store, metrics = make_store("store"), metrics_in(tmp_path)
    unit = store.units()[0]
    with Pipeline(FakeTransfer(store.layers), metrics, num_threads=2) as pipeline:
        shard = OpenShard(store.start_shard(unit), store.layers, metrics)
        with pipeline.open(shard) as opened:
            batch = [sequence(int(store.sequences_of(unit)[0][1:]))]
            opened.add(batch, states(batch))
        pipeline.drain()
    assert not store.is_committed(unit)
    assert metrics.counts.num_tokens == 0


@pytest.mark.parametrize("method", ["append", "seal"])
def test_the_first_error_of_a_thread_stops_the_worker(
    tmp_path: Path,
    make_store: Callable[[str], WritableStore],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    store, metrics = make_store("store"), metrics_in(tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise StoreWriteError("the disk is full")

    monkeypatch.setattr(ShardWriter, method, full)
    transfer = FakeTransfer(store.layers)

    def extract() -> None:
        with Pipeline(transfer, metrics, num_threads=1) as pipeline:
            for unit in store.units():
                shard = OpenShard(store.start_shard(unit), store.layers, metrics)
                with pipeline.open(shard) as opened:
                    fill(opened, store.sequences_of(unit))
            pipeline.drain()

    with pytest.raises(StoreWriteError, match="the disk is full"):
        extract()
    assert all(arrival.is_released for arrival in transfer.arrivals)
    assert store.committed() == set()
    assert metrics.counts.num_tokens == 0
    assert list((tmp_path / "store").rglob("*.partial")) == []


def test_times_of_the_device_are_added_up(
    tmp_path: Path, make_store: Callable[[str], WritableStore]
) -> None:
    store, metrics = make_store("store"), metrics_in(tmp_path)
    unit = store.units()[0]
    with Pipeline(FakeTransfer(store.layers), metrics, num_threads=1) as pipeline:
        with pipeline.open(OpenShard(store.start_shard(unit), store.layers, metrics)) as opened:
            fill(opened, store.sequences_of(unit))
        pipeline.drain()
    assert metrics.fraction("forward") == pytest.approx(2 * metrics.fraction("copy"), rel=0.2)
    assert metrics.fraction("write") > 0


def test_the_interpreter_is_left_as_it_was(
    tmp_path: Path, make_store: Callable[[str], WritableStore]
) -> None:
    before = sys.getswitchinterval()
    store = make_store("store")
    with Pipeline(FakeTransfer(store.layers), metrics_in(tmp_path), num_threads=1):
        assert sys.getswitchinterval() < before
    assert sys.getswitchinterval() == before


def test_a_shard_that_fails_while_the_next_is_opened_is_not_forgotten(
    tmp_path: Path, make_store: Callable[[str], WritableStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may fail right behind the look at errors, before the look at what is done."""
    store, metrics = make_store("store"), metrics_in(tmp_path)
    first, second = store.units()[:2]

    def full(*_: Any, **__: Any) -> None:
        raise StoreWriteError("the disk is full")

    with Pipeline(FakeTransfer(store.layers), metrics, num_threads=1) as pipeline:
        with pipeline.open(OpenShard(store.start_shard(first), store.layers, metrics)) as opened:
            monkeypatch.setattr(ShardWriter, "seal", full)
            opened.finish()
            with pytest.raises(StoreWriteError):
                opened.result()
        monkeypatch.undo()
        monkeypatch.setattr(pipeline, "check", lambda: None)
        pipeline.open(OpenShard(store.start_shard(second), store.layers, metrics)).finish()
        with pytest.raises(StoreWriteError, match="the disk is full"):
            pipeline.drain()


def test_buffers_come_back_though_the_device_fails(
    tmp_path: Path, make_store: Callable[[str], WritableStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the main thread would wait for one for ever, and nobody would hear of the error."""
    store, metrics = make_store("store"), metrics_in(tmp_path)
    go_on = threading.Event()

    def broken(_: FakeArrival) -> EncodedBatch:
        go_on.wait()
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(FakeArrival, "wait", broken)
    transfer = FakeTransfer(store.layers, num_buffers=3)
    with Pipeline(transfer, metrics, num_threads=1) as pipeline:
        shard = OpenShard(store.start_shard(store.units()[0]), store.layers, metrics)
        with pipeline.open(shard) as opened:
            for number in range(3):
                opened.add([sequence(number)], states([sequence(number)]))
            go_on.set()
        with pytest.raises(RuntimeError, match="the device is gone"):
            pipeline.drain()
    assert all(arrival.is_released for arrival in transfer.arrivals)
