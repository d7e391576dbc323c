"""What a store holds: identity, layer records, units, ids and their hashes. The one contract."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int, Int64, UInt64

from storage.errors import IdentityMismatchError

FORMAT_VERSION = 1
"""Version of the bytes on disk (FORMAT.md); part of the identity."""

CHUNK_TOKENS = 256
"""Tokens of one chunk of a layer array, and of one checksum block of a sequence."""

LM_HEAD_INPUT = "lm_head_input"
"""Name of the layer that holds the final normed state, from which `lm_head` makes logits."""


def layer_name(layer: int | str) -> str:
    """The stored name of a layer: `9` -> "9"; names pass through."""
    return str(layer)


@dataclass(frozen=True, kw_only=True)
class StoreIdentity:
    """Everything that must be equal for two runs to share a store."""

    target_name: str
    target_revision: str | None
    target_weights_sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str
    template_arguments: Mapping[str, Any]
    mask_rule_version: int
    max_sequence_tokens: int
    long_conversations: str
    compute_dtype: str
    attention_backend: str
    hidden_size: int
    num_target_layers: int
    vocab_size: int
    held_out_fraction: float
    format_version: int = FORMAT_VERSION

    def to_json(self) -> dict[str, Any]:
        """The identity as JSON values; two identities are the same when these are."""
        return dict(json.loads(json.dumps(asdict(self))))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "StoreIdentity":
        """The identity read back from `store.json`."""
        return cls(**value)


def check_same_identity(found: Mapping[str, Any], wanted: StoreIdentity, *, place: object) -> None:
    """Raises IdentityMismatchError listing every field in which the store differs from the run."""
    expected = wanted.to_json()
    names = [f.name for f in fields(StoreIdentity)]
    names += sorted(set(found) - set(names))
    differing = [name for name in names if found.get(name) != expected.get(name)]
    if differing:
        listed = "; ".join(
            f"{n}: store has {found.get(n)!r}, this run has {expected.get(n)!r}" for n in differing
        )
        raise IdentityMismatchError(
            f"the store at {place} was made with another identity ({listed}); "
            "give the run another store folder or restore these settings"
        )


@dataclass(frozen=True, kw_only=True)
class LayerRecord:
    """One stored layer: its name, how its states are encoded, their width."""

    name: str
    encoding: str
    hidden_size: int
    channel_scales: tuple[float, ...] | None = None
    """Static scale of each channel, calibrated once; None for encodings without calibration."""
    packing: str | None = None
    """How new shards pack this layer's chunks without loss (see `packing`); None leaves them."""

    @property
    def channel_scale_array(self) -> Float32[np.ndarray, " hidden"] | None:
        """The channel scales as `encode` and `decode` take them."""
        scales = self.channel_scales
        return None if scales is None else np.array(scales, dtype=np.float32)

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values."""
        value = asdict(self)
        if self.packing is None:
            del value["packing"]
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "LayerRecord":
        """The record read back from `layers/<name>.json`; unknown members are passed over."""
        names = {each.name for each in fields(cls)}
        known = {name: member for name, member in value.items() if name in names}
        scales = value["channel_scales"]
        return cls(**{**known, "channel_scales": None if scales is None else tuple(scales)})


@dataclass(frozen=True, order=True)
class UnitId:
    """A unit of work and of commit: one slice of one data generation."""

    generation: int
    index: int

    def __str__(self) -> str:
        return f"{self.generation:05d}-{self.index:05d}"

    @classmethod
    def parse(cls, text: str) -> "UnitId":
        """The unit written as `00000-00012`."""
        generation, index = text.split("-")
        return cls(int(generation), int(index))


def unit_keys(
    generation: Int[np.ndarray, " units"], index: Int[np.ndarray, " units"]
) -> Int64[np.ndarray, " units"]:
    """One number a unit, in the order of units."""
    return (generation.astype(np.int64) << 32) | index.astype(np.int64)


def format_units(generation: Int[np.ndarray, " units"], index: Int[np.ndarray, " units"]) -> str:
    """Units in ascending order as text, runs joined: `0.0-35,0.37,1.0-3`."""
    keys = unit_keys(generation, index)
    is_first = np.diff(keys, prepend=-2) != 1
    is_last = np.append(is_first[1:], True)[: len(keys)]
    firsts = zip(generation[is_first].tolist(), index[is_first].tolist(), strict=True)
    return ",".join(
        f"{g}.{a}" if a == b else f"{g}.{a}-{b}"
        for (g, a), b in zip(firsts, index[is_last].tolist(), strict=True)
    )


def among_units(
    text: str, generation: Int[np.ndarray, " units"], index: Int[np.ndarray, " units"]
) -> Bool[np.ndarray, " units"]:
    """Which of some units are among those that `format_units` wrote."""
    bounds = []
    for run in filter(None, text.split(",")):
        number, _, indices = run.partition(".")
        first, _, last = indices.partition("-")
        bounds.append((int(number), int(first), int(last or first)))
    if not bounds:
        return np.zeros(len(index), dtype=np.bool_)
    numbers, firsts, lasts = np.array(bounds, dtype=np.int64).T
    keys, starts = unit_keys(generation, index), unit_keys(numbers, firsts)
    place = np.searchsorted(starts, keys, side="right") - 1
    found: Bool[np.ndarray, " units"] = keys <= unit_keys(numbers, lasts)[place]
    return found & (place >= 0)


def hash_id(sequence_id: str) -> int:
    """First 8 bytes of the id's SHA-256, little-endian: splits, look-ups and digests use it."""
    return int.from_bytes(hashlib.sha256(sequence_id.encode()).digest()[:8], "little")


def unit_index(sequence_id: str, *, generation: int, num_units: int) -> int:
    """The unit of a generation that a sequence belongs to; salted, so generations differ."""
    salted = generation.to_bytes(4, "little") + sequence_id.encode()
    return int.from_bytes(hashlib.sha256(salted).digest()[:8], "little") % num_units


def is_held_out(sequence_id: str, fraction: float) -> bool:
    """Whether no drafter is trained on this sequence; depends on the id and fraction only."""
    return hash_id(sequence_id) < math.floor(fraction * 2**64)


def held_out_mask(
    id_hashes: UInt64[np.ndarray, " sequences"], fraction: float
) -> Bool[np.ndarray, " sequences"]:
    """`is_held_out` for many sequences by their `hash_id`."""
    return id_hashes < np.uint64(math.floor(fraction * 2**64))


def ids_digest(sequence_ids: Iterable[str]) -> str:
    """SHA-256 of the sorted ids, each ended by a newline."""
    joined = "".join(f"{sequence_id}\n" for sequence_id in sorted(sequence_ids))
    return hashlib.sha256(joined.encode()).hexdigest()
