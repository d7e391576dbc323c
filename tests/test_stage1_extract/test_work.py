"""Work: shares cover everything, tails are taken from their ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage1_extract.work import unit_order


@given(num_units=st.integers(0, 40), num_workers=st.integers(1, 9), data=st.data())
def test_every_worker_would_do_all_units_once(
    num_units: int, num_workers: int, data: st.DataObject
) -> None:
    units = list(range(num_units))
    worker = data.draw(st.integers(0, num_workers - 1))
    order = unit_order(units, worker_index=worker, num_workers=num_workers)
    assert sorted(order) == units
    own = units[worker::num_workers]
    assert order[: len(own)] == own


def test_first_shares_are_disjoint() -> None:
    shares = [unit_order(range(10), worker_index=i, num_workers=3)[:3] for i in range(3)]
    assert shares == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_others_are_helped_from_their_tail() -> None:
    assert unit_order(list(range(6)), worker_index=1, num_workers=2) == [1, 3, 5, 4, 2, 0]


@pytest.mark.parametrize("worker_index", [-1, 2])
def test_a_worker_that_does_not_exist_is_refused(worker_index: int) -> None:
    with pytest.raises(ValueError, match="expected 0 to 1"):
        unit_order([1, 2], worker_index=worker_index, num_workers=2)
