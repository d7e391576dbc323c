"""What each command does: settings in, the stage's own page called, an exit code out."""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import tomli_w

from dflash_offline.config import (
    RunConfig,
    as_toml_tables,
    drafter_run,
    extract_run,
    run_dir_of,
    store_dir_of,
)
from dflash_offline.launch import (
    EXIT_STOPPED_EARLY,
    Job,
    Slot,
    combined_exit_code,
    count_gpus,
    describe_exit,
    run_jobs,
    slots,
)
from stage2_train.config import DrafterRun
from storage.files import replace_whole
from storage.lock import only_process_in
from storage.reader import open_store
from storage.versions import versions


def launch_extraction(config: RunConfig, *, run_file: Path, overrides: Sequence[str]) -> int:
    """Stage 1 with one process per GPU, or `extract.num_workers` of them without a GPU.

    Args:
        config: The run file, checked.
        run_file: The run file again, for the workers' command lines.
        overrides: The `--set` options, likewise.

    Returns:
        0 when every unit is committed, 75 when stopped early, else the failure's code.
    """
    from stage1_extract.receipt import is_finished, note_finished, run_digest

    run = extract_run(config)
    digest = run_digest(run)  # Now, not at the end: the data may grow meanwhile.
    if is_finished(run):
        print(f"nothing to extract: {store_dir_of(config)} holds all of it")
        return 0
    # Imported only now: they load torch and transformers.
    from dflash_offline.plan import check_later_stages
    from dflash_offline.progress import ExtractionProgress
    from stage1_extract.failures import judge_extraction
    from stage1_extract.head_needs import lacking_head_files
    from stage1_extract.planning import prepare_store
    from stage1_extract.target_files import load_config

    check_later_stages(config, load_config(run.target))
    run_dir = _start_run(config)
    places, num_workers = worker_places(config)
    store = prepare_store(run, fewest_units=num_workers)
    units = store.units()
    open_units = sorted(set(units) - store.committed())

    def judged() -> int:
        exit_code = judge_extraction(store, run)
        if exit_code == 0:
            note_finished(run, digest=digest)
        return exit_code

    lacking = lacking_head_files(store, run)
    if not open_units and lacking:
        print(f"all {len(units)} units are committed; the head lacks {', '.join(lacking)}")
        num_workers = 1  # To load the target and write the head again takes one.
    elif not open_units:
        print(f"nothing to extract: all {len(units)} units are committed in {store_dir_of(config)}")
        return judged()
    num_sequences = sum(len(store.sequences_of(unit)) for unit in open_units)
    before = _stored(config)
    jobs = [
        Job(
            name=f"worker {index}",
            arguments=[
                *_command("extract", run_file, overrides),
                *("--worker", str(index), "--num-workers", str(num_workers)),
            ],
            log_path=run_dir / "extract" / f"worker-{index:05d}.log",
            num_places=config.extract.gpus_per_worker,
        )
        for index in range(num_workers)
    ]
    # Workers of two launchers would compute the same units; the store keeps one, time is lost.
    with (
        only_process_in(run_dir / "extract", work="extraction"),
        ExtractionProgress(
            run_dir=run_dir, num_workers=len(jobs), num_sequences=num_sequences
        ) as progress,
    ):
        exit_codes = run_jobs(jobs, places=places, show_line=progress.show_line)
    progress.print_summary(*(now - then for now, then in zip(_stored(config), before, strict=True)))
    again = _same_command("extract", run_file, overrides)
    exit_code = _report(exit_codes, again=again)
    num_left = len(set(units) - store.committed())
    if num_left == 0:
        # What a dead worker left the others have done.
        return judged()
    if exit_code != EXIT_STOPPED_EARLY:
        print(f"{num_left} of {len(units)} units are left; to go on: {again}", file=sys.stderr)
    return exit_code


def worker_places(config: RunConfig) -> tuple[list[Slot], int]:
    """The places of stage 1 here, and how many workers they make.

    Raises:
        ValueError: They are too few for one worker.
    """
    group_size = config.extract.gpus_per_worker
    places = slots(
        config.extract.gpus,
        available_gpus=count_gpus(),
        cpu_processes=config.extract.num_workers * group_size,
        first=True,
    )
    num_workers = len(places) // group_size
    if num_workers == 0:
        raise ValueError(
            f"extract.gpus_per_worker = {group_size}, but stage 1 has {len(places)} GPUs here; name"
            " more in extract.gpus, or lower it"
        )
    return places, num_workers


