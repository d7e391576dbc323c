"""What a step learned, as sums: sums of steps and of processes are sums of the whole.

The *simulated* acceptance length is teacher-forced: blocks are drafted at the training anchors and
compared with the sequence's own tokens. It estimates what decoding would accept; the walk and real
decoding measure it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class BlockSums:
    """Sums over blocks; add those of several batches with `+`."""

    weighted_loss: Float[Tensor, ""]
    weight: Float[Tensor, ""]
    num_rows: Int[Tensor, "block_size"]
    """Labels that counted, by offset."""
    num_correct: Int[Tensor, "block_size"]
    """Labels that the drafter ranks first, by offset."""
    num_reached: Int[Tensor, "block_size"]
    """Blocks whose labels up to the offset all count and are right before it."""
    num_accepted: Int[Tensor, "block_size"]
    """Those of `num_reached` that are right at the offset too."""

    def __add__(self, other: "BlockSums") -> "BlockSums":
        """Sums of both."""
        return BlockSums(**{name: getattr(self, name) + getattr(other, name) for name in _FIELDS})

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "BlockSums":
        """The same sums in another place.

        Args:
            device: where.
            non_blocking: does not wait: the sums hold once the device has come so far.
        """
        moved = {
            name: getattr(self, name).to(device, non_blocking=non_blocking) for name in _FIELDS
        }
        return BlockSums(**moved)


_FIELDS = tuple(BlockSums.__dataclass_fields__)


def block_sums(
    *,
    row_loss: Float[Tensor, "rows"],
    is_correct: Bool[Tensor, "rows"],
    row_weight: Float[Tensor, "rows"],
    row_index: Int[Tensor, "rows"],
    num_blocks: int,
    block_size: int,
) -> BlockSums:
    """Sums up one batch without waiting for the device.

    Args:
        row_loss: loss of each row that counts.
        is_correct: whether greedy drafting gets the row's label.
        row_weight: weight of each row in the loss.
        row_index: block * block_size + offset of each row.
        num_blocks: blocks of the batch, padded ones included.
        block_size: tokens of a block.
    """
    counts = _grid(torch.ones_like(is_correct), row_index, num_blocks, block_size)
    correct = _grid(is_correct, row_index, num_blocks, block_size)
    # Offset 0 is the anchor: always known.
    counted_so_far = counts[:, 1:].long().cumprod(dim=1)
    correct_so_far = correct[:, 1:].long().cumprod(dim=1)
    correct_before = torch.cat((torch.ones_like(correct_so_far[:, :1]), correct_so_far), dim=1)
    reached = counted_so_far * correct_before[:, :-1]
    anchor = reached.new_zeros(1)
    return BlockSums(
        weighted_loss=(row_loss * row_weight).sum(),
        weight=row_weight.sum(),
        num_rows=counts.sum(dim=0),
        num_correct=correct.sum(dim=0),
        num_reached=torch.cat((anchor, reached.sum(dim=0))),
        num_accepted=torch.cat((anchor, (reached * correct_so_far).sum(dim=0))),
    )


def total(sums: Iterable[BlockSums]) -> BlockSums:
    """Adds up one or more sums."""
    first, *others = sums
    for other in others:
        first = first + other
    return first


def summarize(sums: BlockSums) -> dict[str, Any]:
    """Gives the numbers people read: loss, accuracy by offset, simulated acceptance length."""
    sums = sums.to("cpu")
    num_rows = sums.num_rows[1:].double()
    accuracy = sums.num_correct[1:].double() / num_rows.clamp(min=1)
    return {
        "loss": float(sums.weighted_loss / sums.weight.clamp(min=1e-30)),
        "accuracy": float(sums.num_correct.sum() / num_rows.sum().clamp(min=1)),
        "accuracy_by_offset": [round(value, 6) for value in accuracy.tolist()],
        "simulated_acceptance_length": simulated_acceptance_length(sums),
    }


def simulated_acceptance_length(sums: BlockSums) -> float:
    """Gives 1 + the expected number of accepted tokens under teacher forcing.

    Blocks cut short by the end of an answer still tell about their first offsets: the chance to
    pass offset k is the product of the pass rates up to k among the blocks that reach it
    (Kaplan and Meier's estimator for censored lifetimes).
    """
    rate = sums.num_accepted[1:].double() / sums.num_reached[1:].double().clamp(min=1)
    return float(1 + rate.cumprod(dim=0).sum())


def _grid(
    rows: Bool[Tensor, "rows"], row_index: Tensor, num_blocks: int, block_size: int
) -> Bool[Tensor, "blocks block_size"]:
    grid = torch.zeros(num_blocks * block_size, dtype=torch.bool, device=rows.device)
    return grid.index_copy(0, row_index, rows).view(num_blocks, block_size)
