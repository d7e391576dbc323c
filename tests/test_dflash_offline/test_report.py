"""The report is one well-formed page that holds what a run's files say, and loads nothing."""

import json
import math
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dflash_offline.config import RunConfig
from dflash_offline.report import report_page, thin, worker_rates, write_report


def parsed(page: str) -> ElementTree.Element:
    text = page.removeprefix("<!doctype html>\n").replace('<meta charset="utf-8">', "")
    return ElementTree.fromstring(text)


def test_a_page_holds_drafters_store_and_plots(tiny_run: RunConfig, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(tiny_run.run_dir, run_dir)
    config = tiny_run.model_copy(update={"run_dir": str(run_dir)})
    suite = {
        "num_prompts": 6,
        "acceptance_length": 2.125,
        "acceptance_length_interval": [2.0, 2.25],
        "accepted_by_offset": [0.5, 0.25, 0.125],
        "lossless_fraction": 1.0,
        "target_tokens_per_s": 100.0,
        "drafted_tokens_per_s": 180.0,
        "untrained": {"acceptance_length": 1.0},
    }
    (run_dir / "drafters" / "small" / "eval.json").write_text(
        json.dumps({"suites": {"held_out": suite}, "step": 4})
    )
    decoded = [
        {"step": step, "settings": {"seed": seed}, "acceptance_length": {"held_out": 1.0 + step}}
        for step, seed in ((2, 0), (3, 1), (4, 1))
    ]
    lines = "".join(json.dumps(each) + "\n" for each in decoded)
    (run_dir / "drafters" / "small" / "decoded.jsonl").write_text(lines)
    path = write_report(config)
    assert path == run_dir / "report.html"
    page = path.read_text()
    assert "2.125 [2.000, 2.250]" in page
    assert "can be anchors" in page
    assert "src=" not in page
    assert "href=" not in page
    headings = [each.text for each in parsed(page).iter("h2")]
    # The fixture runs the stages without the command, which notes versions and settings.
    assert headings == ["Drafters", "Real decoding", "Training", "Store", "Extraction"]
    assert page.count("<svg") >= 6
    (curve,) = [each for each in page.split("<svg") if "by real decoding" in each]
    # Of two points: those of other settings cannot be compared.
    assert curve.split('points="')[1].split('"')[0].count(",") == 2


def test_a_run_that_has_not_begun_is_reported_too(tiny_run: RunConfig, tmp_path: Path) -> None:
    config = tiny_run.model_copy(update={"run_dir": str(tmp_path)})
    page = report_page(config)
    assert "not trained" in page
    assert parsed(page).find(".//h1") is not None
    with pytest.raises(ValueError, match=r"nothing to report.*run `extract` first"):
        write_report(tiny_run.model_copy(update={"run_dir": str(tmp_path / "none")}))


def test_a_workers_rate_has_a_gap_where_it_was_started_again() -> None:
    lines = [
        {"time_s": 0.0, "event": "start", "num_tokens": 0},
        {"time_s": 2.0, "event": "progress", "num_tokens": 100},
        {"time_s": 3.0, "event": "progress", "num_tokens": 90},
        {"time_s": 9.0, "event": "start", "num_tokens": 0},
        {"time_s": 10.0, "event": "end", "num_tokens": 30},
    ]
    times, rates = zip(*worker_rates(lines), strict=True)
    assert times == (2.0, 3.0, 9.0, 10.0)
    assert rates[:2] == (50.0, 0.0)
    assert math.isnan(rates[2])
    assert rates[3] == 30.0


def test_thinning_keeps_the_mean_and_the_end() -> None:
    points = [(float(n), float(n % 2)) for n in range(1000)]
    thinned = thin(points, num_points=100)
    assert len(thinned) == 100
    assert thinned[-1] == (999.0, 0.5)
    assert thin(points[:50], num_points=100) == points[:50]