def _stored(config: RunConfig) -> tuple[int, int, int]:
    """Shards, sequences and tokens that are committed now."""
    snapshot = open_store(store_dir_of(config)).snapshot()
    return snapshot.num_shards, snapshot.num_sequences, int(snapshot.num_tokens.sum())


def run_extraction_worker(
    config: RunConfig,
    *,
    worker_index: int,
    num_workers: int,
    run_file: Path,
    overrides: Sequence[str],
) -> int:
    """One worker of stage 1, in this process; any number of them share a store.

    With `extract.gpus_per_worker` it is the parent of the worker's processes, unless torchrun or
    such a parent has started it as one of them.
    """
    from stage1_extract.extract import prepare_store, run_worker

    run = extract_run(config)
    num_ranks = run.extract.gpus_per_worker
    if num_ranks > 1 and "RANK" not in os.environ:
        from dflash_offline.rank_launch import run_ranks

        numbers = ["--worker", str(worker_index), "--num-workers", str(num_workers)]
        return run_ranks(
            [*_command("extract", run_file, overrides), *numbers],
            num_ranks=num_ranks,
            log_dir=run.run_dir / "extract" / f"worker-{worker_index:05d}",
            setting="extract.gpus_per_worker",
        )
    if num_ranks == 1 or os.environ["RANK"] == "0":
        _start_run(config)
        prepare_store(run, is_worker=True)
    return run_worker(run, worker_index=worker_index, num_workers=num_workers)


def launch_training(config: RunConfig, *, run_file: Path, overrides: Sequence[str]) -> int:
    """Stage 2: every drafter in a process of its own; more drafters than places queue."""
    run_dir = _start_run(config)
    places = slots(
        config.launch.gpus,
        available_gpus=count_gpus(),
        cpu_processes=config.launch.max_processes,
        first=False,
    )
    jobs = [
        Job(
            name=drafter.name,
            arguments=[*_command("train", run_file, overrides), "--drafter", drafter.name],
            log_path=run_dir / "drafters" / drafter.name / "train.log",
            num_places=drafter_run(config, drafter.name).train.gpus_per_drafter,
        )
        for drafter in config.drafter
    ]
    names = [job.name for job in jobs]
    if sum(job.num_places for job in jobs) > len(places):
        print(f"{len(jobs)} drafters on {len(places)} places: the later ones wait for a free one")
    priming = _priming_jobs(config, run_file, overrides) if count_gpus() else []
    width = max(map(len, [*names, *(job.name for job in priming)]))

    def show(name: str, line: str) -> None:
        print(f"{name:<{width}} | {line}", flush=True)

    primed = run_jobs(priming, places=places, show_line=show)
    if EXIT_STOPPED_EARLY in primed.values():
        return _report(primed, again=_same_command("train", run_file, overrides))
    for name, exit_code in primed.items():
        if exit_code != 0:
            # Not fatal: where it is the drafter's own fault, its training says so.
            print(f"{name}: {describe_exit(exit_code)}; each drafter compiles for itself")
    exit_codes = run_jobs(jobs, places=places, show_line=show)
    return _report(exit_codes, again=_same_command("train", run_file, overrides))


def _priming_jobs(config: RunConfig, run_file: Path, overrides: Sequence[str]) -> list[Job]:
    """For each shape that several drafters share, and that is not primed: its first drafter."""
    from stage2_train.compile_cache import primed_archive

    by_archive: dict[Path, list[DrafterRun]] = {}
    for drafter in config.drafter:
        run = drafter_run(config, drafter.name)
        if run.train.compile is not False and run.train.attention != "sdpa":
            by_archive.setdefault(primed_archive(run), []).append(run)
    return [
        Job(
            name=f"prime {runs[0].drafter.name}",
            arguments=[
                *_command("train", run_file, overrides),
                *("--drafter", runs[0].drafter.name, "--prime"),
            ],
            log_path=runs[0].drafter_dir / "prime.log",
        )
        for archive, runs in by_archive.items()
        if len(runs) > 1 and not archive.exists()
    ]


def run_priming(config: RunConfig, *, drafter_name: str) -> int:
    """Fills the compile cache that drafters of one shape start from, in this process."""
    from stage2_train.prime import prime

    return 0 if prime(drafter_run(config, drafter_name)) else EXIT_STOPPED_EARLY


