"""Stores joined into one that is read as one: a record that names them, no data.

The members keep growing by themselves; a snapshot takes what each has committed. They must have
one identity, the same layers with the same scales, and no sequence in common.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32, UInt64

from storage import layout
from storage.commits import CommitRecord
from storage.errors import StoreError, StoreNotFoundError
from storage.files import Files, LocalFiles
from storage.losses import EncodingLoss
from storage.places import files_at
from storage.reader import SequenceStates, Snapshot, Store, open_store
from storage.records import create_record, read_record
from storage.schema import LayerRecord, UnitId, check_same_identity
from storage.shards import Destinations


def join_stores(place: str | Path, members: Sequence[str | Path]) -> "JoinedStore":
    """Records stores as the members of a joined one, and opens it.

    Args:
        place: a new folder or URL; again with the same members it changes nothing.
        members: folders or URLs. Folders are kept relative to a local `place`, so that all may be
            moved together.

    Raises:
        IdentityMismatchError: two members differ; every field is listed.
        StoreError: the layers differ, a sequence is in two members, or `place` is taken.
    """
    files = files_at(place)
    if files.names("") not in ([], [layout.JOINED]):
        raise StoreError(f"{files} holds other files; join into a new or empty folder")
    names = [_name_of(files, member) for member in members]
    joined = _open_members(files, names, open_store)
    if not joined.layers:
        raise StoreError(f"{files}: the stores have no layer in common")
    joined.snapshot()  # Raises where a sequence is in two of them.
    if not create_record(files, layout.JOINED, {"members": names}):
        raise StoreError(f"{files} joins other stores already; join into a new folder")
    return joined


def open_joined(files: Files, open_member: Callable[[str], Store]) -> "JoinedStore":
    """Opens a joined store; StoreNotFoundError if there is none at this place."""
    try:
        record = read_record(files, layout.JOINED)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoreNotFoundError(
            f"there is no store at {files}; check the path, or run `extract` to make one"
        ) from error
    return _open_members(files, record["members"], open_member)


def _open_members(
    files: Files, names: Sequence[str], open_member: Callable[[str], Store]
) -> "JoinedStore":
    if not names:
        raise StoreError(f"{files}: no stores to join; name one at least")
    members = [open_member(place) for place in _places(files, names)]
    for member in members[1:]:
        found = member.identity.to_json()
        check_same_identity(found, members[0].identity, place=member.files)
    return JoinedStore(files, members)


def members_of(files: Files) -> list[str]:
    """Where the members of a joined store lie; nothing where there is no joined store."""
    try:
        return _places(files, read_record(files, layout.JOINED)["members"])
    except (FileNotFoundError, NotADirectoryError):
        return []


def _places(files: Files, names: Sequence[str]) -> list[str]:
    root = files.root if isinstance(files, LocalFiles) else Path()
    return [name if "://" in name else os.path.normpath(root / name) for name in names]


def _name_of(files: Files, member: str | Path) -> str:
    if isinstance(member, str) and "://" in member:
        return member
    path = Path(member).absolute()
    return os.path.relpath(path, files.root) if isinstance(files, LocalFiles) else str(path)


def _as_decoded(record: LayerRecord) -> LayerRecord:
    """What decoding takes of a record: how chunks are packed each shard says for itself."""
    return replace(record, packing=None)


class JoinedStore(Store):
    """Several stores open for reading as one."""

    def __init__(self, files: Files, members: Sequence[Store]):
        super().__init__(files, members[0].identity)
        self.members = list(members)

    @property
    def layers(self) -> dict[str, LayerRecord]:
        """The layers that all members have; StoreError if they are kept in different ways."""
        first, *others = [member.layers for member in self.members]
        shared = [name for name in first if all(name in other for other in others)]
        for name in shared:
            differing = [o for o in others if _as_decoded(o[name]) != _as_decoded(first[name])]
            if differing:
                raise StoreError(
                    f"{self.files}: layer {name} is kept as {first[name].encoding} in one store "
                    f"and as {differing[0][name].encoding}, or with other scales, in another; make "
                    "them alike with `store encode SRC DST --like STORE`"
                )
        return {name: first[name] for name in shared}

    def origins(self) -> list[dict[str, Any]]:
        """Settings and versions that filled the members; for people."""
        return [origin for member in self.members for origin in member.origins()]

    def head_names(self) -> list[str]:
        """Names of all files of head/: of the same target, but one member may keep more."""
        return sorted({name for member in self.members for name in member.head_names()})

    def head_bytes(self, name: str) -> bytes:
        """A file of head/, its checksum verified."""
        return self._keeper_of(name).head_bytes(name)

    def head_path(self, name: str) -> Path:
        """Where a file or folder of head/ lies."""
        return self._keeper_of(name).head_path(name)

    def _keeper_of(self, name: str) -> Store:
        """The first member that has a file or folder of head/."""
        for member in self.members:
            if any(f"{each}/".startswith(f"{name}/") for each in member.head_names()):
                return member
        return self.members[0]

    def is_complete(self) -> bool:
        """Whether every member is."""
        return all(member.is_complete() for member in self.members)

    def snapshot(self, snapshot_id: str | None = None) -> "JoinedSnapshot":
        """The sequences committed now in all members, or those of an earlier snapshot."""
        ids: Sequence[str | None] = [None] * len(self.members)
        if snapshot_id is not None:
            ids = snapshot_id.split("|")
            if len(ids) != len(self.members):
                raise StoreError(
                    f"{self.files} joins {len(self.members)} stores, snapshot {snapshot_id} "
                    f"{len(ids)}; give the store it was taken from"
                )
        pairs = zip(self.members, ids, strict=True)
        return JoinedSnapshot(self, [member.snapshot(each) for member, each in pairs])


class JoinedSnapshot(Snapshot):
    """Snapshots of several stores, one after another; shards are numbered through."""

    def __init__(self, store: JoinedStore, parts: Sequence[Snapshot]):
        self.store = store
        self.parts = list(parts)
        sizes = [part.num_sequences for part in parts]
        shards = [part.num_shards for part in parts]
        self._starts = np.cumsum([0, *sizes]).tolist()
        self._first_shards = np.cumsum([0, *shards]).tolist()
        self.shard_index = np.concatenate(
            [p.shard_index + first for p, first in zip(parts, self._first_shards, strict=False)]
        )
        self.num_tokens = np.concatenate([part.num_tokens for part in parts])
        self.num_supervised = np.concatenate([part.num_supervised for part in parts])
        self.greedy = np.concatenate([part.greedy for part in parts])
        self.held_out = np.concatenate([part.held_out for part in parts])
        self._refuse_shared_sequences()

    def _refuse_shared_sequences(self) -> None:
        """Raises where a sequence is in two members: it would be trained on twice."""
        hashes = np.concatenate([part.id_hash for part in self.parts])
        order = np.argsort(hashes, kind="stable")
        equal = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
        for place in equal.tolist():
            one, two = (self.sequence_id(int(index)) for index in order[place : place + 2])
            if one == two:
                raise StoreError(
                    f"{self.store.files}: sequence {one!r} is in two of the joined stores; take"
                    " one of them out, or give the conversations different ids"
                )

    @property
    def id_hash(self) -> UInt64[np.ndarray, " sequences"]:
        """`hash_id` of each sequence."""
        return np.concatenate([part.id_hash for part in self.parts])

    @cached_property
    def id(self) -> str:
        """The members' ids, joined: enough to take the same snapshot again."""
        return "|".join(part.id for part in self.parts)

    @property
    def num_shards(self) -> int:
        """Committed shards of all members."""
        return int(self._first_shards[-1])

    @property
    def num_sequences(self) -> int:
        """Committed sequences of all members."""
        return int(self._starts[-1])

    def sequence_id(self, index: int) -> str:
        """The id of a sequence."""
        part, place = self._part(index)
        return part.sequence_id(place)

    def find(self, sequence_id: str) -> int | None:
        """The index of a sequence; None if no member holds it."""
        for part, start in zip(self.parts, self._starts, strict=False):
            place = part.find(sequence_id)
            if place is not None:
                return int(start) + place
        return None

    def read_tokens(
        self, index: int
    ) -> tuple[Int32[np.ndarray, " tokens"], Bool[np.ndarray, " tokens"]]:
        """Token ids and loss mask of a sequence; no states are touched."""
        part, place = self._part(index)
        return part.read_tokens(place)

    def read(
        self,
        index: int,
        *,
        layers: Sequence[str],
        tokens: slice = slice(None),
        out: Destinations | None = None,
    ) -> SequenceStates:
        """A sequence with the states of some layers; see `Snapshot.read`."""
        part, place = self._part(index)
        return part.read(place, layers=layers, tokens=tokens, out=out)

    def skipped(self) -> dict[str, str]:
        """Reason by id of the sequences that were skipped."""
        return {name: why for part in self.parts for name, why in part.skipped().items()}

    def unit_of_shard(self, shard: int) -> UnitId:
        """The unit that a shard index stands for, in its own store."""
        part, place = self._part_of_shard(shard)
        return part.unit_of_shard(place)

    def commit_of_shard(self, shard: int) -> CommitRecord:
        """The commit record of a shard, read now."""
        part, place = self._part_of_shard(shard)
        return part.commit_of_shard(place)

    def losses_of_shard(self, shard: int) -> dict[str, EncodingLoss]:
        """What encoding lost in a shard, by layer."""
        part, place = self._part_of_shard(shard)
        return part.losses_of_shard(place)

    def _part_of_shard(self, shard: int) -> tuple[Snapshot, int]:
        part = int(np.searchsorted(self._first_shards, shard, side="right")) - 1
        return self.parts[part], shard - int(self._first_shards[part])

    def _part(self, index: int) -> tuple[Snapshot, int]:
        part = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self.parts[part], index - int(self._starts[part])
