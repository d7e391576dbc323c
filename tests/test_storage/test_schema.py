from collections.abc import Iterable
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import IdentityMismatchError
from storage.schema import (
    LayerRecord,
    StoreIdentity,
    UnitId,
    among_units,
    check_same_identity,
    format_units,
    hash_id,
    held_out_mask,
    is_held_out,
    layer_name,
    unit_index,
)


def columns(pairs: Iterable[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    generation, index = np.array(sorted(pairs), dtype=np.int32).reshape(-1, 2).T
    return generation, index


def test_runs_of_units_are_joined() -> None:
    pairs = [(0, 0), (0, 1), (0, 2), (0, 7), (1, 8), (1, 9)]
    assert format_units(*columns(pairs)) == "0.0-2,0.7,1.8-9"
    assert format_units(*columns([])) == ""


@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 40))))
def test_units_survive_their_text(pairs: set[tuple[int, int]]) -> None:
    units = {UnitId(*pair) for pair in pairs}
    text = format_units(*columns(pairs))
    everything = [(generation, index) for generation in range(4) for index in range(41)]
    found = among_units(text, *columns(everything))
    assert {pair for pair, is_in in zip(everything, found, strict=True) if is_in} == pairs
    assert {UnitId.parse(str(unit)) for unit in units} == units


def test_units_order_by_number() -> None:
    assert UnitId(0, 99_999) < UnitId(0, 100_000) < UnitId(1, 0)
    assert str(UnitId(0, 12)) == "00000-00012"


@given(st.lists(st.text(), max_size=20), st.floats(0, 0.99))
def test_the_split_is_the_same_by_id_and_by_hash(ids: list[str], fraction: float) -> None:
    hashes = np.array([hash_id(name) for name in ids], dtype=np.uint64)
    mask = held_out_mask(hashes, fraction)
    assert mask.tolist() == [is_held_out(name, fraction) for name in ids]


def test_hashes_are_the_same_for_ever() -> None:
    # Splits of stores on disk depend on these.
    assert hash_id("sequence") == 0x6D7D7108C2C737BF
    assert unit_index("sequence", generation=1, num_units=1000) == 61


def test_identity_and_layers_survive_json(making: SimpleNamespace) -> None:
    identity = making.make_identity(template_arguments={"tools": [1, {"a": None}]})
    assert StoreIdentity.from_json(identity.to_json()) == identity
    record = LayerRecord(name="9", encoding="x", hidden_size=2, channel_scales=(0.1, 3e-7))
    assert LayerRecord.from_json(record.to_json()) == record
    assert layer_name(9) == "9"


def test_fields_that_only_the_store_knows_are_listed_too(making: SimpleNamespace) -> None:
    identity = making.make_identity()
    with pytest.raises(IdentityMismatchError, match="new_field: store has 3, this run has None"):
        check_same_identity({**identity.to_json(), "new_field": 3}, identity, place="x")
