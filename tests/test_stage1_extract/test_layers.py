"""Layers: the default spread and every wrong choice."""

import pytest

from stage1_extract.layers import captured_layers, spread_layer_ids


@pytest.mark.parametrize(
    ("num_target_layers", "num_captured", "expected"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (30, 5, [1, 8, 14, 20, 27]),
        (36, 1, [18]),
        (4, 1, [2]),
        (6, 2, [1, 3]),
    ],
)
def test_the_spread_of_the_official_drafters(
    num_target_layers: int, num_captured: int, expected: list[int]
) -> None:
    assert spread_layer_ids(num_target_layers, num_captured) == expected


def captured(ids: tuple[int, ...] | None, *, lm_head_input: bool = False) -> list[str]:
    return captured_layers(ids, num_layers=5, lm_head_input=lm_head_input, num_target_layers=36)


def test_names_are_ordered() -> None:
    assert captured((9, 1)) == ["1", "9"]
    assert captured(None, lm_head_input=True) == ["1", "9", "17", "25", "33", "lm_head_input"]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((0, 36), "36 out of range; the target has decoder layers 0 to 35"),
        ((-1,), "-1 out of range"),
        ((3, 3), "names a layer twice"),
        ((), "is empty"),
    ],
)
def test_wrong_ids_are_refused(ids: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        captured(ids)


def test_a_shallow_target_is_refused() -> None:
    with pytest.raises(ValueError, match="the target has 4 layers, too few"):
        spread_layer_ids(4, 5)
