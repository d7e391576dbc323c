"""Add layers to a store: only these are computed and written, for the sequences that are there.

Token ids come from the store itself; conversations are not needed. Readers see the layers when
every shard holds them. Stopped or killed, the same command goes on with the shards that lack them.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import torch
from jaxtyping import Int32
from numpy import ndarray

from stage1_extract.calibration import calibrate
from stage1_extract.config import Batching, ExtractRun
from stage1_extract.encode import (
    EncodedBatch,
    as_batch,
    channel_scales_on,
    divide,
    encode_on_device,
    encode_on_host,
)
from stage1_extract.layers import captured_layers
from stage1_extract.loss_sample import measure_sample, take_sample
from stage1_extract.parity import choose_way
from stage1_extract.preparation import is_kept_as, record_once, store_identity
from stage1_extract.signals import stop_requests
from stage1_extract.target_files import load_config, load_tokenizer
from stage1_extract.target_transformers import TransformersTarget
from stage1_extract.tensor_parallel import (
    Calls,
    calls_to_followers,
    find_group,
    follow,
    load_workers_target,
    worker_device,
)
from stage1_extract.work import unit_order
from storage.commits import layers_of
from storage.encodings import encoding_named, encoding_of_layer
from storage.errors import StoreError
from storage.order import permutation
from storage.reader import Snapshot, open_store
from storage.schema import LM_HEAD_INPUT, LayerRecord, UnitId
from storage.writer import LayersWriter, WritableStore, create_store

_PROOF_SEQUENCES = 3
EXIT_DONE, EXIT_STOPPED_EARLY = 0, 75


def prepare_layers(run: ExtractRun, layers: Sequence[str]) -> list[UnitId]:
    """Announces layers that the store does not hold yet; gives the shards that lack any.

    Their encoding is `store.encoding` of the run, calibrated on stored sequences where it needs
    that. Idempotent.

    Args:
        run: The run whose store is to grow.
        layers: Names of decoder layers ("9"), or "lm_head_input".

    Raises:
        StoreError: There is no store, or its identity is not the run's.
        ValueError: The target has no such layer.
    """
    open_store(run.store_dir)
    config = load_config(run.target)
    names = _checked(layers, num_target_layers=config.num_hidden_layers)
    identity = store_identity(run, config, load_tokenizer(run.target))
    store = create_store(run.store_dir, identity)
    known = {**store.pending_layers, **store.layers}
    new = [name for name in names if name not in known]
    added = {name: encoding_of_layer(name, run.store.encoding) for name in new}
    if new:
        _say_if_mixed({name: record.encoding for name, record in known.items()} | added)
    scales: Mapping[str, tuple[float, ...]] = {}
    if new and encoding_named(run.store.encoding).calibrated:
        snapshot = open_store(run.store_dir).snapshot()
        scales = calibrate(run, _stored_sequences(snapshot), layers=new)
    for name, encoding in added.items():
        record = LayerRecord(
            name=name,
            encoding=encoding,
            hidden_size=config.hidden_size,
            channel_scales=scales.get(name),
            packing=run.store.packing,
        )
        record_once(record, record_as=store.pend_layers, recorded=lambda: store.pending_layers)
    return store.units_lacking(names)


def _say_if_mixed(kept: Mapping[str, str]) -> None:
    """Says that no run's encoding would fit all layers any more, given that of each by name."""
    for encoding in set(kept.values()):
        if all(is_kept_as(each, name, encoding) for name, each in kept.items()):
            return
    layers = ", ".join(f"{name} as {encoding}" for name, encoding in kept.items())
    print(
        f"store.encoding: the store will keep layers {layers}; such a mixture can be trained on,"
        " but takes no new conversations",
        file=sys.stderr,
        flush=True,
    )


def add_layers(
    run: ExtractRun, layers: Sequence[str], *, worker_index: int = 0, num_workers: int = 1
) -> int:
    """Computes the layers for all shards that lack them, then shows them to readers.

    Start it after `prepare_layers`. Any number of workers share the work as in `run_worker`; the
    last one to finish makes the layers visible. With `extract.gpus_per_worker` it is called in each
    process of the worker.

    Returns:
        0 when every shard holds the layers, 75 when stopped early.

    Raises:
        StoreError: A state is not finite, or the store cannot be written.
    """
    torch.set_num_threads(run.extract.torch_threads)
    group = find_group(os.environ, wanted_size=run.extract.gpus_per_worker)
    if group.rank > 0:
        follow(group, run.target, device=worker_device(worker_index, group))
        return EXIT_DONE
    with calls_to_followers(group) as calls:
        return lead_adding(run, layers, calls, worker_index=worker_index, num_workers=num_workers)


