"""Ahead: one item is made while the one before it is worked on; order and errors stay."""

import threading
from collections.abc import Iterator

import pytest

from stage1_extract.ahead import one_ahead


def test_each_item_comes_with_what_is_made_of_it() -> None:
    assert list(one_ahead(lambda item: item * 2, range(4))) == [(0, 0), (1, 2), (2, 4), (3, 6)]
    assert list(one_ahead(str, [])) == []


def test_the_next_one_is_made_meanwhile_and_no_more() -> None:
    made = {item: threading.Event() for item in range(4)}
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in made:
            taken.append(item)
            yield item

    def make(item: int) -> None:
        made[item].set()

    for item, _ in one_ahead(make, items()):
        assert taken == list(range(min(item + 2, 4)))
        if item < 3:
            assert made[item + 1].wait(timeout=60)


def test_an_error_is_raised_at_its_items_place() -> None:
    pairs = one_ahead(lambda item: 1 / item, [2, 1, 0, 4])
    assert next(pairs) == (2, 0.5)
    assert next(pairs) == (1, 1.0)
    with pytest.raises(ZeroDivisionError):
        next(pairs)
