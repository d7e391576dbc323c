"""Query tiles: the pieces of packed sequences that the attention kernel works on. Pure."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Int32
from torch import Tensor

QUERY_TILE = 64
"""Queries of one program."""


def tiles_of(starts: Sequence[int], *, num_tiles: int | None = None) -> Int32[Tensor, "tiles 3"]:
    """Each tile's sequence start, first query and sequence end; those with most keys first.

    Args:
        starts: First token of each sequence, and the end of the last.
        num_tiles: Rows of the table, filled up with tiles of nothing; None fits it.
    """
    rows = [
        (first, query, end)
        for first, end in pairwise(starts)
        for query in range(first, end, QUERY_TILE)
    ]
    # What takes longest starts first, so that the GPU's units end together.
    rows.sort(key=lambda row: row[0] - row[1])
    table = torch.zeros(len(rows) if num_tiles is None else num_tiles, 3, dtype=torch.int32)
    table[: len(rows)] = torch.tensor(rows, dtype=torch.int32).reshape(-1, 3)
    return table


def max_tiles(row_tokens: int, *, num_sequences: int) -> int:
    """Tiles at most of a row with at most so many sequences: each may end with a part of one."""
    return row_tokens // QUERY_TILE + num_sequences
