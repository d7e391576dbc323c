"""What `store import` and `store export` print."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_offline.config import RunConfig, extract_run, store_dir_of
from dflash_offline.export_states import export_store
from dflash_offline.import_cache import ImportReport, ImportSettings, import_cache
from dflash_offline.progress import task_progress
from stage1_extract.failures import judge_extraction
from storage.verify import verify_store
from storage.writer import open_for_writing


def parse_layer_ids(text: str) -> tuple[int, ...]:
    """Decoder layers written as `1,9,17`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"--layers {text}: expected numbers such as 1,9,17") from error


def import_into_run(config: RunConfig, **settings: Any) -> int:
    """Imports a cache, checks every byte of the store and says what the cache lacked.

    Returns:
        0, or 1 when more sequences were skipped than `extract.max_failed_fraction` allows.
    """
    run = extract_run(config)
    with task_progress("importing") as progress:
        report = import_cache(run, ImportSettings(**settings), progress=progress)
    place = store_dir_of(config)
    with task_progress("checking every chunk") as progress:
        verdict = verify_store(place, full=True, progress=progress)
    if not verdict.ok:
        raise ValueError(f"{place}: {verdict.problems[0]}; run `store repair`, then import again")
    print("\n".join(report_lines(report, place=place)), flush=True)
    return judge_extraction(open_for_writing(place), run)


def report_lines(report: ImportReport, *, place: object) -> list[str]:
    """The report as text."""
    lines = [
        f"{place}: {report.num_sequences:,} sequences, {report.num_tokens:,} tokens imported, "
        "every byte read back"
    ]
    for name, difference in report.differences.items():
        lines.append(f"layer {name}: differs from the target's own states by {difference:.2%}")
    if not report.differences:
        lines.append("states were not compared with the target's own")
    for reason, count in report.skipped.items():
        lines.append(f"skipped {count:,}: {reason}")
    lines.append(
        f"not recorded by the cache, taken from the run: {'; '.join(report.taken_from_run)}"
    )
    return lines


def export_to(store_dir: str, out_dir: Path, *, layers: Sequence[str] | None) -> None:
    """Exports a store and says how many files were written."""
    with task_progress("exporting") as progress:
        num_written = export_store(store_dir, out_dir, layers=layers, progress=progress)
    print(f"{out_dir}: {num_written:,} files written")
