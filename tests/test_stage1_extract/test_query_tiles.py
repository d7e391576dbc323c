"""Query tiles: every query once, within its sequence; those with most keys first."""

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from stage1_extract.query_tiles import QUERY_TILE, max_tiles, tiles_of

lengths = st.lists(st.integers(0, 3 * QUERY_TILE), min_size=1, max_size=12)


@given(lengths)
def test_every_query_is_in_one_tile_of_its_sequence(lengths: list[int]) -> None:
    starts = list(accumulate(lengths, initial=0))
    sequence_of = [index for index, length in enumerate(lengths) for _ in range(length)]
    seen = []
    for first, query, end in tiles_of(starts).tolist():
        tokens = range(query, min(query + QUERY_TILE, end))
        assert {sequence_of[token] for token in tokens} == {sequence_of[first]}
        assert (first, end) in list(pairwise(starts))
        seen += tokens
    assert sorted(seen) == list(range(starts[-1]))


@given(lengths)
def test_the_longest_way_comes_first(lengths: list[int]) -> None:
    rows = tiles_of(list(accumulate(lengths, initial=0))).tolist()
    ways = [query - first for first, query, _ in rows]
    assert ways == sorted(ways, reverse=True)


@given(lengths)
def test_a_table_of_fixed_length_ends_with_tiles_of_nothing(lengths: list[int]) -> None:
    starts = list(accumulate(lengths, initial=0))
    rows = tiles_of(starts)
    most = max_tiles(starts[-1], num_sequences=len(lengths))
    assert len(rows) <= most
    table = tiles_of(starts, num_tiles=most)
    assert table[: len(rows)].tolist() == rows.tolist()
    assert not table[len(rows) :].any()