def run_training(
    config: RunConfig, *, drafter_name: str, run_file: Path, overrides: Sequence[str]
) -> int:
    """One drafter's training: in this process, or on several GPUs as its ranks' parent.

    A process that torchrun or srun started is a rank already.
    """
    from stage2_train.ranks import ALONE, find_ranks

    run = drafter_run(config, drafter_name)
    ranks, num_ranks = find_ranks(os.environ), run.train.gpus_per_drafter
    if ranks.is_first:
        _start_run(config)
    if num_ranks > 1 and ranks == ALONE:
        from dflash_offline.rank_launch import run_ranks

        return run_ranks(
            [*_command("train", run_file, overrides), "--drafter", drafter_name],
            num_ranks=num_ranks,
            log_dir=run.drafter_dir / "ranks",
        )
    from stage2_train.train import train_drafter

    return train_drafter(run)


def run_evaluation(
    config: RunConfig, *, drafter_names: Sequence[str], folder: Path | None, watch: bool
) -> int:
    """Real speculative decoding of the run's drafters, or of one folder from anywhere."""
    from dflash_offline.evaluate import evaluate

    _start_run(config)
    return evaluate(config, drafter_names=drafter_names, folder=folder, watch=watch)


def export_drafters(config: RunConfig, *, drafter_names: Sequence[str], layout: str) -> list[Path]:
    """Writes each drafter's best checkpoint, else its latest, as a folder engines load.

    Raises:
        ValueError: A drafter has no checkpoint yet.
    """
    from stage1_extract.target import resolve_target
    from stage2_train.checkpoint import best_checkpoint, latest_checkpoint
    from stage2_train.export import export_official, export_speculators

    folders = []
    for name in drafter_names or [drafter.name for drafter in config.drafter]:
        drafter_dir = drafter_run(config, name).drafter_dir
        checkpoint = best_checkpoint(drafter_dir) or latest_checkpoint(drafter_dir)
        if checkpoint is None:
            raise ValueError(f"{drafter_dir}: no checkpoint to export; train this drafter first")
        if layout == "official":
            folders.append(export_official(checkpoint, drafter_dir / "export"))
        else:
            # This layout names the target: its hub id, or the folder it lies in.
            model = config.target.model
            target = model if "/" in model else resolve_target(config.target)
            out_dir = drafter_dir / f"export-{layout}"
            folders.append(export_speculators(checkpoint, out_dir, target=target))
    return folders


def run_regeneration(config: RunConfig) -> int:
    """Lets the target answer `regenerate.prompts`; 0 when all are answered, 75 when stopped."""
    from stage1_extract.regenerate import regenerate

    run_dir = _start_run(config)
    output = Path(config.regenerate.output or run_dir / "regenerated.jsonl")
    is_done = regenerate(config.target, config.data, config.regenerate, output_path=output)
    print(f"answers in {output}")
    return 0 if is_done else EXIT_STOPPED_EARLY


def _same_command(name: str, run_file: Path, overrides: Sequence[str]) -> str:
    """The command line that goes on with this run, settings given on it included."""
    return shlex.join(["dflash-offline", *_command(name, run_file, overrides)])


def _command(name: str, run_file: Path, overrides: Sequence[str]) -> list[str]:
    settings = [part for override in overrides for part in ("--set", override)]
    return [name, str(run_file), *settings]


def _start_run(config: RunConfig) -> Path:
    """Makes the run folder and records what is about to run there."""
    run_dir = run_dir_of(config)
    run_dir.mkdir(parents=True, exist_ok=True)
    resolved = tomli_w.dumps(as_toml_tables(config)).encode()
    replace_whole(run_dir / "run.resolved.toml", resolved)
    replace_whole(run_dir / "versions.json", json.dumps(versions(), indent=1).encode())
    return run_dir


def _report(exit_codes: dict[str, int], *, again: str) -> int:
    """Says which jobs did not end well and how to go on; returns the stage's exit code."""
    for name, exit_code in exit_codes.items():
        if exit_code != 0:
            print(f"{name}: {describe_exit(exit_code)}", file=sys.stderr)
    exit_code = combined_exit_code(exit_codes)
    if exit_code == EXIT_STOPPED_EARLY:
        print(f"stopped early; to go on: {again}", file=sys.stderr)
    return exit_code
