"""Extraction's progress: the newest whole line of each worker counts, older runs do not."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from dflash_offline.progress import (
    ExtractionProgress,
    bar_columns,
    newest_line,
    plain_progress,
    total,
)


def metrics(*, time_s: float, num_sequences: int = 1, skipped: dict[str, int] | None = None) -> str:
    line = {
        "time_s": time_s,
        "num_sequences": num_sequences,
        "num_tokens": 10 * num_sequences,
        "num_bytes": 100 * num_sequences,
        "num_units": 1,
        "num_truncated": 0,
        "skipped": skipped or {},
    }
    return json.dumps(line) + "\n"


def test_a_line_still_being_written_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "worker.metrics.jsonl"
    path.write_text(metrics(time_s=1, num_sequences=3) + metrics(time_s=2)[:20])
    line = newest_line(path, behind_bytes=0)
    assert line is not None
    assert line["num_sequences"] == 3


def test_lines_of_an_earlier_run_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "worker.metrics.jsonl"
    earlier = metrics(time_s=1) + metrics(time_s=2)[:20]
    path.write_text(earlier)
    assert newest_line(path, behind_bytes=len(earlier)) is None
    path.write_text(earlier + metrics(time_s=0, num_sequences=7))
    line = newest_line(path, behind_bytes=len(earlier))
    assert line is not None
    assert line["num_sequences"] == 7
    assert newest_line(tmp_path / "absent", behind_bytes=0) is None


def test_totals_add_up_over_workers_and_reasons() -> None:
    lines = [
        json.loads(metrics(time_s=1, num_sequences=2, skipped={"too long": 1})),
        json.loads(metrics(time_s=1, num_sequences=3, skipped={"too long": 2, "NaN": 1})),
    ]
    totals = total(lines)
    assert (totals.num_sequences, totals.num_tokens, totals.num_done) == (5, 50, 9)
    assert totals.skipped == {"too long": 3, "NaN": 1}


def test_progress_sees_what_workers_write_after_it_began(tmp_path: Path) -> None:
    folder = tmp_path / "extract"
    folder.mkdir()
    with ExtractionProgress(run_dir=tmp_path, num_workers=2, num_sequences=9) as progress:
        (folder / "worker-00001.metrics.jsonl").write_text(metrics(time_s=0, num_sequences=4))
    assert progress.totals().num_sequences == 4


@pytest.mark.parametrize("width", [40, 80, 120])
def test_share_and_time_left_fit_any_terminal(width: int) -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=width, force_terminal=True, color_system=None)
    with Progress(*bar_columns(width), console=console) as bar:
        rates = "12,345 sequences, 9,876,543 tokens, 123,456.7 MB, 45,678 tok/s"
        bar.add_task("", total=100, completed=57, rates=rates)
    assert " 57%" in screen.getvalue()
    assert "left -:--:--" in screen.getvalue()


def test_a_task_without_a_terminal_says_now_and_then_how_far_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    times = iter([0.0, 1.0, 30.0, 31.0, 60.0])
    show = plain_progress("copying", clock=lambda: next(times))
    for num_done in (10, 50, 60, 80):
        show(num_done, 100)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "copying 50% | 50 of 100 | 30 s left",
        "copying 80% | 80 of 100 | 15 s left",
    ]
