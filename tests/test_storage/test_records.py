import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import DamagedShardError
from storage.records import dump_record, parse_record

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**50), 2**50) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON_VALUES, max_size=4))
def test_records_survive_and_are_json(value: dict[str, Any]) -> None:
    data = dump_record(value)
    assert parse_record(data, place="x") == value
    assert json.loads(data)["record"] == value


@given(st.data())
def test_every_flipped_bit_and_every_cut_is_found(data: Any) -> None:
    record = dump_record({"layers": ["1", "ä"], "num_tokens": 12})
    bit = data.draw(st.integers(0, len(record) * 8 - 1))
    flipped = bytearray(record)
    flipped[bit // 8] ^= 1 << (bit % 8)
    cut = record[: data.draw(st.integers(0, len(record) - 1))]
    for damaged in (bytes(flipped), cut):
        with pytest.raises(DamagedShardError, match="the place is damaged"):
            parse_record(damaged, place="the place")
