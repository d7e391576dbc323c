"""Work: which units a worker does, in which order. Pure."""

from collections.abc import Sequence
from typing import TypeVar

Unit = TypeVar("Unit")


def unit_order(units: Sequence[Unit], *, worker_index: int, num_workers: int) -> list[Unit]:
    """All units in the order in which one worker looks at them.

    First its own share (every num_workers-th unit), then what others may have left over, each
    share from its tail, where its owner comes last. No claims are needed: whoever commits first
    wins, so a dead or slow worker's units are done by the others, and near the end a unit may be
    computed twice but is visible once.

    Args:
        units: All units of the store, the same list for every worker.
        worker_index: 0-based.
        num_workers: Workers of this run; a later run may have another number.

    Raises:
        ValueError: The index is not one of the workers'.
    """
    if not 0 <= worker_index < num_workers:
        raise ValueError(f"--worker {worker_index}: expected 0 to {num_workers - 1}")
    order = list(units[worker_index::num_workers])
    for step in range(1, num_workers):
        other = (worker_index + step) % num_workers
        order += reversed(units[other::num_workers])
    return order
