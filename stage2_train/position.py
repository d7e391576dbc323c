"""Where a training run stands: a few integers, enough to go on exactly as if never stopped."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Position:
    """The next batch to train, and the snapshot it is drawn from."""

    step: int = 0
    """Optimizer updates done."""
    epoch: int = 0
    batch: int = 0
    """Place of the next batch in its epoch, counted over all ranks."""
    num_tokens: int = 0
    """Tokens trained so far, a token of each epoch counted anew."""
    snapshot_id: str | None = None
    """Snapshot of the store that the epoch is drawn from; None before the first epoch."""

    def after_step(self, *, num_batches: int = 1, num_tokens: int = 0) -> "Position":
        """Gives the position after one more update, of so many batches and tokens."""
        return replace(
            self,
            step=self.step + 1,
            batch=self.batch + num_batches,
            num_tokens=self.num_tokens + num_tokens,
        )

    def next_epoch(self) -> "Position":
        """Gives the position at the start of the next epoch."""
        return replace(self, epoch=self.epoch + 1, batch=0, snapshot_id=None)

    def in_snapshot(self, snapshot_id: str) -> "Position":
        """Gives the same position, bound to a snapshot."""
        return replace(self, snapshot_id=snapshot_id)

    def to_json(self) -> dict[str, Any]:
        """Gives the position as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Position":
        """Reads what `to_json` gave."""
        return cls(**value)


def total_steps(
    position: Position,
    *,
    num_batches: int,
    batches_per_step: int,
    epochs: int,
    max_steps: int | None,
) -> int:
    """Gives the steps of the whole run, if later epochs have as many batches as this one.

    Depends on the epoch, not on the place in it: a resumed run finds the same number, unless it
    takes another number of batches a step.

    Args:
        position: where the run stands.
        num_batches: batches of this epoch.
        batches_per_step: batches of one update.
        epochs: passes over the data.
        max_steps: limit of the settings.
    """
    left_in_epoch = math.ceil((num_batches - position.batch) / batches_per_step)
    of_later_epoch = math.ceil(num_batches / batches_per_step)
    steps = position.step + left_in_epoch + of_later_epoch * (epochs - position.epoch - 1)
    return steps if max_steps is None else min(steps, max_steps)
