"""What was done between two reports, of one rank or of all, and how fast it was."""

from dataclasses import dataclass

from stage2_train.architecture import DrafterArchitecture
from stage2_train.clock import Moment
from stage2_train.collate import PackedBatch
from stage2_train.flops import step_flops
from stage2_train.metrics import BlockSums, total


@dataclass
class Interval:
    """What one rank did since the last report."""

    sums: BlockSums | None = None
    num_steps: int = 0
    num_tokens: int = 0
    num_blocks: int = 0
    num_flops: int = 0
    num_state_bytes: int = 0
    token_room: int = 0
    block_room: int = 0
    elapsed_s: float = 0.0
    wait_s: float = 0.0
    copy_s: float = 0.0

    def __add__(self, other: "Interval") -> "Interval":
        """Both ranks' work in the same steps; the slower reader sets the pace."""
        sums = [part for part in (self.sums, other.sums) if part is not None]
        return Interval(
            sums=total(sums) if sums else None,
            num_steps=max(self.num_steps, other.num_steps),
            num_tokens=self.num_tokens + other.num_tokens,
            num_blocks=self.num_blocks + other.num_blocks,
            num_flops=self.num_flops + other.num_flops,
            num_state_bytes=self.num_state_bytes + other.num_state_bytes,
            token_room=self.token_room + other.token_room,
            block_room=self.block_room + other.block_room,
            elapsed_s=max(self.elapsed_s, other.elapsed_s),
            wait_s=max(self.wait_s, other.wait_s),
            copy_s=max(self.copy_s, other.copy_s),
        )


@dataclass(frozen=True, kw_only=True)
class Closed:
    """An interval that has ended for the host; the device may still be at its steps."""

    interval: Interval
    """Its sums are on their way to the host."""
    spans: list[tuple[Moment, Moment]]
    """The time of its steps, without pauses."""
    end: Moment
    arrived: Moment
    """When everything has come to the host."""


def interval_of(
    batch: PackedBatch, sums: BlockSums, *, architecture: DrafterArchitecture
) -> Interval:
    """Gives the part of a step that one batch is."""
    num_flops = step_flops(
        architecture,
        num_context_tokens=batch.num_real_tokens,
        num_blocks=batch.num_real_blocks,
        num_rows=len(batch.row_index),
        num_seen_pairs=batch.num_seen_pairs,
    )
    return Interval(
        sums=sums,
        num_tokens=batch.num_real_tokens,
        num_blocks=batch.num_real_blocks,
        num_flops=num_flops,
        num_state_bytes=batch.num_state_bytes,
        token_room=len(batch.positions),
        block_room=len(batch.context_start),
    )


def rates(done: Interval, *, block_size: int) -> dict[str, float]:
    """Gives how fast the steps were, how full, and where their time went."""
    elapsed_s = done.elapsed_s
    return {
        "step_s": elapsed_s / done.num_steps,
        "tokens_per_s": done.num_tokens / elapsed_s,
        "block_tokens_per_s": done.num_blocks * block_size / elapsed_s,
        "blocks_per_s": done.num_blocks / elapsed_s,
        **time_shares(done),
        "token_fill_fraction": done.num_tokens / done.token_room,
        "block_fill_fraction": done.num_blocks / done.block_room,
        "flops_per_s": done.num_flops / elapsed_s,
    }


def time_shares(done: Interval) -> dict[str, float]:
    """Gives where the time went, and what the store gave of the bytes that the drafter needs.

    Waiting and computing are shares of the whole. Copying runs beside computing, so it is none of
    them. The drafter needs its bytes in the time that it computes.
    """
    elapsed_s = done.elapsed_s
    computing_s = max(elapsed_s - done.wait_s, 1e-9)
    return {
        "wait_fraction": done.wait_s / elapsed_s,
        "compute_fraction": computing_s / elapsed_s,
        "copy_fraction": done.copy_s / elapsed_s,
        "read_bytes_per_s": done.num_state_bytes / elapsed_s,
        "read_bytes_per_s_needed": done.num_state_bytes / computing_s,
    }
