"""Append sequences to a new shard, or new layers to a committed one, and seal it."""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType

import numpy as np
from crc32c import crc32c
from jaxtyping import Bool, Int32

from storage import layout
from storage.arrays import ArrayWriter
from storage.commits import AddedLayers, ArrayRecord, CommitRecord, read_added, read_commit
from storage.encodings import EncodedStates, encoding_named
from storage.errors import StoreError, StoreWriteError
from storage.files import Files
from storage.losses import EncodingLoss, total_losses
from storage.packing import side_by_side
from storage.records import create_record
from storage.schema import LayerRecord, UnitId

_WORTH_A_THREAD_BYTES = 2**20
"""Bytes of a sequence's layer from which writing takes longer than handing it to a thread."""


class LayerArrays:
    """The arrays of some layers and of their token scales, being written."""

    def __init__(self, files: Files, attempt_dir: str, layers: Mapping[str, LayerRecord]):
        self._files, self._dir = files, attempt_dir
        self._layers = dict(layers)
        self._scales: ArrayWriter | None = None
        self._arrays: dict[str, ArrayWriter] = {}
        self.scale_columns = [
            name
            for name, record in self._layers.items()
            if encoding_named(record.encoding).has_scales
        ]

    def open(self) -> None:
        """Starts the files; on an error `abandon` closes those that were started."""
        for name, record in self._layers.items():
            entry = encoding_named(record.encoding)
            self._arrays[name] = ArrayWriter(
                self._files,
                layout.array(self._dir, name),
                dtype=entry.dtype,
                width=entry.width(record.hidden_size),
                packing=record.packing,
            )
        if self.scale_columns:
            self._scales = ArrayWriter(
                self._files,
                layout.scales(self._dir),
                dtype="float32",
                width=len(self.scale_columns),
            )

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all arrays."""
        arrays = [*self._arrays.values(), *([self._scales] if self._scales else [])]
        return sum(array.row_bytes for array in arrays)

    def check(self, sequence_id: str, num_tokens: int, states: Mapping[str, EncodedStates]) -> None:
        """Raises ValueError unless the states fit the layers and the number of tokens."""
        if states.keys() != self._layers.keys():
            raise ValueError(
                f"sequence {sequence_id!r}: expected states of layers {list(self._layers)}, "
                f"got {list(states)}"
            )
        for name, record in self._layers.items():
            _check_layer(sequence_id, num_tokens, record, states[name])

    def append(self, states: Mapping[str, EncodedStates]) -> None:
        """Appends one whole sequence, one write per array; large layers side by side."""
        appends = {
            name: partial(array.append, states[name].data) for name, array in self._arrays.items()
        }
        is_worth_threads = any(
            self._layers[name].packing is not None or each.data.nbytes >= _WORTH_A_THREAD_BYTES
            for name, each in states.items()
        )
        if is_worth_threads:
            side_by_side(list(appends.values()))
        else:
            for append in appends.values():
                append()
        if self._scales is not None:
            columns = [states[name].scales for name in self.scale_columns]
            self._scales.append(np.stack(columns, axis=1))  # type: ignore[arg-type]

    def finish(self) -> tuple[dict[str, ArrayRecord], ArrayRecord | None]:
        """Flushes all arrays and says what lies there: the layers' and that of the scales."""
        finished: dict[str, ArrayRecord] = {}

        def finish(name: str) -> None:
            finished[name] = self._arrays[name].finish(
                axes=("tokens", "hidden"),
                attributes={"layer": name, "encoding": self._layers[name].encoding},
            )

        # Each waits for the disk, which takes them all at once.
        side_by_side([partial(finish, name) for name in self._arrays])
        records = {name: finished[name] for name in self._arrays}
        if self._scales is None:
            return records, None
        attributes = {"layers": self.scale_columns}
        return records, self._scales.finish(axes=("tokens", "layers"), attributes=attributes)

    def abandon(self) -> None:
        """Closes all files."""
        for array in (*self._arrays.values(), self._scales):
            if array is not None:
                array.abandon()


class Attempt:
    """One try at writing something of a unit: invisible until committed, removed if it is not.

    A context manager: leaving it without a successful `seal` removes the attempt's files.
    """

    def __init__(self, files: Files, unit: UnitId, layers: Mapping[str, LayerRecord]):
        self.unit = unit
        self.num_tokens = 0
        self.num_bytes = 0
        self._files = files
        self._id = uuid.uuid4().hex
        self._dir = layout.attempt(unit, self._id)
        self._arrays = LayerArrays(files, self._dir, layers)
        self._losses: dict[str, EncodingLoss] = {}
        self._sealed = False
        self._is_whole = True
        try:
            self._open()
        except BaseException:
            self.drop()
            raise

    def _open(self) -> None:
        self._arrays.open()

    def count_losses(self, losses: Mapping[str, EncodingLoss]) -> None:
        """Adds what encoding lost, by layer; the sums go into the commit record."""
        self._losses = total_losses([self._losses, losses])

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Bars everything after a write that failed half-way: rows would no longer fit."""
        if not self._is_whole:
            raise StoreError(f"a write to unit {self.unit} failed before; start the unit again")
        self._is_whole = False
        yield
        self._is_whole = True

    def _commit(self, path: str, record: CommitRecord | AddedLayers) -> bool:
        """Makes everything durable, then the record: exclusively and last."""
        self._files.sync_tree(self._dir)
        self._sealed = create_record(self._files, path, record.to_json())
        if not self._sealed:
            self.drop()
        return self._sealed

    def _is_committed(self) -> bool:
        """Whether a commit record names this attempt."""
        raise NotImplementedError

    def drop(self) -> None:
        """Removes the attempt's files, unless a commit record names this attempt."""
        self._arrays.abandon()
        # An error can strike between the commit and its return (a failing flush, Ctrl-C).
        if not self._is_committed():
            # What cannot be removed is invisible, and `store gc` tries again: the error that led
            # here is the one to tell.
            with suppress(StoreWriteError):
                self._files.remove_tree(self._dir)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._sealed:
            self.drop()


