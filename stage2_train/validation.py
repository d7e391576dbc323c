"""Validation in the training process: loss and exact greedy acceptance on held-out sequences."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64

from stage2_train.batches import draw_window, pack
from stage2_train.config import LossConfig
from stage2_train.data import BatchMaker
from stage2_train.decode import LayerDecoder
from stage2_train.drafter import Drafter
from stage2_train.metrics import summarize, total
from stage2_train.ranks import ALONE, Ranks
from stage2_train.step import DraftPath, batch_loss
from stage2_train.target_head import TargetHead
from stage2_train.walk import Walk, walk_store
from storage.reader import Snapshot
from storage.schema import hash_id

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
    decoders: Sequence[LayerDecoder],
    batches: BatchMaker,
    num_sequences: int,
    loss: LossConfig,
    fast_path: DraftPath | None = None,
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """Gives held-out loss, accuracy and acceptance; empty where nothing is held out.

    Ranks share the sequences out, and each gets what all found. None waits for another before its
    own share is done: the drafter must be whole on each.
    """
    chosen = held_out_sequences(snapshot, limit=num_sequences)
    if len(chosen) == 0:
        return {}
    windows = (
        draw_window(
            index,
            int(snapshot.num_tokens[index]),
            window_tokens=batches.window_tokens,
            seed=batches.seed,
            epoch=VALIDATION_EPOCH,
            sequence_id=snapshot.sequence_id,
        )
        for index in chosen.tolist()
    )
    planned = list(pack(windows, batch_tokens=batches.batch_tokens))[ranks.rank :: ranks.size]
    sums = [
        batch_loss(
            drafter,
            batch,
            head=head,
            decoders=decoders,
            chunk_rows=loss.chunk_rows,
            kind=loss.kind,
            fast_path=fast_path,
        ).sums.to("cpu")
        for batch in batches.batches(snapshot, planned, epoch=VALIDATION_EPOCH)
    ]
    walked = walk_store(drafter, head, snapshot, chosen[ranks.rank :: ranks.size].tolist())
    lengths = [part for of_rank in ranks.gather(walked.acceptance_lengths) for part in of_rank]
    everywhere = [part for of_rank in ranks.gather(sums) for part in of_rank]
    return summarize(total(everywhere)) | walk_summary(
        Walk(acceptance_lengths=lengths, block_size=walked.block_size)
    )


def walk_summary(walked: Walk) -> dict[str, Any]:
    """Gives what a walk found; empty where no held-out answer is greedy."""
    num_walked = sum(1 for lengths in walked.acceptance_lengths if lengths)
    if num_walked == 0:
        return {}
    return {
        "acceptance_length": walked.acceptance_length,
        "accepted_by_offset": walked.accepted_by_offset,
        "num_walked": num_walked,
    }
