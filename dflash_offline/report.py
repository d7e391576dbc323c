"""`report`: one HTML page of a run, by its files alone: what was stored, learned and decoded.

The page holds its plots and loads nothing, so it can be sent as it is.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dflash_offline.config import RunConfig, drafter_run, run_dir_of, store_dir_of
from dflash_offline.plots import acceptance_plot, point_plot, round_ticks
from dflash_offline.run_records import Record, newest_workers, read_json, read_lines
from dflash_offline.status import training_pace, worker_pace
from stage2_train.live_line import byte_rate, count_words, thousands, time_words
from storage.encodings import encoded_bytes_per_token
from storage.errors import StoreNotFoundError
from storage.files import replace_whole
from storage.reader import open_store

NUM_POINTS = 300
"""Points of a plotted line at most."""

Points = list[tuple[float, float]]

_STYLE = """body{font-family:sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:.5rem 0}td,th{border:1px solid #ccc;padding:.2rem .6rem;
text-align:left;vertical-align:top}svg{max-width:100%;height:auto}pre{overflow-x:auto}"""


def write_report(config: RunConfig) -> Path:
    """Writes `report.html` into the run folder, whole or not at all.

    Raises:
        ValueError: there is no run folder yet.
    """
    run_dir = run_dir_of(config)
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir}: nothing to report, no such folder; run `extract` first")
    path = run_dir / "report.html"
    replace_whole(path, report_page(config).encode())
    return path


def report_page(config: RunConfig) -> str:
    """The page: drafters first, then how they came about."""
    run_dir = run_dir_of(config)
    trained = {drafter.name: _records(config, drafter.name) for drafter in config.drafter}
    decoded = {
        drafter.name: found
        for drafter in config.drafter
        if (found := read_json(drafter_run(config, drafter.name).drafter_dir / "eval.json"))
    }
    sections = {
        "Drafters": _drafter_table(config, trained),
        "Real decoding": _decoding_section(decoded) + _decoded_curves(config),
        "Training": _training_section(trained),
        "Store": _store_table(config),
        "Extraction": _extraction_section(run_dir / "extract"),
        "Versions": _table(
            ("what", "which"), list((read_json(run_dir / "versions.json") or {}).items())
        ),
        "Settings": _settings(run_dir / "run.resolved.toml"),
    }
    body = "\n".join(f"<h2>{name}</h2>\n{text}" for name, text in sections.items() if text)
    title = f"DFlash run {escape(run_dir.name)}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n{body}\n</body></html>\n"
    )


def _records(config: RunConfig, name: str) -> list[dict[str, Any]]:
    return list(read_lines(drafter_run(config, name).drafter_dir / "metrics.jsonl"))


def _drafter_table(config: RunConfig, trained: Mapping[str, Sequence[Record]]) -> str:
    rows = []
    for drafter in config.drafter:
        train = drafter_run(config, drafter.name).train
        newest = next((r for r in reversed(trained[drafter.name]) if r["kind"] == "train"), None)
        layers = drafter.target_layer_ids
        rows.append(
            (
                drafter.name,
                drafter.num_layers,
                drafter.block_size,
                "all stored" if layers is None else ", ".join(map(str, layers)),
                f"{train.loss.kind}, {'d_pace' if train.loss.is_paced else 'decay'}",
                f"{train.num_anchors:,} in {train.batch_tokens:,} tokens",
                f"{train.optimizer.learning_rate:g}",
                f"{newest['step']:,}" if newest else "not trained",
                count_words(newest.get("num_tokens_seen", 0)) if newest else "",
                training_pace(newest) if newest else "",
            )
        )
    names = ("drafter", "layers", "block", "target layers", "loss", "blocks of a batch")
    return _table((*names, "learning rate", "step", "tokens seen", "sets the pace"), rows)


def _decoding_section(decoded: Mapping[str, Record]) -> str:
    """Acceptance lengths by real decoding: the numbers to trust."""
    rows = []
    for name, result in decoded.items():
        for suite, found in result["suites"].items():
            low, high = found["acceptance_length_interval"]
            untrained = (found.get("untrained") or {}).get("acceptance_length")
            lossless = found["lossless_fraction"]
            rows.append(
                (
                    name,
                    f"{result['step']:,}" if "step" in result else "",
                    suite,
                    found["num_prompts"],
                    f"{found['acceptance_length']:.3f} [{low:.3f}, {high:.3f}]",
                    "" if untrained is None else f"{untrained:.3f}",
                    "sampled" if lossless is None else f"{lossless:.1%}",
                    f"{found['target_tokens_per_s']:.0f}",
                    f"{found['drafted_tokens_per_s']:.0f}",
                )
            )
    if not rows:
        return "<p>Not decoded yet: <code>dflash-offline eval</code>.</p>"
    names = ("drafter", "step", "suite", "prompts", "acceptance length, 95%", "untrained")
    rates = ("lossless", "tokens/s, target alone", "tokens/s, drafted")
    return _table((*names, *rates), rows) + acceptance_plot(decoded)


def _decoded_curves(config: RunConfig) -> str:
    """Acceptance length of each checkpoint that was decoded, by the newest settings."""
    curves: dict[str, Points] = {}
    for drafter in config.drafter:
        records = list(read_lines(drafter_run(config, drafter.name).drafter_dir / "decoded.jsonl"))
        same = [each for each in records if each["settings"] == records[-1]["settings"]]
        newest = {each["step"]: each["acceptance_length"] for each in same}
        for suite in records[-1]["acceptance_length"] if records else ():
            points = [(float(step), found[suite]) for step, found in sorted(newest.items())]
            curves[f"{drafter.name}, {suite}"] = points
    return curve_plot(curves, title="Acceptance length by real decoding", x_label="step")


def _training_section(trained: Mapping[str, Sequence[Record]]) -> str:
    """Curves over steps; estimates are called so."""

    def curves(kind: str, key: str) -> dict[str, Points]:
        found = {
            name: [
                (float(r["step"]), float(r[key])) for r in records if r["kind"] == kind and key in r
            ]
            for name, records in trained.items()
        }
        return {name: thin(points) for name, points in found.items() if points}

    plots = (
        (
            "Acceptance length by the walk, held-out greedy answers",
            "validation",
            "acceptance_length",
        ),
        ("Loss, held-out answers", "validation", "loss"),
        ("Loss, training", "train", "loss"),
        (
            "Simulated acceptance length, training (an estimate)",
            "train",
            "simulated_acceptance_length",
        ),
        ("Tokens a second", "train", "tokens_per_s"),
        ("Share of time that waits for data", "train", "wait_fraction"),
    )
    return "\n".join(
        curve_plot(curves(kind, key), title=title, x_label="step") for title, kind, key in plots
    )


def _store_table(config: RunConfig) -> str:
    try:
        store = open_store(store_dir_of(config))
    except StoreNotFoundError:
        return ""
    snapshot = store.snapshot()
    layers = store.layers
    token_bytes = sum(encoded_bytes_per_token(x.encoding, x.hidden_size) for x in layers.values())
    num_tokens = int(snapshot.num_tokens.sum())
    identity = store.identity
    rows = [
        ("place", store_dir_of(config)),
        ("target", identity.target_name),
        ("target's weights, sha256", identity.target_weights_sha256),
        ("chat template's arguments", dict(identity.template_arguments)),
        ("layers", ", ".join(f"{name} ({layer.encoding})" for name, layer in layers.items())),
        ("states", f"{token_bytes:,} bytes a token, {token_bytes * num_tokens / 1e9:.3g} GB"),
        ("shards", f"{snapshot.num_shards:,}"),
        ("sequences", f"{snapshot.num_sequences:,}, {int(snapshot.held_out.sum()):,} held out"),
        ("tokens", f"{num_tokens:,}, {int(snapshot.num_supervised.sum()):,} can be anchors"),
        ("snapshot", snapshot.id),
    ]
    return _table(("field", "value"), rows)


def _extraction_section(extract_dir: Path) -> str:
    workers = newest_workers(extract_dir)
    if not workers:
        return ""
    rows = []
    for worker in workers:
        skipped = (f"{count:,} x {reason}" for reason, count in worker["skipped"].items())
        rows.append(
            (
                worker["worker_index"],
                f"{worker['num_units']:,}",
                f"{worker['num_sequences']:,}",
                f"{worker['num_tokens']:,}",
                thousands(worker["tokens_per_s"]),
                byte_rate(worker["num_bytes"] / max(worker["elapsed_s"], 1e-9)),
                time_words(worker["elapsed_s"]),
                worker_pace(worker),
                "; ".join(skipped),
            )
        )
    names = ("worker", "shards", "sequences", "tokens", "tok/s", "to the store", "in")
    rates = {
        f"worker {path.name[7:12]}": thin(worker_rates(list(read_lines(path))))
        for path in sorted(extract_dir.glob("worker-*.metrics.jsonl"))[:8]
    }
    started_s = min((points[0][0] for points in rates.values() if points), default=0.0)
    hours = {
        name: [((time_s - started_s) / 3600, rate) for time_s, rate in points]
        for name, points in rates.items()
        if points
    }
    plot = curve_plot(hours, title="Tokens a second of each worker", x_label="hours")
    return _table((*names, "sets the pace", "skipped"), rows) + plot


def worker_rates(lines: Sequence[Record]) -> Points:
    """Unix time and tokens a second between the lines of a worker; a gap between its runs."""
    points: Points = []
    for before, line in itertools.pairwise(lines):
        if line["event"] == "start":
            points.append((line["time_s"], math.nan))
        elif (elapsed_s := line["time_s"] - before["time_s"]) > 0:
            rate = (line["num_tokens"] - before["num_tokens"]) / elapsed_s
            points.append((line["time_s"], max(0.0, rate)))  # A dropped shard is taken back.
    return points


def thin(points: Points, *, num_points: int = NUM_POINTS) -> Points:
    """Means of neighbouring points, so that about `num_points` are left; gaps stay gaps."""
    size = math.ceil(len(points) / num_points)
    if size <= 1:
        return points
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def curve_plot(lines: Mapping[str, Points], *, title: str, x_label: str) -> str:
    """Lines on axes that fit them; nothing where there are none."""
    points = [point for line in lines.values() for point in line if not math.isnan(point[1])]
    if not points:
        return ""
    across, values = [point[0] for point in points], [point[1] for point in points]
    return point_plot(
        lines,
        title=title,
        x_label=x_label,
        y_label="",
        x_ticks=_ticks(min(across), max(across)),
        y_ticks=_ticks(min(values), max(values)),
    )


def _ticks(low: float, high: float) -> list[float]:
    """Round ticks that span more than a point."""
    room = 0.0 if high > low else max(abs(high), 1.0) / 10
    return round_ticks(low - room, high + room)


def _settings(path: Path) -> str:
    if not path.is_file():
        return ""
    text = escape(path.read_text(encoding="utf-8"))
    return f"<details><summary>{escape(path.name)}</summary><pre>{text}</pre></details>"


def _table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{escape(str(value))}</td>" for value in row) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>\n{body}</table>\n"
