"""Anchors, labels and weights: which blocks of a sequence are trained, and on what.

A block is an anchor (a position whose token is known) and the `block_size - 1` positions after it.
An anchor and its successor are both supervised. Everything here is a pure function; anchors depend
on (seed, epoch, sequence id) and on how many the batch can give the sequence, nothing else.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int64, Integer

_GAMMA_OF_BLOCK_SIZE = {16: 7.0, 10: 5.0, 8: 4.0}


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The blocks of one packed batch, in order of their anchors; padded ones come last.

    A padded block sees no context and has no label.
    """

    context_start: Int64[np.ndarray, "blocks"]
    """First token of the anchor's sequence, as a place in the batch."""
    context_stop: Int64[np.ndarray, "blocks"]
    """The anchor, as a place in the batch."""
    position: Int64[np.ndarray, "blocks"]
    """The anchor's place in its sequence."""
    anchor_token_id: Int64[np.ndarray, "blocks"]
    label: Int64[np.ndarray, "blocks block_size"]
    """Token to draft at each offset; 0 where `weight` is 0."""
    weight: Float32[np.ndarray, "blocks block_size"]
    """Weight of each label in the loss, not normalised; 0 at offset 0."""

    @property
    def num_valid(self) -> int:
        """Blocks that are not padding."""
        return int((self.weight > 0).any(axis=1).sum())


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """What the blocks of one packed sequence are made from."""

    sequence_id: str
    token_ids: Integer[np.ndarray, "tokens"]
    loss_mask: Bool[np.ndarray, "tokens"]
    first_position: int = 0
    """Place of the first token in its sequence; above 0 for a window of a long one."""


