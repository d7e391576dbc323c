"""Growing a store from the command line: more layers for the sequences that are there."""

import os
from collections.abc import Sequence
from pathlib import Path

from dflash_offline.config import RunConfig, extract_run, run_dir_of
from dflash_offline.launch import Job, combined_exit_code, run_jobs
from dflash_offline.rank_launch import run_ranks
from dflash_offline.stages import worker_places
from storage.lock import only_process_in
from storage.writer import open_for_writing


def launch_added_layers(
    config: RunConfig, *, run_file: Path, overrides: Sequence[str], layers: Sequence[str]
) -> int:
    """Adds layers with one process per GPU, or `extract.num_workers` of them without a GPU.

    Args:
        config: The run file, checked; its `store.encoding` is that of the new layers.
        run_file: The run file again, for the workers' command lines.
        overrides: The `--set` options, likewise.
        layers: Names of the layers.

    Returns:
        0 when every shard holds them, 75 when stopped early, else the failure's code.
    """
    from stage1_extract.added_layers import prepare_layers

    run = extract_run(config)
    lacking = prepare_layers(run, layers)
    print(f"{len(lacking)} shards lack layers {', '.join(layers)}", flush=True)
    if not lacking:
        open_for_writing(run.store_dir).publish_layers(layers)
        return 0
    places, num_workers = worker_places(config)
    arguments = _command(run_file, overrides, layers)
    folder = run_dir_of(config) / "extract"
    jobs = [
        Job(
            name=f"worker {index}",
            arguments=[*arguments, "--worker", str(index), "--num-workers", str(num_workers)],
            log_path=folder / f"add-layers-{index:05d}.log",
            num_places=config.extract.gpus_per_worker,
        )
        for index in range(num_workers)
    ]
    with only_process_in(folder, work="extraction"):
        exit_codes = run_jobs(
            jobs,
            places=places,
            show_line=lambda name, line: print(f"{name} | {line}", flush=True),
        )
    return combined_exit_code(exit_codes)


def run_added_layers(
    config: RunConfig,
    *,
    run_file: Path,
    overrides: Sequence[str],
    layers: Sequence[str],
    worker_index: int,
    num_workers: int,
) -> int:
    """One worker, in this process; with `extract.gpus_per_worker` the parent of its processes."""
    from stage1_extract.added_layers import add_layers, prepare_layers

    run = extract_run(config)
    num_ranks = run.extract.gpus_per_worker
    if num_ranks > 1 and "RANK" not in os.environ:
        numbers = ["--worker", str(worker_index), "--num-workers", str(num_workers)]
        return run_ranks(
            [*_command(run_file, overrides, layers), *numbers],
            num_ranks=num_ranks,
            log_dir=run.run_dir / "extract" / f"add-layers-{worker_index:05d}",
            setting="extract.gpus_per_worker",
        )
    if num_ranks == 1 or os.environ["RANK"] == "0":
        prepare_layers(run, layers)
    return add_layers(run, layers, worker_index=worker_index, num_workers=num_workers)


def _command(run_file: Path, overrides: Sequence[str], layers: Sequence[str]) -> list[str]:
    settings = [part for override in overrides for part in ("--set", override)]
    return ["store", "add-layers", str(run_file), "--layers", ",".join(layers), *settings]
