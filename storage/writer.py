"""Create a store, plan its units, append sequences to a shard and seal it."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from crc32c import crc32c
from jaxtyping import Bool, Int32

from storage import layout
from storage.arrays import ArrayWriter
from storage.commits import CommitRecord, committed_units, read_commit, tombstoned_units
from storage.encodings import EncodedStates, encoding_named
from storage.errors import StoreError, StoreNotFoundError
from storage.files import AppendStream, Files, LocalFiles
from storage.plan import create_generation, read_generation
from storage.records import create_record, read_record
from storage.schema import (
    LayerRecord,
    StoreIdentity,
    UnitId,
    check_same_identity,
)


def create_store(store_dir: str | Path, identity: StoreIdentity) -> "WritableStore":
    """Creates a store, or opens it for writing if it has this identity already.

    Raises:
        IdentityMismatchError: a store with another identity is there; every field is listed.
        StoreError: the folder holds something else, or cannot be written.
    """
    files = LocalFiles(store_dir)
    _refuse_other_folders(files)
    if not create_record(files, layout.IDENTITY, identity.to_json()):
        found = read_record(files, layout.IDENTITY)
        check_same_identity(found, identity, place=files)
    return WritableStore(files, identity)


def open_for_writing(store_dir: str | Path) -> "WritableStore":
    """Opens an existing store for writing, whatever its identity."""
    files = LocalFiles(store_dir)
    return WritableStore(files, read_identity(files))


def read_identity(files: Files) -> StoreIdentity:
    """The identity of a store; raises StoreNotFoundError where there is none."""
    try:
        return StoreIdentity.from_json(read_record(files, layout.IDENTITY))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoreNotFoundError(
            f"there is no store at {files}; check the path, or run `extract` to make one"
        ) from error


def read_layers(files: Files) -> dict[str, LayerRecord]:
    """The layer records of a store by name."""
    names = [name.removesuffix(".json") for name in files.names(layout.LAYERS)]
    return {
        name: LayerRecord.from_json(read_record(files, layout.layer_record(name)))
        for name in sorted(names, key=_layer_order)
    }


def _check_record(record: LayerRecord) -> None:
    entry = encoding_named(record.encoding)
    entry.width(record.hidden_size)
    num_scales = None if record.channel_scales is None else len(record.channel_scales)
    if num_scales != (record.hidden_size if entry.calibrated else None):
        raise ValueError(
            f"layer {record.name}: encoding {record.encoding} takes "
            f"{record.hidden_size if entry.calibrated else 'no'} channel scales, got {num_scales}"
        )


def _describe(record: LayerRecord) -> str:
    text = f"{record.encoding} of hidden size {record.hidden_size}"
    if record.channel_scales is None:
        return text
    return f"{text}, channel scales {hash(record.channel_scales) % 2**32:08x}"


def _layer_order(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdigit() else (2**31, name)


def _refuse_other_folders(files: LocalFiles) -> None:
    try:
        names = files.names("")
    except NotADirectoryError as error:
        raise StoreError(f"{files} is a file; choose another store folder") from error
    if names and layout.IDENTITY not in names:
        raise StoreError(
            f"{files} holds other files and is no store; choose an empty or new folder"
        )


class WritableStore:
    """A store open for writing. Any number of processes may hold one at the same time."""

    def __init__(self, files: Files, identity: StoreIdentity):
        self.files = files
        self.identity = identity
        self._generations: list[dict[UnitId, list[str]]] = []
        self._unit_of: dict[str, UnitId] = {}
        self._dead: set[UnitId] = set()

    @property
    def layers(self) -> dict[str, LayerRecord]:
        """The stored layers by name, decoder layers in order, as they are recorded now."""
        return read_layers(self.files)

    def add_layers(self, records: Iterable[LayerRecord]) -> None:
        """Records layers; a name that is there with another encoding raises StoreError."""
        for record in records:
            _check_record(record)
            if not create_record(self.files, layout.layer_record(record.name), record.to_json()):
                found = self.layers[record.name]
                raise StoreError(
                    f"{self.files}: layer {record.name} is stored as {_describe(found)}, this run "
                    f"wants {_describe(record)}; keep the store's setting or use another folder"
                )

    def put_head_file(self, name: str, data: bytes) -> None:
        """Stores a file under head/; an equal second put is fine, a different one raises."""
        record = {"num_bytes": len(data), "crc32c": f"{crc32c(data):08x}"}
        if not (
            self.files.create(layout.head_file(name), data)
            and create_record(self.files, layout.head_record(name), record)
        ):
            raise StoreError(
                f"{self.files}/{layout.head_file(name)} differs from this run's; "
                "the target changed since the store was made: use another store folder"
            )

    def plan_generation(self, sequence_ids: Sequence[str], *, num_units: int) -> int:
        """Plans the ids that no earlier generation holds as a new generation of units.

        Safe to call from several processes at once with the same ids: one plan is made.

        Returns:
            How many ids the generation planned by this call (or an equal one) holds.
        """
        if num_units < 1:
            raise ValueError(f"num_units must be at least 1, got {num_units}")
        while True:
            new = sorted(set(sequence_ids) - self._planned().keys())
            if not new:
                return 0
            number = len(self._generations)
            if create_generation(self.files, number, new, num_units=num_units):
                return len(new)

    def _planned(self) -> dict[str, UnitId]:
        """Unit by id over all generations, dead units left out."""
        self._read_new_generations()
        dead = tombstoned_units(self.files) - self._dead
        for unit in dead:
            for sequence_id in self._generations[unit.generation].pop(unit, []):
                if self._unit_of[sequence_id] == unit:
                    del self._unit_of[sequence_id]
        self._dead |= dead
        return self._unit_of

    def _read_new_generations(self) -> None:
        for number in range(len(self._generations), len(self.files.names(layout.GENERATIONS))):
            units = read_generation(self.files, number)
            self._generations.append(units)
            for unit, ids in units.items():
                self._unit_of.update(dict.fromkeys(ids, unit))

    def units(self) -> list[UnitId]:
        """All planned units that hold a sequence, in order; tombstoned ones are left out."""
        self._planned()
        return sorted(unit for units in self._generations for unit in units)

    def unit_of(self, sequence_id: str) -> UnitId | None:
        """The unit a sequence is planned in; None if it is not."""
        return self._planned().get(sequence_id)

    def sequences_of(self, unit: UnitId) -> list[str]:
        """Sorted ids planned in a unit; ValueError if there is no such unit."""
        self._planned()
        if unit.generation >= len(self._generations):
            raise ValueError(f"{self.files} has no generation {unit.generation}")
        ids = self._generations[unit.generation].get(unit)
        if ids is None:
            raise ValueError(f"unit {unit} is not planned in {self.files}")
        return list(ids)

    def is_committed(self, unit: UnitId) -> bool:
        """Whether the unit has a commit record now."""
        try:
            return self.files.size(layout.commit(unit)) > 0
        except FileNotFoundError:
            return False

    def committed(self) -> set[UnitId]:
        """All units that have a commit record now."""
        return committed_units(self.files)

    def start_shard(self, unit: UnitId) -> "ShardWriter":
        """Starts an attempt at a unit, for all layers recorded now."""
        return ShardWriter(self.files, unit, self.sequences_of(unit), self.layers)


class ShardWriter:
    """One attempt at a unit: invisible until `seal` commits it whole.

    A context manager: leaving it without a successful `seal` removes the attempt's files.
    """

    def __init__(
        self,
        files: Files,
        unit: UnitId,
        planned_ids: Sequence[str],
        layers: Mapping[str, LayerRecord],
    ):
        self.unit = unit
        self.num_tokens = 0
        self.num_bytes = 0
        self._files = files
        self._planned = set(planned_ids)
        self._layers = dict(layers)
        self._attempt = uuid.uuid4().hex
        self._dir = layout.attempt(unit, self._attempt)
        self._sequences: dict[str, tuple[int, int, bool, int]] = {}
        self._skipped: dict[str, str] = {}
        self._sealed = False
        self._streams: list[ArrayWriter | AppendStream] = []
        try:
            self._open_streams()
        except BaseException:
            self.drop()
            raise

    def _open_streams(self) -> None:
        self._tokens = self._files.append_stream(layout.tokens(self._dir))
        self._streams.append(self._tokens)
        self._arrays = {
            name: self._start_array(
                layout.array(self._dir, name),
                dtype=encoding_named(record.encoding).dtype,
                width=encoding_named(record.encoding).width(record.hidden_size),
            )
            for name, record in self._layers.items()
        }
        self._scale_columns = [
            name
            for name, record in self._layers.items()
            if encoding_named(record.encoding).has_scales
        ]
        self._scales: ArrayWriter | None = None
        if self._scale_columns:
            self._scales = self._start_array(
                layout.scales(self._dir), dtype="float32", width=len(self._scale_columns)
            )

    def _start_array(self, array_dir: str, *, dtype: str, width: int) -> ArrayWriter:
        array = ArrayWriter(self._files, array_dir, dtype=dtype, width=width)
        self._streams.append(array)
        return array

    def append(
        self,
        *,
        sequence_id: str,
        token_ids: Int32[np.ndarray, " tokens"],
        loss_mask: Bool[np.ndarray, " tokens"],
        greedy: bool,
        states: Mapping[str, EncodedStates],
    ) -> None:
        """Appends one whole sequence with the states of every layer of the store.

        Args:
            sequence_id: planned in this unit and not appended or skipped yet.
            token_ids: int32 [tokens].
            loss_mask: bool [tokens], True where the token is to be learnt.
            greedy: whether the supervised tokens are the target's own greedy output.
            states: by layer name; data [tokens, width], scales float32 [tokens] or None.
        """
        self._check_new(sequence_id)
        self._check_states(sequence_id, len(token_ids), states)
        packed = token_ids.astype("<i4").tobytes() + loss_mask.astype(np.uint8).tobytes()
        self._tokens.write(packed)
        for name, array in self._arrays.items():
            array.append(states[name].data)
        if self._scales is not None:
            columns = [states[name].scales for name in self._scale_columns]
            self._scales.append(np.stack(columns, axis=1))  # type: ignore[arg-type]
        supervised = int(np.count_nonzero(loss_mask[:-1] & loss_mask[1:]))
        self._sequences[sequence_id] = (len(token_ids), supervised, greedy, crc32c(packed))
        self._count(len(token_ids))

    def _count(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        state_bytes = sum(array.row_bytes for array in self._arrays.values())
        self.num_bytes += num_tokens * (5 + state_bytes + 4 * len(self._scale_columns))

    def skip(self, *, sequence_id: str, reason: str) -> None:
        """Records that a planned sequence holds no states, and why."""
        self._check_new(sequence_id)
        self._skipped[sequence_id] = reason

    def _check_new(self, sequence_id: str) -> None:
        if sequence_id not in self._planned:
            raise ValueError(f"sequence {sequence_id!r} is not planned in unit {self.unit}")
        if sequence_id in self._sequences or sequence_id in self._skipped:
            raise ValueError(f"sequence {sequence_id!r} was already given to unit {self.unit}")

    def _check_states(
        self, sequence_id: str, num_tokens: int, states: Mapping[str, EncodedStates]
    ) -> None:
        if num_tokens == 0:
            raise ValueError(f"sequence {sequence_id!r} has no tokens")
        if states.keys() != self._layers.keys():
            raise ValueError(
                f"sequence {sequence_id!r}: expected states of layers {list(self._layers)}, "
                f"got {list(states)}"
            )
        for name, record in self._layers.items():
            _check_layer(sequence_id, num_tokens, record, states[name])

    def seal(self) -> bool:
        """Flushes everything, then commits: exclusively and last.

        Returns:
            True when this attempt is now the shard; False when another attempt was first, in
            which case this one is removed.
        """
        missing = self._planned - self._sequences.keys() - self._skipped.keys()
        if missing:
            raise ValueError(
                f"unit {self.unit} lacks {len(missing)} planned sequences, e.g. {min(missing)!r}; "
                "append or skip each before sealing"
            )
        record = self._finish()
        self._files.sync_tree(self._dir)
        self._sealed = create_record(self._files, layout.commit(self.unit), record.to_json())
        if not self._sealed:
            self.drop()
        return self._sealed

    def _finish(self) -> CommitRecord:
        self._tokens.close()
        layers = {
            name: array.finish(
                axes=("tokens", "hidden"),
                attributes={"layer": name, "encoding": self._layers[name].encoding},
            )
            for name, array in self._arrays.items()
        }
        scales = None
        if self._scales is not None:
            attributes = {"layers": self._scale_columns}
            scales = self._scales.finish(axes=("tokens", "layers"), attributes=attributes)
        rows = list(self._sequences.values())
        return CommitRecord(
            unit=self.unit,
            attempt=self._attempt,
            sequence_ids=list(self._sequences),
            num_tokens=[row[0] for row in rows],
            num_supervised=[row[1] for row in rows],
            greedy=[row[2] for row in rows],
            tokens_checksums=np.array([row[3] for row in rows], dtype=np.uint32),
            skipped=self._skipped,
            layers=layers,
            scales=scales,
            scale_columns=self._scale_columns,
        )

    def drop(self) -> None:
        """Removes the attempt's files, unless the commit record names this attempt."""
        for stream in self._streams:
            stream.abandon()
        # An error can strike between the commit and its return (a failing flush, Ctrl-C).
        try:
            if read_commit(self._files, self.unit).attempt == self._attempt:
                return
        except FileNotFoundError:
            pass
        self._files.remove_tree(self._dir)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._sealed:
            self.drop()


def _check_layer(
    sequence_id: str, num_tokens: int, record: LayerRecord, states: EncodedStates
) -> None:
    entry = encoding_named(record.encoding)
    expected = (num_tokens, entry.width(record.hidden_size))
    if states.data.shape != expected or states.data.dtype != np.dtype(entry.dtype):
        raise ValueError(
            f"sequence {sequence_id!r}, layer {record.name}: expected {entry.dtype} of shape "
            f"{expected}, got {states.data.dtype} of shape {states.data.shape}"
        )
    scales_shape = None if states.scales is None else states.scales.shape
    if scales_shape != ((num_tokens,) if entry.has_scales else None):
        raise ValueError(
            f"sequence {sequence_id!r}, layer {record.name}: scales of shape {scales_shape} do "
            f"not fit {num_tokens} tokens of {record.encoding}"
        )
