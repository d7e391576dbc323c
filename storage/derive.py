"""Make a store in another encoding from a store, without the target."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from storage.encodings import (
    EncodedStates,
    calibrate_channels,
    decode,
    encode,
    encoding_named,
    encoding_of_layer,
)
from storage.errors import StoreError
from storage.order import epoch_order
from storage.places import files_at, refuse_same_place
from storage.reader import Snapshot, open_store
from storage.schema import LayerRecord, UnitId
from storage.shard_writer import ShardWriter
from storage.writer import WritableStore, create_store

CALIBRATION_TOKENS = 16_384
"""Tokens from which channel scales are taken."""


def derive_store(
    source_dir: str | Path,
    target_dir: str | Path,
    *,
    encoding: str | None = None,
    like: str | Path | None = None,
    packing: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> WritableStore:
    """Writes all sequences of a store to another one, every layer in another encoding.

    Units are those of the source, so several processes may work at once, each skipping what is
    committed, and an interrupted run goes on where it stopped. Splits stay the same, for they
    depend on ids only. Errors of the source's encoding stay in.

    Args:
        source_dir: the store to read; sequences that it skipped are skipped here, too.
        target_dir: the store to make or complete.
        encoding: a name in ENCODINGS (see `encoding_of_layer` for `lm_head_input`); channel scales
            are taken from the source's states.
        like: a store whose layer records, scales included, are taken instead: what is derived can
            be joined with it.
        packing: with `encoding`: how chunks are packed without loss; None leaves them.
        progress: called with (units done, units in all) after each.
    """
    if (encoding is None) == (like is None):
        raise ValueError("give either an encoding or a store whose encodings are taken")
    refuse_same_place(files_at(source_dir), files_at(target_dir))
    source = open_store(source_dir)
    snapshot = source.snapshot()
    target = create_store(target_dir, source.identity)
    if like is not None:
        target.add_layers(_records_like(like, snapshot))
    elif encoding is not None:
        _add_layers(snapshot, target, encoding, packing)
    for name in source.head_names():
        target.put_head_file(name, source.head_bytes(name))
    for origin in source.origins():
        target.note_origin(origin)
    recoder = _Recoder(snapshot, target)
    ids = [snapshot.sequence_id(index) for index in range(snapshot.num_sequences)]
    target.plan_generation([*ids, *recoder.skipped], num_units=max(1, snapshot.num_shards))
    units = target.units()
    for done, unit in enumerate(units, start=1):
        if not target.is_committed(unit):
            recoder.fill(unit)
        if progress is not None:
            progress(done, len(units))
    return target


class _Recoder:
    """Turns sequences of one store into what another one takes."""

    def __init__(self, snapshot: Snapshot, target: WritableStore):
        self.snapshot, self.target = snapshot, target
        self.old, self.new = snapshot.store.layers, target.layers
        self.skipped = snapshot.skipped()

    def fill(self, unit: UnitId) -> None:
        """Derives and seals one unit."""
        with self.target.start_shard(unit) as shard:
            for sequence_id in self.target.sequences_of(unit):
                if sequence_id in self.skipped:
                    shard.skip(sequence_id=sequence_id, reason=self.skipped[sequence_id])
                else:
                    self.append(shard, sequence_id)
            shard.seal()

    def append(self, shard: ShardWriter, sequence_id: str) -> None:
        """Derives one sequence."""
        index = self.snapshot.index_of(sequence_id)
        sequence = self.snapshot.read(index, layers=list(self.new))
        shard.append(
            sequence_id=sequence_id,
            token_ids=sequence.token_ids,
            loss_mask=sequence.loss_mask,
            greedy=sequence.greedy,
            states={name: self.recode(name, sequence.states[name]) for name in self.new},
        )

    def recode(self, name: str, encoded: EncodedStates) -> EncodedStates:
        """The same states in the other encoding."""
        record = self.new[name]
        states = _decoded(self.old[name], encoded)
        return encode(record.encoding, states, channel_scales=record.channel_scale_array)


def _decoded(record: LayerRecord, encoded: EncodedStates) -> Float32[np.ndarray, "tokens hidden"]:
    return decode(record.encoding, encoded, channel_scales=record.channel_scale_array)


def _add_layers(
    snapshot: Snapshot, target: WritableStore, encoding: str, packing: str | None
) -> None:
    recorded = target.layers
    if recorded.keys() == snapshot.store.layers.keys():
        is_same = (
            record.encoding == encoding_of_layer(name, encoding) and record.packing == packing
            for name, record in recorded.items()
        )
        if all(is_same):
            return
    target.add_layers(_layer_records(snapshot, encoding, packing))


def _records_like(like: str | Path, snapshot: Snapshot) -> list[LayerRecord]:
    """The records of another store, of the layers that both have."""
    records = open_store(like).layers
    shared = [records[name] for name in snapshot.store.layers if name in records]
    if not shared:
        raise StoreError(f"{like} and {snapshot.store.files} have no layer in common")
    return shared


def _layer_records(snapshot: Snapshot, encoding: str, packing: str | None) -> list[LayerRecord]:
    """The source's layers in another encoding, calibrated where it needs that."""
    records = snapshot.store.layers
    scales: dict[str, tuple[float, ...] | None] = dict.fromkeys(records)
    if encoding_named(encoding).calibrated:
        scales |= _calibrate(snapshot)
    return [
        dataclasses.replace(
            record,
            encoding=encoding_of_layer(name, encoding),
            channel_scales=scales[name],
            packing=packing,
        )
        for name, record in records.items()
    ]


def _calibrate(snapshot: Snapshot) -> dict[str, tuple[float, ...] | None]:
    """Channel scales by layer from a fixed choice of sequences of the training split."""
    records = snapshot.store.layers
    samples: dict[str, list[np.ndarray]] = {name: [] for name in records}
    num_tokens = 0
    for index in epoch_order(snapshot, seed=0, epoch=0):
        sequence = snapshot.read(int(index), layers=list(records))
        for name, record in records.items():
            samples[name].append(_decoded(record, sequence.states[name]))
        num_tokens += len(sequence.token_ids)
        if num_tokens >= CALIBRATION_TOKENS:
            break
    if num_tokens == 0:
        raise ValueError(f"{snapshot.store.files} holds no training sequence to calibrate with")
    return {
        name: tuple(calibrate_channels(np.concatenate(parts)).tolist())
        for name, parts in samples.items()
    }
