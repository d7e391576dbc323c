"""Create a store, plan its units, start shards: what the writing side sees of a store."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from storage import head, identity, layout
from storage.commits import committed_units, layers_of, read_commit, tombstoned_units
from storage.errors import StoreError
from storage.files import Files
from storage.origins import note_origin
from storage.places import files_at
from storage.plan import create_generation, read_generation
from storage.schema import LayerRecord, StoreIdentity, UnitId
from storage.shard_writer import LayersWriter, ShardWriter

__all__ = ["LayersWriter", "ShardWriter", "WritableStore", "create_store", "open_for_writing"]


def create_store(store_dir: str | Path, store_identity: StoreIdentity) -> "WritableStore":
    """Creates a store, or opens it for writing if it has this identity already.

    Raises:
        IdentityMismatchError: a store with another identity is there; every field is listed.
        StoreError: the folder holds something else, or cannot be written.
    """
    files = files_at(store_dir)
    identity.create_identity(files, store_identity)
    return WritableStore(files, store_identity)


def open_for_writing(store_dir: str | Path) -> "WritableStore":
    """Opens an existing store for writing, whatever its identity."""
    files = files_at(store_dir)
    return WritableStore(files, identity.read_identity(files))


class WritableStore:
    """A store open for writing. Any number of processes may hold one at the same time."""

    def __init__(self, files: Files, store_identity: StoreIdentity):
        self.files = files
        self.identity = store_identity
        self._generations: list[dict[UnitId, list[str]]] = []
        self._unit_of: dict[str, UnitId] = {}
        self._dead: set[UnitId] = set()

    @property
    def layers(self) -> dict[str, LayerRecord]:
        """The stored layers by name, decoder layers in order, as they are recorded now."""
        return identity.read_layers(self.files)

    def add_layers(self, records: Iterable[LayerRecord]) -> None:
        """Records layers; a name that is there with another encoding raises StoreError."""
        identity.add_layers(self.files, list(records))

    @property
    def pending_layers(self) -> dict[str, LayerRecord]:
        """Layers that are being added to committed shards; readers do not see them yet."""
        return identity.read_layers(self.files, layout.PENDING_LAYERS)

    def pend_layers(self, records: Iterable[LayerRecord]) -> None:
        """Announces layers to be added to committed shards with `start_layers`.

        Raises:
            StoreError: a name is there already, with another encoding or other scales.
        """
        identity.add_layers(self.files, list(records), path_of=layout.pending_layer_record)

    def publish_layers(self, names: Iterable[str]) -> None:
        """Shows added layers to readers, once every shard holds them.

        Raises:
            StoreError: a shard lacks one.
        """
        names = list(names)
        lacking = self.units_lacking(names)
        if lacking:
            raise StoreError(
                f"{self.files}: {len(lacking)} shards, e.g. {lacking[0]}, lack layers "
                f"{', '.join(names)}; add them there first"
            )
        pending = self.pending_layers
        self.add_layers(pending[name] for name in names if name in pending)

    def put_head_file(self, name: str, data: bytes) -> None:
        """Stores a file under head/; an equal second put is fine, a different one raises.

        A file that was damaged since is written again.
        """
        head.put_head_file(self.files, name, data)

    def lacking_head_files(self, *, also: Iterable[str] = ()) -> list[str]:
        """Files of head/ that are needed, named here or were put, and are not there in full."""
        return head.lacking_head_files(self.files, also=also)

    def note_origin(self, origin: Mapping[str, Any]) -> None:
        """Keeps settings and versions that fill the store, as JSON values; equal ones once."""
        note_origin(self.files, origin)

    def plan_generation(self, sequence_ids: Sequence[str], *, num_units: int) -> int:
        """Plans the ids that no earlier generation holds as a new generation of units.

        Safe to call from several processes at once with the same ids: one plan is made.

        Returns:
            How many ids the generation planned by this call (or an equal one) holds.
        """
        if num_units < 1:
            raise ValueError(f"num_units must be at least 1, got {num_units}")
        while True:
            new = sorted(set(self.unplanned(sequence_ids)))
            if not new:
                return 0
            number = len(self._generations)
            if create_generation(self.files, number, new, num_units=num_units):
                return len(new)

    def unplanned(self, sequence_ids: Iterable[str]) -> list[str]:
        """Those of the ids that no generation holds, in the given order."""
        planned = self._planned()
        return [sequence_id for sequence_id in sequence_ids if sequence_id not in planned]

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
        """Sorted ids planned in a unit; ValueError if there is no such unit.

        Looks for news only when it does not know the unit: asked for unit after unit, a large
        store would be listed twice for each.
        """
        if not any(unit in units for units in self._generations):
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

    def start_layers(self, unit: UnitId, names: Iterable[str]) -> LayersWriter:
        """Starts an attempt at adding pending or recorded layers to a committed unit."""
        known = {**self.pending_layers, **self.layers}
        layers = {name: known[name] for name in names}
        return LayersWriter(self.files, read_commit(self.files, unit), layers)

    def units_lacking(self, names: Iterable[str]) -> list[UnitId]:
        """Committed units that do not hold all of these layers, in order."""
        wanted = set(names)
        units = sorted(self.committed() - tombstoned_units(self.files))
        return [unit for unit in units if not wanted <= layers_of(self.files, unit)]
