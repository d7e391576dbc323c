from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.commits import (
    CommitRecord,
    committed_units,
    layers_of,
    pack_uint32,
    read_commit,
    unpack_uint32,
)
from storage.errors import StoreError
from storage.files import LocalFiles
from storage.schema import ids_digest


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_packed_values_survive(values: list[int]) -> None:
    array = np.array(values, dtype=np.uint32)
    np.testing.assert_array_equal(unpack_uint32(pack_uint32(array)), array)


def test_commits_survive_json(filled_dir: Path) -> None:
    files = LocalFiles(filled_dir)
    for unit in committed_units(files):
        commit = read_commit(files, unit)
        assert CommitRecord.from_json(commit.to_json()).to_json() == commit.to_json()
        assert commit.to_json()["ids_sha256"] == ids_digest(commit.sequence_ids)
        assert layers_of(files, unit) == {"1", "9", "lm_head_input"}


def test_an_unknown_profile_is_refused(filled_dir: Path) -> None:
    files = LocalFiles(filled_dir)
    value = read_commit(files, min(committed_units(files))).to_json()
    value["layers"]["9"]["profile"] = "folded"
    with pytest.raises(StoreError, match="profile 'folded'"):
        CommitRecord.from_json(value)
