"""The growing cache holds what transformers' own holds, and copies it rarely."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from stage1_extract.growing_cache import ROOM_TOKENS, growing_cache


def states(num_tokens: int, *, seed: int, num_rows: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num_rows, 2, num_tokens, 8, generator=generator) for _ in range(2)]


def test_it_holds_what_the_usual_cache_holds() -> None:
    usual, growing = DynamicCache(), growing_cache()
    for seed, num_tokens in enumerate((5, 1, 1, ROOM_TOKENS, 1, 2)):
        for layer in range(2):
            new = states(num_tokens, seed=10 * seed + layer)
            expected = usual.update(*new, layer)
            for one, other in zip(growing.update(*new, layer), expected, strict=True):
                assert torch.equal(one, other)
        assert growing.get_seq_length() == usual.get_seq_length()


@pytest.mark.parametrize(
    "change",
    [lambda held: held[[0, 2]], lambda held: held[:, :, 2:], lambda held: held.clone() * 2],
    ids=["rows dropped", "columns dropped", "replaced"],
)
def test_what_is_put_in_its_place_is_gone_on_from(change: Any) -> None:
    usual, growing = DynamicCache(), growing_cache()
    for cache in (usual, growing):
        cache.update(*states(5, seed=0), 0)
        layer = cache.layers[0]
        changed = change(layer.keys), change(layer.values)
        if cache is growing:
            layer.hold(*changed)
        else:
            layer.keys, layer.values = changed
    num_rows = growing.layers[0].keys.shape[0]
    for seed in (1, 2):
        new = states(1, seed=seed, num_rows=num_rows)
        pairs = zip(growing.update(*new, 0), usual.update(*new, 0), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_a_token_is_written_behind_the_others_which_stay_where_they_are() -> None:
    cache = growing_cache()
    places = set()
    for seed in range(ROOM_TOKENS):
        keys, _ = cache.update(*states(1, seed=seed), 0)
        places.add(keys.data_ptr())
    assert len(places) == 1


def test_what_was_replaced_takes_no_memory_any_more() -> None:
    """Not until the next token: by then all layers would be there twice."""
    cache = growing_cache()
    cache.update(*states(5, seed=0), 0)
    layer = cache.layers[0]
    layer.hold(layer.keys[[0, 2]], layer.values[[0, 2]])
    held = {name: each for name, each in vars(layer).items() if isinstance(each, Tensor)}
    assert held.keys() == {"keys", "values"}
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in held.values())
    assert not layer._buffers