class ShardWriter(Attempt):
    """One attempt at a unit: all its sequences with the states of all layers."""

    def __init__(
        self,
        files: Files,
        unit: UnitId,
        planned_ids: Sequence[str],
        layers: Mapping[str, LayerRecord],
    ):
        self._planned = set(planned_ids)
        self._sequences: dict[str, tuple[int, int, bool, int]] = {}
        self._skipped: dict[str, str] = {}
        super().__init__(files, unit, layers)

    def _open(self) -> None:
        self._tokens = self._files.append_stream(layout.tokens(self._dir))
        super()._open()

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
        if len(token_ids) == 0:
            raise ValueError(f"sequence {sequence_id!r} has no tokens")
        self._arrays.check(sequence_id, len(token_ids), states)
        packed = token_ids.astype("<i4").tobytes() + loss_mask.astype(np.uint8).tobytes()
        with self._writing():
            self._tokens.write(packed)
            self._arrays.append(states)
        supervised = int(np.count_nonzero(loss_mask[:-1] & loss_mask[1:]))
        self._sequences[sequence_id] = (len(token_ids), supervised, greedy, crc32c(packed))
        self.num_tokens += len(token_ids)
        self.num_bytes += len(packed) + len(token_ids) * self._arrays.token_bytes

    def skip(self, *, sequence_id: str, reason: str) -> None:
        """Records that a planned sequence holds no states, and why."""
        self._check_new(sequence_id)
        self._skipped[sequence_id] = reason

    def _check_new(self, sequence_id: str) -> None:
        if sequence_id not in self._planned:
            raise ValueError(f"sequence {sequence_id!r} is not planned in unit {self.unit}")
        if sequence_id in self._sequences or sequence_id in self._skipped:
            raise ValueError(f"sequence {sequence_id!r} was already given to unit {self.unit}")

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
        with self._writing():
            self._tokens.close()
            layers, scales = self._arrays.finish()
        rows = list(self._sequences.values())
        record = CommitRecord(
            unit=self.unit,
            attempt=self._id,
            sequence_ids=list(self._sequences),
            num_tokens=[row[0] for row in rows],
            num_supervised=[row[1] for row in rows],
            greedy=[row[2] for row in rows],
            tokens_checksums=np.array([row[3] for row in rows], dtype=np.uint32),
            skipped=self._skipped,
            layers=layers,
            scales=scales,
            scale_columns=self._arrays.scale_columns,
            losses=self._losses,
        )
        return self._commit(layout.commit(self.unit), record)

    def _is_committed(self) -> bool:
        try:
            return read_commit(self._files, self.unit).attempt == self._id
        except FileNotFoundError:
            return False

    def drop(self) -> None:
        """Removes the attempt's files, unless the commit record names this attempt."""
        if hasattr(self, "_tokens"):
            self._tokens.abandon()
        super().drop()

    def __enter__(self) -> "ShardWriter":
        return self


class LayersWriter(Attempt):
    """One attempt at adding layers to a committed unit: the same sequences in the same order."""

    def __init__(self, files: Files, commit: CommitRecord, layers: Mapping[str, LayerRecord]):
        self._names = list(layers)
        self._lengths = dict(zip(commit.sequence_ids, commit.num_tokens, strict=True))
        self._left = list(commit.sequence_ids)[::-1]
        super().__init__(files, commit.unit, layers)

    @property
    def sequence_ids(self) -> list[str]:
        """Sequences still to come, in the order in which `append` takes them."""
        return self._left[::-1]

    def append(self, *, sequence_id: str, states: Mapping[str, EncodedStates]) -> None:
        """Appends the added layers' states of the next sequence of the shard."""
        if not self._left or self._left[-1] != sequence_id:
            expected = repr(self._left[-1]) if self._left else "no more"
            raise ValueError(f"unit {self.unit}: expected {expected}, got {sequence_id!r}")
        num_tokens = self._lengths[sequence_id]
        self._arrays.check(sequence_id, num_tokens, states)
        with self._writing():
            self._arrays.append(states)
        self._left.pop()
        self.num_tokens += num_tokens
        self.num_bytes += num_tokens * self._arrays.token_bytes

    def seal(self) -> bool:
        """Flushes everything, then commits the added layers; False if another attempt was first."""
        if self._left:
            raise ValueError(f"unit {self.unit} lacks {len(self._left)} sequences' new layers")
        with self._writing():
            layers, scales = self._arrays.finish()
        record = AddedLayers(
            unit=self.unit,
            attempt=self._id,
            layers=layers,
            scales=scales,
            scale_columns=self._arrays.scale_columns,
            losses=self._losses,
        )
        return self._commit(layout.added_layers(self.unit, self._names), record)

    def _is_committed(self) -> bool:
        return any(added.attempt == self._id for added in read_added(self._files, self.unit))

    def __enter__(self) -> "LayersWriter":
        return self


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
