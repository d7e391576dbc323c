"""Failures: whether too many sequences of a store could not be extracted, over its whole life.

Judged from what the shards record, so it is the same whoever extracted them, in one go or in many,
and every later `extract` says it again.
"""

import sys
from collections import Counter
from pathlib import Path

from stage1_extract.config import ExtractRun
from stage1_extract.problems import WANTED_REASONS
from storage.reader import open_store
from storage.writer import WritableStore

EXIT_DONE = 0
EXIT_FAILED = 1

_SHOWN_SEQUENCES = 3


def judge_extraction(store: WritableStore, run: ExtractRun) -> int:
    """Exit code of an extraction whose units are all committed, whoever committed them."""
    limit = run.extract.max_failed_fraction
    failed = too_many_failed(store, run.store_dir, max_failed_fraction=limit)
    return EXIT_FAILED if failed else EXIT_DONE


def too_many_failed(
    store: WritableStore, store_dir: Path | str, *, max_failed_fraction: float
) -> bool:
    """Whether the share of failed sequences among all planned ones is above a limit; says so.

    Sequences that a setting leaves out are no failures. Call it when every unit is committed.

    Args:
        store: The store, open for writing.
        store_dir: Where it lies.
        max_failed_fraction: The limit, 0 to 1.
    """
    num_planned = sum(len(store.sequences_of(unit)) for unit in store.units())
    snapshot = open_store(store_dir).snapshot()
    # What was skipped for whatever reason; only where that is too much are the reasons read.
    if num_planned - snapshot.num_sequences <= max_failed_fraction * num_planned:
        return False
    skipped = snapshot.skipped()
    failed = {name: why for name, why in skipped.items() if why not in WANTED_REASONS}
    # Planned, but not what was left out on purpose.
    num_wanted = num_planned - (len(skipped) - len(failed))
    if len(failed) <= max_failed_fraction * num_wanted:
        return False
    reasons = ", ".join(f"{count} x {why}" for why, count in Counter(failed.values()).most_common())
    print(
        f"{len(failed) / num_wanted:.1%} of {num_wanted} sequences failed, more than"
        f" extract.max_failed_fraction = {max_failed_fraction:.1%}: {reasons}; for example"
        f" {', '.join(sorted(failed)[:_SHOWN_SEQUENCES])}",
        file=sys.stderr,
        flush=True,
    )
    return True