def random_generator(*parts: object) -> np.random.Generator:
    """Gives a generator that depends on the parts alone, the same on every machine."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))


def eligible_anchors(loss_mask: Bool[np.ndarray, "tokens"]) -> Int64[np.ndarray, "anchors"]:
    """Gives the positions that are supervised and whose next position is supervised too."""
    return np.flatnonzero(loss_mask[:-1] & loss_mask[1:]).astype(np.int64)


def share_anchors(
    num_eligible: Int64[np.ndarray, "sequences"], *, num_anchors: int
) -> Int64[np.ndarray, "sequences"]:
    """Shares anchors out over sequences in proportion to their eligible positions.

    No sequence gets more than it has. Where there are enough anchors for all, each sequence that
    has an eligible position gets one at least, so none starves.
    """
    if num_eligible.sum() <= num_anchors:
        return num_eligible.copy()
    floor = np.minimum(num_eligible, 1)
    if floor.sum() > num_anchors:
        floor = np.zeros_like(num_eligible)
    remaining = num_anchors - floor.sum()
    capacity = num_eligible - floor
    exact = remaining * capacity / capacity.sum()
    share = np.floor(exact).astype(np.int64)
    # Largest remainders first; a stable sort makes ties go to the earlier sequence.
    by_remainder = np.argsort(share - exact, kind="stable")
    share[by_remainder[: remaining - share.sum()]] += 1
    return np.asarray(share + floor, dtype=np.int64)


def choose_anchors(
    eligible: Int64[np.ndarray, "anchors"],
    *,
    num_chosen: int,
    seed: int,
    epoch: int,
    sequence_id: str,
) -> Int64[np.ndarray, "chosen"]:
    """Draws anchors without replacement, in ascending order.

    Fewer chosen ones are a subset of more chosen ones, whatever the batch.
    """
    if num_chosen >= len(eligible):
        return eligible
    generator = random_generator("anchors", seed, epoch, sequence_id)
    return np.sort(generator.permutation(eligible)[:num_chosen])


def offset_weights(
    block_size: int, *, gamma: float | None = None, min_weight: float = 0.0
) -> Float32[np.ndarray, "block_size"]:
    """Gives the weight exp(-(k-1)/gamma) of each offset k; 0 for the anchor and below `min_weight`.

    `gamma` defaults to the DFlash paper's 7, 5, 4 for blocks of 16, 10, 8 and to half the block
    size for others.
    """
    if gamma is None:
        gamma = _GAMMA_OF_BLOCK_SIZE.get(block_size, block_size / 2)
    weight = np.exp(-(np.arange(block_size) - 1) / gamma).astype(np.float32)
    weight[weight < min_weight] = 0.0
    weight[0] = 0.0
    return weight


def label_blocks(
    anchors: Int64[np.ndarray, "blocks"],
    *,
    token_ids: Integer[np.ndarray, "tokens"],
    loss_mask: Bool[np.ndarray, "tokens"],
    block_size: int,
    stop_at_unsupervised: bool = False,
) -> tuple[Int64[np.ndarray, "blocks block_size"], Bool[np.ndarray, "blocks block_size"]]:
    """Gives each block's labels (the token at anchor + offset) and which of them count.

    A label counts where it lies inside the sequence and is supervised; with
    `stop_at_unsupervised` only those before the block's first unsupervised one do. The anchor
    itself never counts.
    """
    place = anchors[:, None] + np.arange(block_size)
    inside = place < len(token_ids)
    place = np.minimum(place, len(token_ids) - 1)
    counts = inside & loss_mask[place]
    if stop_at_unsupervised:
        counts[:, 1:] = np.logical_and.accumulate(counts[:, 1:], axis=1)
    counts[:, 0] = False
    return np.where(counts, token_ids[place], 0).astype(np.int64), counts


def make_blocks(
    packed: Sequence[Supervision],
    *,
    num_anchors: int,
    weight_of_offset: Float32[np.ndarray, "block_size"],
    seed: int,
    epoch: int,
    stop_at_unsupervised: bool = False,
) -> Blocks:
    """Makes the blocks of one packed batch: always `num_anchors`, padded with invalid ones.

    Args:
        packed: the sequences of the batch, in their order in it.
        num_anchors: blocks to give.
        weight_of_offset: what `offset_weights` gave.
        seed: seed of the run.
        epoch: pass over the data.
        stop_at_unsupervised: see `label_blocks`.
    """
    eligible = [eligible_anchors(sequence.loss_mask) for sequence in packed]
    shares = share_anchors(np.array([len(e) for e in eligible], np.int64), num_anchors=num_anchors)
    batch_start = 0
    parts: list[Blocks] = []
    for sequence, candidates, share in zip(packed, eligible, shares, strict=True):
        anchors = choose_anchors(
            candidates,
            num_chosen=int(share),
            seed=seed,
            epoch=epoch,
            sequence_id=sequence.sequence_id,
        )
        parts.append(
            blocks_at(
                anchors,
                sequence,
                batch_start=batch_start,
                weight_of_offset=weight_of_offset,
                stop_at_unsupervised=stop_at_unsupervised,
            )
        )
        batch_start += len(sequence.token_ids)
    num_padded = num_anchors - sum(len(part.position) for part in parts)
    parts.append(_padding(num_padded, batch_start=batch_start, block_size=len(weight_of_offset)))
    return concatenate(parts)


def blocks_at(
    anchors: Int64[np.ndarray, "blocks"],
    sequence: Supervision,
    *,
    batch_start: int,
    weight_of_offset: Float32[np.ndarray, "block_size"],
    stop_at_unsupervised: bool = False,
) -> Blocks:
    """Makes the blocks of one sequence at given anchors.

    Args:
        anchors: places in `sequence.token_ids`, ascending.
        sequence: tokens and loss mask.
        batch_start: place of the sequence's first token in the batch.
        weight_of_offset: what `offset_weights` gave.
        stop_at_unsupervised: see `label_blocks`.
    """
    label, counts = label_blocks(
        anchors,
        token_ids=sequence.token_ids,
        loss_mask=sequence.loss_mask,
        block_size=len(weight_of_offset),
        stop_at_unsupervised=stop_at_unsupervised,
    )
    return Blocks(
        context_start=np.full(len(anchors), batch_start, np.int64),
        context_stop=batch_start + anchors,
        position=sequence.first_position + anchors,
        anchor_token_id=sequence.token_ids[anchors].astype(np.int64),
        label=label,
        weight=np.where(counts, weight_of_offset, np.float32(0.0)),
    )


def concatenate(parts: Sequence[Blocks]) -> Blocks:
    """Joins blocks of one batch, in order."""
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in Blocks.__dataclass_fields__
    }
    return Blocks(**joined)


def _padding(num_blocks: int, *, batch_start: int, block_size: int) -> Blocks:
    place = np.full(num_blocks, batch_start, np.int64)
    zeros = np.zeros(num_blocks, np.int64)
    return Blocks(
        context_start=place,
        context_stop=place.copy(),
        position=zeros,
        anchor_token_id=zeros.copy(),
        label=np.zeros((num_blocks, block_size), np.int64),
        weight=np.zeros((num_blocks, block_size), np.float32),
    )
