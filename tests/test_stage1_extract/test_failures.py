"""Failures are judged over the whole store: all workers, all generations, again each time."""

from collections.abc import Callable
from typing import Any

import pytest

from stage1_extract.config import ExtractRun
from stage1_extract.extract import prepare_store, run_worker

MakeRun = Callable[..., ExtractRun]
Talks = Callable[..., list[dict[str, Any]]]


def unsupervised(count: int) -> list[dict[str, Any]]:
    return [{"id": f"u{index}", "token_ids": [5, 6], "loss_mask": [0, 1]} for index in range(count)]


def exit_codes(run: ExtractRun, *, num_workers: int) -> list[int]:
    prepare_store(run)
    return [
        run_worker(run, worker_index=index, num_workers=num_workers) for index in range(num_workers)
    ]


@pytest.mark.parametrize(("limit", "exit_code"), [(0.07, 1), (0.08, 0)])
def test_every_worker_judges_the_whole_store(
    make_run: MakeRun, talks: Talks, limit: float, exit_code: int
) -> None:
    """2 of 26 failed, wherever they were: 7.7%."""
    run = make_run(*talks(24), *unsupervised(2), extract={"max_failed_fraction": limit})
    assert exit_codes(run, num_workers=3) == [exit_code] * 3


def test_every_later_extraction_says_it_again(
    make_run: MakeRun, talks: Talks, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(*talks(24), *unsupervised(2))
    assert exit_codes(run, num_workers=1) == [1]
    capsys.readouterr()
    assert exit_codes(run, num_workers=1) == [1]
    output = capsys.readouterr()
    assert "all units are committed" in output.out
    assert (
        "7.7% of 26 sequences failed, more than extract.max_failed_fraction = 5.0%:"
        " 2 x no supervised pair of tokens; for example u0, u1"
    ) in output.err


def test_generations_are_judged_together(make_run: MakeRun, talks: Talks) -> None:
    assert exit_codes(make_run(*talks(24), *unsupervised(2)), num_workers=1) == [1]
    assert exit_codes(make_run(*talks(60), *unsupervised(2)), num_workers=1) == [0]


def test_what_a_setting_leaves_out_counts_on_neither_side(make_run: MakeRun, talks: Talks) -> None:
    data = {"max_sequence_tokens": 40, "long_conversations": "skip"}
    run = make_run(*talks(10), data=data, extract={"max_failed_fraction": 0.0})
    assert exit_codes(run, num_workers=1) == [0]
    # Six of the ten talks are left out; of the four others and one more, one failed.
    failing = {"max_failed_fraction": 0.19}
    run = make_run(*talks(10), *unsupervised(1), data=data, extract=failing, place="failing")
    assert exit_codes(run, num_workers=1) == [1]