def lead_adding(
    run: ExtractRun,
    layers: Sequence[str],
    calls: Calls | None,
    *,
    worker_index: int,
    num_workers: int,
) -> int:
    """A worker's part, see `add_layers`, in its first process or its only one."""
    snapshot = open_store(run.store_dir).snapshot()
    store = create_store(run.store_dir, snapshot.store.identity)
    lacking = store.units_lacking(layers)
    order = unit_order(lacking, worker_index=worker_index, num_workers=num_workers)
    with stop_requests() as stop:
        if order:
            target = load_workers_target(run.target, calls, worker_index=worker_index)
            adder = _Adder(run, store, snapshot, layers, target)
        for done, unit in enumerate(order):
            if stop:
                return EXIT_STOPPED_EARLY
            adder.add_to(unit)
            print(f"{done + 1} of {len(order)} shards hold the added layers", flush=True)
    store.publish_layers(layers)
    return EXIT_DONE


class _Adder:
    """The target and a store whose shards it adds layers to."""

    def __init__(
        self,
        run: ExtractRun,
        store: WritableStore,
        snapshot: Snapshot,
        layers: Sequence[str],
        target: TransformersTarget,
    ):
        self.store, self.snapshot, self.target = store, snapshot, target
        self.records = {**store.pending_layers, **store.layers}
        self.wanted = list(layers)
        self.batch_tokens = max(run.extract.batch_tokens, store.identity.max_sequence_tokens)
        choose_way(
            target,
            list(islice(_stored_sequences(snapshot), _PROOF_SEQUENCES)),
            layers=self.wanted,
            settings=run.extract,
            batch_tokens=self.batch_tokens,
        )

    def add_to(self, unit: UnitId) -> None:
        """Computes and commits what one shard lacks."""
        present = layers_of(self.store.files, unit)
        records = {n: self.records[n] for n in self.wanted if n not in present}
        if not records:
            return
        with self.store.start_layers(unit, records) as writer:
            ids = writer.sequence_ids
            tokens = [self.snapshot.read_tokens(self.snapshot.index_of(each))[0] for each in ids]
            for part in consecutive_batches(
                [len(each) for each in tokens],
                batching=self.target.batching,
                batch_tokens=self.batch_tokens,
            ):
                self._append(writer, records, ids[part], tokens[part])
            writer.seal()

    def _append(
        self,
        writer: LayersWriter,
        records: Mapping[str, LayerRecord],
        sequence_ids: Sequence[str],
        token_ids: Sequence[Int32[ndarray, "_"]],
    ) -> None:
        states = self.target.hidden_states(token_ids, layers=list(records))
        batch = self._encoded(states, records)
        if writer.num_tokens == 0:
            writer.count_losses(measure_sample(take_sample(states), batch, records))
        start = 0
        for sequence_id, tokens in zip(sequence_ids, token_ids, strict=True):
            rows = slice(start, start + len(tokens))
            start = rows.stop
            broken_layer = batch.broken_layer(rows)
            if broken_layer is not None:
                raise StoreError(
                    f"sequence {sequence_id!r} has NaN or infinity in layer {broken_layer}, which"
                    " therefore cannot be added; choose other layers, or extract anew"
                )
            writer.append(sequence_id=sequence_id, states=batch.of(rows))

    def _encoded(
        self, states: Mapping[str, torch.Tensor], records: Mapping[str, LayerRecord]
    ) -> EncodedBatch:
        first = next(iter(states.values()))
        if not first.is_cuda:
            return encode_on_host(states, records)
        scales = channel_scales_on(first.device, records, list(records))
        buffers = encode_on_device(states, records, scales)
        return as_batch(divide(buffers.whole.cpu(), records, len(first)), records)


def consecutive_batches(
    lengths: Sequence[int], *, batching: Batching, batch_tokens: int
) -> Iterator[slice]:
    """Parts sequences into runs that share a forward pass, in their order.

    Args:
        lengths: Tokens of each sequence.
        batching: How sequences share a pass: `packed` counts tokens, `padded` the rectangle.
        batch_tokens: Token budget; a longer sequence is passed alone.
    """
    start = 0
    for stop in range(1, len(lengths) + 1):
        taken = lengths[start : stop + 1]
        size = sum(taken) if batching == "packed" else max(taken) * len(taken)
        is_full = stop == len(lengths) or size > batch_tokens or batching == "single"
        if is_full:
            yield slice(start, stop)
            start = stop


def _checked(layers: Sequence[str], *, num_target_layers: int) -> list[str]:
    wrong = [name for name in layers if not name.isdigit() and name != LM_HEAD_INPUT]
    if wrong or not layers:
        raise ValueError(
            f"--layers {','.join(layers)}: expected decoder layers such as 3,5, or {LM_HEAD_INPUT}"
        )
    ids = [int(name) for name in layers if name.isdigit()]
    if not ids:
        return [LM_HEAD_INPUT]
    return captured_layers(
        ids,
        num_layers=len(ids),
        lm_head_input=LM_HEAD_INPUT in layers,
        num_target_layers=num_target_layers,
    )


def _stored_sequences(snapshot: Snapshot) -> Iterator[Int32[ndarray, "_"]]:
    """Token ids of the store's sequences, in a random order that is always the same."""
    for index in permutation(snapshot.num_sequences, seed=0, epoch=0, stream=0):
        yield snapshot.read_tokens(int(index))[0]
