"""The command line: `dflash-offline COMMAND RUN.toml [--set table.key=value]`.

Heavy packages are imported inside the commands, so that `--help` answers at once.
"""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dflash_offline import __version__
from dflash_offline.launched import stop_with_launcher

EXIT_BAD_INPUT = 2
TRACEBACK_VARIABLE = "DFLASH_OFFLINE_TRACEBACK"


def _one_line_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turns a user's error into one line and exit code 2; a bug keeps its traceback."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (ValueError, OSError) as error:
            if os.environ.get(TRACEBACK_VARIABLE):
                raise
            message = " ".join(str(error).split())
            click.echo(f"error: {message}", err=True)
            sys.exit(EXIT_BAD_INPUT)

    return wrapped


def _run_file_command(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the run file, `--set` and the error handling that most commands share."""
    command = _one_line_errors(command)
    command = click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="TABLE.KEY=VALUE",
        help="Override one setting of the run file; may be repeated.",
    )(command)
    return click.argument("run_file", type=click.Path(path_type=Path))(command)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dflash-offline")
def main() -> None:
    """Train DFlash speculative-decoding drafters from cached hidden states.

    RUN_FILE is a TOML file or the name of a preset such as `demo`.
    """
    stop_with_launcher()


@main.command()
@_run_file_command
@click.option("--measure", is_flag=True, help="Load the target and time it for 20 seconds.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def plan(run_file: Path, overrides: tuple[str, ...], measure: bool, as_json: bool) -> None:
    """Say what a run will take: bytes, files, hours, memory; before anything runs."""
    import json

    from dflash_offline.config import load_run_file
    from dflash_offline.plan import plan_run
    from dflash_offline.plan_report import plan_as_json, print_plan

    found = plan_run(load_run_file(run_file, overrides=overrides), measure=measure)
    if as_json:
        click.echo(json.dumps(plan_as_json(found), indent=1))
    else:
        print_plan(found)


@main.command()
@_run_file_command
@click.option("--worker", "worker_index", type=click.IntRange(min=0), help="Be one worker.")
@click.option("--num-workers", type=click.IntRange(min=1), help="Workers in all, with --worker.")
@click.option("--strict", is_flag=True, help="Stop at the first unusable line (data.strict).")
def extract(
    run_file: Path,
    overrides: tuple[str, ...],
    worker_index: int | None,
    num_workers: int | None,
    strict: bool,
) -> None:
    """Stage 1: run the target once, shard its hidden states into the store."""
    from dflash_offline.config import load_run_file
    from dflash_offline.stages import launch_extraction, run_extraction_worker

    if strict:
        overrides = (*overrides, "data.strict=true")
    config = load_run_file(run_file, overrides=overrides)
    if worker_index is None:
        if num_workers is not None:
            raise ValueError("--num-workers goes with --worker; set extract.num_workers instead")
        sys.exit(launch_extraction(config, run_file=run_file, overrides=overrides))
    if num_workers is None:
        raise ValueError("--worker I needs --num-workers N")
    if worker_index >= num_workers:
        raise ValueError(f"--worker {worker_index}: expected 0..{num_workers - 1}")
    sys.exit(run_extraction_worker(config, worker_index=worker_index, num_workers=num_workers))


@main.command()
@_run_file_command
@click.option("--drafter", "drafter_name", help="Train this drafter alone, in this process.")
def train(run_file: Path, overrides: tuple[str, ...], drafter_name: str | None) -> None:
    """Stage 2: train every drafter of the run file, each in a process of its own."""
    from dflash_offline.config import load_run_file
    from dflash_offline.stages import launch_training, run_training

    config = load_run_file(run_file, overrides=overrides)
    if drafter_name is not None:
        sys.exit(
            run_training(config, drafter_name=drafter_name, run_file=run_file, overrides=overrides)
        )
    sys.exit(launch_training(config, run_file=run_file, overrides=overrides))


@main.command(name="eval")
@_run_file_command
@click.option("--drafter", "drafter_names", multiple=True, help="Only this drafter.")
@click.option("--folder", type=click.Path(path_type=Path), help="A drafter folder from anywhere.")
@click.option("--watch", is_flag=True, help="Follow the run's checkpoints until training ends.")
def evaluate(
    run_file: Path,
    overrides: tuple[str, ...],
    drafter_names: tuple[str, ...],
    folder: Path | None,
    watch: bool,
) -> None:
    """Measure acceptance length by real speculative decoding on held-out prompts."""
    from dflash_offline.config import load_run_file
    from dflash_offline.stages import run_evaluation

    config = load_run_file(run_file, overrides=overrides)
    sys.exit(run_evaluation(config, drafter_names=drafter_names, folder=folder, watch=watch))


@main.command()
@_run_file_command
@click.option("--drafter", "drafter_names", multiple=True, help="Only this drafter.")
@click.option(
    "--format",
    "layout",
    type=click.Choice(["official", "speculators"]),
    default="official",
    show_default=True,
    help="Layout that the official package, vLLM and SGLang load, or that of speculators.",
)
def export(
    run_file: Path, overrides: tuple[str, ...], drafter_names: tuple[str, ...], layout: str
) -> None:
    """Write each drafter's best checkpoint as a folder that inference engines load."""
    from dflash_offline.config import load_run_file
    from dflash_offline.stages import export_drafters

    config = load_run_file(run_file, overrides=overrides)
    for out_dir in export_drafters(config, drafter_names=drafter_names, layout=layout):
        click.echo(f"exported {out_dir}")


@main.command()
@_run_file_command
def regenerate(run_file: Path, overrides: tuple[str, ...]) -> None:
    """Let the target answer the prompts itself; the answers are the data to train on."""
    from dflash_offline.config import load_run_file
    from dflash_offline.stages import run_regeneration

    config = load_run_file(run_file, overrides=overrides)
    click.echo(f"answers in {run_regeneration(config)}")


class _SubmitsByDefault(click.Group):
    """`slurm RUN.toml` means `slurm submit RUN.toml`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Puts `submit` in front unless the arguments name a command or ask for help."""
        if args and args[0] not in {*self.commands, *ctx.help_option_names}:
            args = ["submit", *args]
        return super().parse_args(ctx, args)


@main.group(cls=_SubmitsByDefault)
def slurm() -> None:
    """Run both stages as Slurm jobs: `slurm RUN.toml` submits, again only what is left."""


@slurm.command()
@_run_file_command
@click.option("--dry-run", is_flag=True, help="Write the sbatch files, print the commands only.")
@click.option("--again", is_flag=True, help="Also submit what is done: data or epochs were added.")
def submit(run_file: Path, overrides: tuple[str, ...], dry_run: bool, again: bool) -> None:
    """Write the sbatch files into the run folder and submit what is neither done nor alive."""
    from dflash_offline.config import load_run_file
    from dflash_offline.slurm import submit

    config = load_run_file(run_file, overrides=overrides)
    submit(config, only_left=False, again=again, dry_run=dry_run)


@slurm.command()
@_run_file_command
@click.option("--dry-run", is_flag=True, help="Write the sbatch files, print the commands only.")
def retry(run_file: Path, overrides: tuple[str, ...], dry_run: bool) -> None:
    """Submit the array tasks whose work is incomplete and that are not alive, and no others."""
    from dflash_offline.config import load_run_file
    from dflash_offline.slurm import submit

    config = load_run_file(run_file, overrides=overrides)
    submit(config, only_left=True, again=False, dry_run=dry_run)


@slurm.command(name="status")
@_run_file_command
def slurm_status(run_file: Path, overrides: tuple[str, ...]) -> None:
    """Say how much is committed and trained, and which jobs are alive."""
    from dflash_offline.config import load_run_file
    from dflash_offline.slurm import print_status

    print_status(load_run_file(run_file, overrides=overrides))


@slurm.command()
@_run_file_command
def cancel(run_file: Path, overrides: tuple[str, ...]) -> None:
    """Cancel the run's live jobs; everything committed stays."""
    from dflash_offline.config import load_run_file
    from dflash_offline.slurm import cancel

    cancel(load_run_file(run_file, overrides=overrides))


@slurm.command()
@_run_file_command
def finalize(run_file: Path, overrides: tuple[str, ...]) -> None:
    """Count what is done and print the `--array=` of what is left; exit code 75 if anything is."""
    from dflash_offline.config import load_run_file
    from dflash_offline.slurm import finalize

    sys.exit(finalize(load_run_file(run_file, overrides=overrides)))


@main.command()
@click.argument("place", type=str, required=False)
@click.option("--leave", is_flag=True, help="Leave a mark at PLACE for another host.")
@click.option("--find", "mark", help="Check the mark that another host left at PLACE.")
@_one_line_errors
def doctor(place: str | None, leave: bool, mark: str | None) -> None:
    """Say what is wrong with this machine, and with PLACE for a store (a folder or URL).

    Exit code 2 if anything is.
    """
    from dflash_offline.doctor import diagnose

    sys.exit(diagnose(place, leave=leave, mark=mark))


@main.group()
def store() -> None:
    """Look into a store, check it, mend it, derive another from it."""


@store.command()
@click.argument("store_dir", type=str)
@click.option("--sequence", "sequence_id", help="Show this sequence with its loss mask in colour.")
@_one_line_errors
def info(store_dir: str, sequence_id: str | None) -> None:
    """Say what a store holds."""
    from dflash_offline.stores import print_sequence, print_store

    if sequence_id is None:
        print_store(store_dir)
    else:
        print_sequence(store_dir, sequence_id=sequence_id)


@store.command()
@click.argument("store_dir", type=str)
@click.option("--full", is_flag=True, help="Read and check every chunk, not only sizes.")
@_one_line_errors
def verify(store_dir: str, full: bool) -> None:
    """Check a store; name every damaged shard, layer and sequence."""
    from dflash_offline.stores import print_verification

    sys.exit(print_verification(store_dir, full=full))


@store.command()
@click.argument("store_dir", type=str)
@_one_line_errors
def repair(store_dir: str) -> None:
    """Give up damaged shards, so that the next `extract` fills exactly them again."""
    from dflash_offline.stores import repair_store

    repair_store(store_dir)


@store.command()
@click.argument("store_dir", type=str)
@_one_line_errors
def gc(store_dir: str) -> None:
    """Remove what killed or losing workers left behind, a day old at least."""
    from dflash_offline.stores import remove_garbage

    remove_garbage(store_dir)


@store.command()
@click.argument("source", type=str)
@click.argument("target", type=str)
@_one_line_errors
def copy(source: str, target: str) -> None:
    """Copy a store, checked, to a folder or URL; again: only what is missing there."""
    from dflash_offline.stores import print_copy

    print_copy(source, target)


@store.command()
@click.argument("source_dir", type=str)
@click.argument("target_dir", type=str)
@click.option("--encoding", required=True, help="bf16, fp8, int8, int4, int3 or int2.")
@_one_line_errors
def encode(source_dir: str, target_dir: str, encoding: str) -> None:
    """Write a store again with its states in another encoding; resumes where it stopped."""
    from dflash_offline.stores import encode_store

    encode_store(source_dir, target_dir, encoding=encoding)


if __name__ == "__main__":
    main()
