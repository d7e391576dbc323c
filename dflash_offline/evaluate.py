"""Evaluate drafters by real speculative decoding: the number that says what a drafter is worth.

A process of its own, beside or after training: it loads the target, decodes the suites once with
the target alone, then with each drafter, and compares the answers token by token. Results go to
`eval.json` of each drafter, whole or not at all, and into each evaluated checkpoint, so that the
best one is known.
"""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from dflash_offline.config import EvalConfig, RunConfig, drafter_run, run_dir_of
from dflash_offline.evaluation_bench import Bench, UntrainedDrafters, evaluate_drafter, open_bench
from dflash_offline.evaluation_report import log_decoding, lossless_exit_code, print_table
from dflash_offline.plots import acceptance_plot
from dflash_offline.run_records import read_drafter
from stage1_extract.target_files import load_config
from stage2_train.checkpoint import (
    EVALUATION,
    best_checkpoint,
    latest_checkpoint,
    list_checkpoints,
    read_state,
)
from stage2_train.export import load_any_drafter
from storage.files import replace_whole

WATCH_PAUSE_S = 5.0


def evaluate(
    config: RunConfig, *, drafter_names: Sequence[str], folder: Path | None, watch: bool
) -> int:
    """Evaluates drafters of a run, or one folder, and prints the table.

    Args:
        config: the run file, checked.
        drafter_names: drafters to evaluate; none means all.
        folder: a drafter folder from anywhere, instead of the run's own.
        watch: whether to go on with new checkpoints until every training is done.

    Returns:
        0 when every answer equals the target's own up to ties, else 1.

    Raises:
        ValueError: there is nothing to evaluate, or target, store and drafter do not fit.
    """
    torch.set_num_threads(config.eval.torch_threads)
    if folder is not None and (watch or drafter_names):
        raise ValueError("--folder names one drafter; it goes without --drafter and --watch")
    names = list(drafter_names) or [drafter.name for drafter in config.drafter]
    drafter_dirs = {name: drafter_run(config, name).drafter_dir for name in names}
    if folder is None and not watch:
        _require_checkpoints(drafter_dirs)
    foreign = None
    if folder is not None:
        folder = folder.resolve()  # For `.` has no name.
        # Before the target decodes its own answers, which takes minutes.
        num_target_layers = load_config(config.target).num_hidden_layers
        foreign = load_any_drafter(folder, num_target_layers=num_target_layers)
    bench = open_bench(config)
    untrained = UntrainedDrafters(bench)
    if folder is not None and foreign is not None:
        results = {folder.name: evaluate_drafter(bench, foreign, untrained=untrained)}
        _write_json(run_dir_of(config) / f"eval-{folder.name}.json", results[folder.name])
    elif watch:
        results = watch_run(bench, drafter_dirs, untrained=untrained)
    else:
        results = {
            name: evaluate_run(bench, drafter_dir, untrained=untrained)
            for name, drafter_dir in drafter_dirs.items()
        }
    print_table(results)
    plot = "eval.svg" if folder is None else f"eval-{folder.name}.svg"
    plot_path = run_dir_of(config) / plot
    replace_whole(plot_path, acceptance_plot(results).encode())
    print(f"accepted by offset: {plot_path}")
    return lossless_exit_code(results, tie_margin=bench.tie_margin)


def evaluate_run(
    bench: Bench, drafter_dir: Path, *, untrained: UntrainedDrafters
) -> dict[str, Any]:
    """Evaluates a drafter's best and newest checkpoint and writes the better one's `eval.json`."""
    forget_other_evaluations(drafter_dir, bench.config)
    candidates = {best_checkpoint(drafter_dir), latest_checkpoint(drafter_dir)}
    for checkpoint in sorted(path for path in candidates if path is not None):
        evaluate_checkpoint(bench, checkpoint, drafter_dir, untrained=untrained)
    result = _publish_best(drafter_dir)
    if result is None:
        raise ValueError(f"{drafter_dir}: its checkpoints were removed while they were decoded")
    return result


def forget_other_evaluations(drafter_dir: Path, config: EvalConfig) -> None:
    """Removes checkpoints' results of other settings: they cannot be compared with new ones.

    One that cannot be read goes, too; it is made anew.
    """
    for checkpoint in list_checkpoints(drafter_dir):
        path = checkpoint / EVALUATION
        if path.is_file() and _settings_of(path) != config.model_dump(mode="json"):
            path.unlink()


def _settings_of(evaluation_path: Path) -> Any:
    try:
        result = json.loads(evaluation_path.read_bytes())
    except ValueError:
        return None
    return result.get("settings") if isinstance(result, dict) else None


def evaluate_checkpoint(
    bench: Bench, checkpoint: Path, drafter_dir: Path, *, untrained: UntrainedDrafters
) -> None:
    """Evaluates one checkpoint and leaves the result in it."""
    step = read_state(checkpoint)["step"]
    print(f"{drafter_dir.name}: decoding with {checkpoint.name}", flush=True)
    result = evaluate_drafter(bench, load_any_drafter(checkpoint), untrained=untrained)
    result |= {"drafter": drafter_dir.name, "step": step, "checkpoint": checkpoint.name}
    log_decoding(drafter_dir, result)
    # Training may have removed the checkpoint meanwhile; then nothing depends on its result.
    with suppress(FileNotFoundError):
        if checkpoint.is_dir():
            _write_json(checkpoint / EVALUATION, result)


def _publish_best(drafter_dir: Path) -> dict[str, Any] | None:
    best = best_checkpoint(drafter_dir)
    # Training may have removed the only evaluated checkpoint meanwhile.
    if best is None or not (best / EVALUATION).is_file():
        return None
    result: dict[str, Any] = json.loads((best / EVALUATION).read_text(encoding="utf-8"))
    _write_json(drafter_dir / "eval.json", result)
    return result


def watch_run(
    bench: Bench, drafter_dirs: dict[str, Path], *, untrained: UntrainedDrafters
) -> dict[str, dict[str, Any]]:
    """Evaluates checkpoints as they appear, newest first, until every training is done."""
    results: dict[str, dict[str, Any]] = {}
    for drafter_dir in drafter_dirs.values():
        forget_other_evaluations(drafter_dir, bench.config)
    while True:
        has_news = False
        for name, drafter_dir in drafter_dirs.items():
            checkpoint = latest_checkpoint(drafter_dir)
            if checkpoint is None or (checkpoint / EVALUATION).is_file():
                continue
            has_news = True
            evaluate_checkpoint(bench, checkpoint, drafter_dir, untrained=untrained)
            published = _publish_best(drafter_dir)
            if published is not None:
                results[name] = published
                print_table({name: published})
        if not has_news:
            if all(is_training_done(drafter_dir) for drafter_dir in drafter_dirs.values()):
                published_last = {name: _publish_best(d) for name, d in drafter_dirs.items()}
                return {n: found for n, found in published_last.items() if found is not None}
            time.sleep(WATCH_PAUSE_S)


def is_training_done(drafter_dir: Path) -> bool:
    """Says whether the newest checkpoint is the last one, and no training goes on behind it."""
    return read_drafter(drafter_dir).is_done


def _require_checkpoints(drafter_dirs: dict[str, Path]) -> None:
    for name, drafter_dir in drafter_dirs.items():
        if latest_checkpoint(drafter_dir) is None:
            torn = " whole" if list_checkpoints(drafter_dir) else ""
            raise ValueError(f"{drafter_dir} has no{torn} checkpoint; train drafter {name} first")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    replace_whole(path, (json.dumps(value, indent=1) + "\n").encode())
