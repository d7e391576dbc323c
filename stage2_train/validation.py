"""Validation in the training process: loss and exact greedy acceptance on held-out sequences."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int64

from stage2_train.acceptance import accepted_by_offset, mean_acceptance_length
from stage2_train.batches import draw_window, pack
from stage2_train.collate import pack_layer
from stage2_train.data import READ_THREADS, BatchMaker
from stage2_train.drafter import Drafter
from stage2_train.metrics import summarize, total
from stage2_train.step import batch_loss, decode_features
from stage2_train.target_head import TargetHead
from stage2_train.walk import WalkSequence, walk
from storage.reader import SequenceStates, Snapshot
from storage.schema import hash_id
from storage.stream import read_ahead

# Sequences walked together: bounds the memory of a validation.
WALK_GROUP = 16
# Anchors of a validation are the same at every step, so that its losses can be compared.
VALIDATION_EPOCH = 0


def held_out_sequences(snapshot: Snapshot, *, limit: int) -> Int64[np.ndarray, "chosen"]:
    """Gives up to `limit` held-out sequences, the same ones however the store grew in between.

    Those with the smallest id hash are chosen, so a grown store changes few of them.
    """
    indices = np.flatnonzero(snapshot.held_out & (snapshot.num_supervised > 0))
    by_hash = sorted(indices.tolist(), key=lambda index: hash_id(snapshot.sequence_id(index)))
    return np.array(by_hash[:limit], np.int64)


@torch.no_grad()
def validate(
    drafter: Drafter,
    snapshot: Snapshot,
    *,
    head: TargetHead,
    encodings: Sequence[str],
    batches: BatchMaker,
    num_sequences: int,
    chunk_rows: int,
) -> dict[str, Any]:
    """Gives held-out loss, accuracy and acceptance; empty where nothing is held out."""
    chosen = held_out_sequences(snapshot, limit=num_sequences)
    if len(chosen) == 0:
        return {}
    windows = (
        draw_window(
            index,
            int(snapshot.num_tokens[index]),
            batch_tokens=batches.batch_tokens,
            seed=batches.seed,
            epoch=VALIDATION_EPOCH,
            sequence_id=snapshot.sequence_id,
        )
        for index in chosen.tolist()
    )
    planned = list(pack(windows, batch_tokens=batches.batch_tokens))
    sums = total(
        batch_loss(drafter, batch, head=head, encodings=encodings, chunk_rows=chunk_rows)[1]
        for batch in batches.batches(snapshot, planned, epoch=VALIDATION_EPOCH)
    )
    greedy = [index for index in chosen.tolist() if snapshot.greedy[index]]
    return summarize(sums) | walked_acceptance(
        drafter,
        snapshot,
        greedy,
        head=head,
        encodings=encodings,
        layer_names=batches.layer_names,
    )


def walked_acceptance(
    drafter: Drafter,
    snapshot: Snapshot,
    indices: Sequence[int],
    *,
    head: TargetHead,
    encodings: Sequence[str],
    layer_names: Sequence[str],
) -> dict[str, Any]:
    """Gives the exact greedy acceptance on the target's own greedy answers, by the walk."""
    lengths: list[list[int]] = []
    for group in _read_groups(snapshot, indices, layer_names):
        sequences = [_walk_sequence(drafter, sequence, encodings) for sequence in group]
        lengths += walk(drafter, head, sequences).acceptance_lengths
    if not any(lengths):
        return {}
    block_size = drafter.architecture.block_size
    return {
        "acceptance_length": mean_acceptance_length(lengths),
        "accepted_by_offset": accepted_by_offset(lengths, block_size=block_size),
        "num_walked": sum(1 for blocks in lengths if blocks),
    }


def last_answer(loss_mask: Bool[np.ndarray, "tokens"]) -> tuple[int, int]:
    """Gives the first token of the last supervised stretch, and the token after its end."""
    supervised = np.flatnonzero(loss_mask)
    stop = int(supervised[-1]) + 1
    before = np.flatnonzero(~loss_mask[:stop])
    return (int(before[-1]) + 1 if len(before) else 0), stop


def _read_groups(
    snapshot: Snapshot, indices: Sequence[int], layer_names: Sequence[str]
) -> Iterator[list[SequenceStates]]:
    groups = [indices[start : start + WALK_GROUP] for start in range(0, len(indices), WALK_GROUP)]
    reading = read_ahead(snapshot, groups, layers=layer_names, num_threads=READ_THREADS)
    with closing(reading):  # type: ignore[type-var]
        yield from reading


def _walk_sequence(
    drafter: Drafter, sequence: SequenceStates, encodings: Sequence[str]
) -> WalkSequence:
    start, stop = last_answer(sequence.loss_mask)
    weight = drafter.fc.weight
    layers = [
        pack_layer([encoded], num_tokens=len(sequence.token_ids)).to(weight.device)
        for encoded in sequence.states.values()
    ]
    states = decode_features(layers, encodings, hidden_size=weight.shape[0], dtype=weight.dtype)
    return WalkSequence(
        token_ids=sequence.token_ids[:stop].tolist(), answer_start=start, states=states[:stop]
    )
