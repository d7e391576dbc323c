"""Read any sequence, any token range, any layers of a store; never needs write access."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from crc32c import crc32c
from jaxtyping import Bool, Float32, Int32, Int64

from storage import layout
from storage.arrays import first_damaged_block
from storage.catalog import Catalog, catalog_of
from storage.commits import (
    TOKEN_BYTES,
    ArrayRecord,
    CommitRecord,
    committed_units,
    read_commit,
    tombstoned_units,
)
from storage.encodings import EncodedStates, decode
from storage.errors import DamagedShardError, StoreError
from storage.files import Files, LocalFiles, RangeReader
from storage.records import read_record
from storage.schema import CHUNK_TOKENS, LayerRecord, StoreIdentity, held_out_mask
from storage.writer import read_identity, read_layers

OPEN_SHARDS = 64
"""Shards whose files stay open at once."""


def open_store(store_dir: str | Path) -> "Store":
    """Opens a store for reading.

    Raises:
        StoreNotFoundError: there is no store at this place.
    """
    files = LocalFiles(store_dir)
    return Store(files, read_identity(files))


@dataclass
class SequenceStates:
    """A sequence, or a token range of it, as it was written."""

    sequence_id: str
    token_ids: Int32[np.ndarray, " tokens"]
    loss_mask: Bool[np.ndarray, " tokens"]
    greedy: bool
    states: dict[str, EncodedStates]


class Store:
    """A store open for reading."""

    def __init__(self, files: Files, identity: StoreIdentity):
        self.files = files
        self.identity = identity

    @property
    def layers(self) -> dict[str, LayerRecord]:
        """The stored layers by name, decoder layers in order, as they are recorded now."""
        return read_layers(self.files)

    def head_bytes(self, name: str) -> bytes:
        """A file of head/, its checksum verified."""
        record = read_record(self.files, layout.head_record(name))
        data = self.files.read(layout.head_file(name))
        if f"{crc32c(data):08x}" != record["crc32c"]:
            raise DamagedShardError(f"{self.files}/{layout.head_file(name)} is damaged")
        return data

    def head_path(self, name: str) -> Path:
        """Where a file or folder of head/ lies."""
        assert isinstance(self.files, LocalFiles)
        return self.files.root / layout.head_file(name)

    def snapshot(self) -> "Snapshot":
        """The sequences committed now; later commits do not change it."""
        units = committed_units(self.files) - tombstoned_units(self.files)
        catalog = catalog_of([read_commit(self.files, unit) for unit in sorted(units)])
        return Snapshot(self, catalog)

    def sequence(self, sequence_id: str) -> "StoredSequence":
        """One sequence by its id, for looking around."""
        snapshot = self.snapshot()
        return StoredSequence(snapshot, snapshot.index_of(sequence_id))

    def content_digest(self) -> str:
        """SHA-256 over ids, tokens, masks and encoded states of all sequences, sorted by id.

        Equal for equal data, whatever workers, attempts, shards or generations made it.
        """
        snapshot = self.snapshot()
        digest = hashlib.sha256()
        ids = [snapshot.sequence_id(index) for index in range(snapshot.num_sequences)]
        for index in np.argsort(np.array(ids, dtype=object), kind="stable"):
            _digest_sequence(digest, snapshot.read(int(index), layers=list(self.layers)))
        return digest.hexdigest()


def _digest_sequence(digest: "hashlib._Hash", sequence: SequenceStates) -> None:
    parts = [sequence.token_ids, sequence.loss_mask, np.array(sequence.greedy)]
    for name, states in sequence.states.items():
        parts += [np.frombuffer(name.encode(), dtype=np.uint8), states.data]
        parts += [] if states.scales is None else [states.scales]
    digest.update(f"{sequence.sequence_id}\n{len(sequence.token_ids)}\n".encode())
    for part in parts:
        digest.update(np.ascontiguousarray(part).data)


@dataclass(frozen=True)
class StoredSequence:
    """One sequence of a store, for notebooks."""

    snapshot: "Snapshot"
    index: int

    def hidden_states(
        self, *, layers: Sequence[str], tokens: slice = slice(None)
    ) -> Float32[np.ndarray, "tokens layers hidden"]:
        """Decoded states, float32 [tokens, layers, hidden]."""
        records = self.snapshot.store.layers
        read = self.snapshot.read(self.index, layers=layers, tokens=tokens)
        decoded = [decode(records[name].encoding, read.states[name]) for name in layers]
        return np.stack(decoded, axis=1)


class Snapshot:
    """The sequences committed at one moment; immutable, usable from several threads."""

    def __init__(self, store: Store, catalog: Catalog):
        self.store = store
        self._catalog = catalog
        self._shards = _OpenShards(store.files)
        shards = np.arange(len(catalog.units), dtype=np.int64)
        self.shard_index: Int64[np.ndarray, " sequences"] = np.repeat(
            shards, catalog.sequences_per_shard
        )
        self.num_tokens: Int64[np.ndarray, " sequences"] = catalog.num_tokens.astype(np.int64)
        self.num_supervised = catalog.num_supervised.astype(np.int64)
        self.greedy: Bool[np.ndarray, " sequences"] = catalog.greedy
        self.held_out = held_out_mask(catalog.id_hashes, store.identity.held_out_fraction)
        self._first_sequence = np.cumsum(catalog.sequences_per_shard)
        self._first_sequence -= catalog.sequences_per_shard
        self._id_ends = np.cumsum(catalog.id_bytes, dtype=np.int64)

    @cached_property
    def id(self) -> str:
        """Name of this set of shards; equal for equal sets."""
        pairs = zip(self._catalog.units, self._catalog.attempts, strict=True)
        text = "".join(f"{unit}.{attempt}\n" for unit, attempt in pairs)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def num_shards(self) -> int:
        """Committed shards."""
        return len(self._catalog.units)

    @property
    def num_sequences(self) -> int:
        """Committed sequences, held-out ones included, skipped ones not."""
        return len(self.num_tokens)

    def sequence_id(self, index: int) -> str:
        """The id of a sequence."""
        end = int(self._id_ends[index])
        start = end - int(self._catalog.id_bytes[index])
        return self._catalog.id_text[start:end].decode()

    def index_of(self, sequence_id: str) -> int:
        """The index of a sequence; StoreError if the snapshot does not hold it."""
        if sequence_id not in self._index_of:
            raise StoreError(f"{self.store.files} holds no committed sequence {sequence_id!r}")
        return self._index_of[sequence_id]

    @cached_property
    def _index_of(self) -> dict[str, int]:
        return {self.sequence_id(index): index for index in range(self.num_sequences)}

    def read_tokens(
        self, index: int
    ) -> tuple[Int32[np.ndarray, " tokens"], Bool[np.ndarray, " tokens"]]:
        """Token ids and loss mask of a sequence; no states are touched."""
        shard, place = self._locate(index)
        return shard.read_tokens(place)

    def read(
        self, index: int, *, layers: Sequence[str], tokens: slice = slice(None)
    ) -> SequenceStates:
        """A sequence with the states of some layers, every byte verified.

        Args:
            index: of the sequence in this snapshot.
            layers: names of stored layers, any subset.
            tokens: positions to read, step 1.
        """
        shard, place = self._locate(index)
        start, stop, step = tokens.indices(int(self.num_tokens[index]))
        if step != 1:
            raise ValueError(f"token ranges have step 1, got {step}")
        token_ids, loss_mask = shard.read_tokens(place)
        return SequenceStates(
            sequence_id=self.sequence_id(index),
            token_ids=token_ids[start:stop],
            loss_mask=loss_mask[start:stop],
            greedy=bool(self.greedy[index]),
            states=shard.read_states(place, layers, start, max(start, stop)),
        )

    def _locate(self, index: int) -> tuple["ShardReader", int]:
        shard = int(self.shard_index[index])
        reader = self._shards.get(self._catalog, shard)
        return reader, index - int(self._first_sequence[shard])


class _OpenShards:
    """The shards used last, kept open; oldest closed first."""

    def __init__(self, files: Files):
        self._files = files
        self._lock = threading.Lock()
        self._open: OrderedDict[int, ShardReader] = OrderedDict()

    def get(self, catalog: Catalog, shard: int) -> "ShardReader":
        with self._lock:
            reader = self._open.get(shard)
            if reader is None:
                unit = catalog.units[shard]
                reader = ShardReader(self._files, read_commit(self._files, unit))
                self._open[shard] = reader
            self._open.move_to_end(shard)
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
            return reader


class ShardReader:
    """One committed shard, its files opened when first read."""

    def __init__(self, files: Files, commit: CommitRecord):
        self._files = files
        self.commit = commit
        lengths = np.array(commit.num_tokens, dtype=np.int64)
        self._first_token = np.cumsum(lengths) - lengths
        blocks = -(-lengths // CHUNK_TOKENS)
        self._first_block = np.cumsum(blocks) - blocks
        self._readers: dict[str, RangeReader] = {}

    def read_tokens(
        self, place: int
    ) -> tuple[Int32[np.ndarray, " tokens"], Bool[np.ndarray, " tokens"]]:
        """Token ids and loss mask of the sequence at a place of this shard."""
        count = self.commit.num_tokens[place]
        packed = bytearray(count * TOKEN_BYTES)
        path = layout.tokens(self.commit.attempt_dir)
        self._fill(path, int(self._first_token[place]) * TOKEN_BYTES, packed, "tokens", place)
        if crc32c(packed) != self.commit.tokens_checksums[place]:
            raise self._damaged("tokens", place, "its checksum does not match")
        token_ids = np.frombuffer(packed, dtype="<i4", count=count)
        return token_ids, np.frombuffer(packed, dtype=np.bool_, offset=4 * count)

    def read_states(
        self, place: int, layers: Sequence[str], start: int, stop: int
    ) -> dict[str, EncodedStates]:
        """Encoded states of positions start..stop-1 by layer."""
        missing = [name for name in layers if name not in self.commit.layers]
        if missing:
            raise StoreError(
                f"shard {self.commit.unit} of {self._files} lacks layers {missing}; "
                f"it has {list(self.commit.layers)}"
            )
        scales = None
        if self.commit.scales is not None and set(layers) & set(self.commit.scale_columns):
            path = layout.scales(self.commit.attempt_dir)
            scales = self._read_array(path, self.commit.scales, "scales", place, start, stop)
        states = {}
        for name in layers:
            path = layout.array(self.commit.attempt_dir, name)
            data = self._read_array(path, self.commit.layers[name], name, place, start, stop)
            states[name] = EncodedStates(data=data, scales=self._column(scales, name))
        return states

    def _column(
        self, scales: Float32[np.ndarray, "tokens layers"] | None, name: str
    ) -> Float32[np.ndarray, " tokens"] | None:
        if scales is None or name not in self.commit.scale_columns:
            return None
        return np.ascontiguousarray(scales[:, self.commit.scale_columns.index(name)])

    def _read_array(
        self, path: str, array: ArrayRecord, name: str, place: int, start: int, stop: int
    ) -> np.ndarray:
        """Rows start..stop-1 of a sequence, read and verified in whole checksum blocks."""
        first = start // CHUNK_TOKENS
        last = -(-stop // CHUNK_TOKENS)
        low = first * CHUNK_TOKENS
        high = min(last * CHUNK_TOKENS, self.commit.num_tokens[place])
        rows = np.empty((max(0, high - low), array.width), dtype=array.dtype)
        data = memoryview(rows).cast("B") if rows.size else memoryview(b"")
        offset = (int(self._first_token[place]) + low) * array.row_bytes
        self._fill(layout.array_data(path), offset, data, name, place)
        block = int(self._first_block[place]) + first
        checksums = array.checksums[block : block + max(0, last - first)]
        damaged = first_damaged_block(data, array.row_bytes, checksums)
        if damaged is not None:
            chunk = (int(self._first_token[place]) + low) // CHUNK_TOKENS + damaged
            raise self._damaged(name, place, f"checksum of chunk {chunk} does not match")
        return rows[start - low : stop - low]

    def _fill(
        self, path: str, offset: int, data: bytearray | memoryview, name: str, place: int
    ) -> None:
        try:
            reader = self._readers.get(path)
            if reader is None:
                reader = self._readers[path] = self._files.range_reader(path)
            reader.read_into(offset, [memoryview(data)])
        except (FileNotFoundError, DamagedShardError) as error:
            raise self._damaged(name, place, str(error)) from error

    def _damaged(self, name: str, place: int, why: str) -> DamagedShardError:
        return DamagedShardError(
            f"shard {self.commit.unit} of {self._files} is damaged: layer {name}, sequence "
            f"{self.commit.sequence_ids[place]!r}: {why}; run `store verify`, then `store repair`"
        )
