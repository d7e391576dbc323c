"""Growing a store from the command line: more layers for the sequences that are there."""

from collections.abc import Sequence
from pathlib import Path

from dflash_offline.config import RunConfig, extract_run, run_dir_of
from dflash_offline.launch import Job, combined_exit_code, count_gpus, run_jobs, slots
from storage.lock import only_process_in


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
        return run_added_layers(config, layers=layers, worker_index=0, num_workers=1)
    places = slots(
        config.extract.gpus,
        available_gpus=count_gpus(),
        cpu_processes=config.extract.num_workers,
        first=True,
    )
    arguments = ["store", "add-layers", str(run_file), "--layers", ",".join(layers)]
    arguments += [part for override in overrides for part in ("--set", override)]
    folder = run_dir_of(config) / "extract"
    jobs = [
        Job(
            name=f"worker {index}",
            arguments=[*arguments, "--worker", str(index), "--num-workers", str(len(places))],
            log_path=folder / f"add-layers-{index:05d}.log",
        )
        for index in range(len(places))
    ]
    with only_process_in(folder, work="extraction"):
        exit_codes = run_jobs(
            jobs,
            places=places,
            show_line=lambda name, line: print(f"{name} | {line}", flush=True),
        )
    return combined_exit_code(exit_codes)


def run_added_layers(
    config: RunConfig, *, layers: Sequence[str], worker_index: int, num_workers: int
) -> int:
    """One worker, in this process."""
    from stage1_extract.added_layers import add_layers, prepare_layers

    run = extract_run(config)
    prepare_layers(run, layers)
    return add_layers(run, layers, worker_index=worker_index, num_workers=num_workers)
