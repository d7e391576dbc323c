from pathlib import Path

import numpy as np
import pytest

from storage.errors import DamagedShardError
from storage.files import LocalFiles
from storage.plan import (
    complete_generations,
    create_generation,
    planned_counts,
    read_generation,
)
from storage.schema import unit_index


def test_a_plan_is_read_as_it_was_made(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    ids = sorted(f"ü{i}" for i in range(50))
    assert create_generation(files, 0, ids, num_units=4)
    assert not create_generation(files, 0, ids[1:], num_units=4)
    units = read_generation(files, 0)
    assert sorted(i for members in units.values() for i in members) == ids
    for unit, members in units.items():
        assert members == sorted(members)
        for name in members:
            assert unit.index == unit_index(name, generation=0, num_units=4)


def test_many_units_may_stay_empty(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    create_generation(files, 0, ["a", "b"], num_units=1000)
    assert planned_counts(files) == [len(read_generation(files, 0))]


def test_generations_are_complete_from_the_first_on(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    for number in range(3):
        create_generation(files, number, [f"{number}-{i}" for i in range(40)], num_units=2)
    assert planned_counts(files) == [2, 2, 2]
    for committed, expected in (([], 0), ([0], 0), ([0, 0], 1), ([0, 0, 2, 2], 1)):
        shards = np.array(committed, dtype=np.int32)
        assert complete_generations(files, shards) == expected


def test_a_damaged_list_is_found(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    create_generation(files, 0, ["a", "b"], num_units=1)
    (path,) = (tmp_path / "plans").iterdir()
    path.write_bytes(b"a\nc\n")
    with pytest.raises(DamagedShardError, match="digest"):
        read_generation(files, 0)
    path.unlink()
    with pytest.raises(DamagedShardError, match="missing"):
        read_generation(files, 0)
