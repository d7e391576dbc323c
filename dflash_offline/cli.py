"""The command line: `dflash-offline COMMAND RUN.toml [--set table.key=value]`.

Heavy packages are imported inside the commands, so that `--help` answers at once.
"""

import sys
from pathlib import Path

import click

from dflash_offline import __version__
from dflash_offline.command_line import one_line_errors, run_file_command
from dflash_offline.launched import stop_with_launcher
from dflash_offline.store_commands import store


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dflash-offline")
def main() -> None:
    """Train DFlash speculative-decoding drafters from cached hidden states.

    RUN_FILE is a TOML file or the name of a preset such as `demo`.
    """
    stop_with_launcher()


@main.command()
@run_file_command
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
@run_file_command
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
    sys.exit(
        run_extraction_worker(
            config,
            worker_index=worker_index,
            num_workers=num_workers,
            run_file=run_file,
            overrides=overrides,
        )
    )


@main.command()
@run_file_command
@click.option("--drafter", "drafter_name", help="Train this drafter alone, in this process.")
@click.option("--prime", is_flag=True, help="Only compile for it and drafters of its shape.")
def train(
    run_file: Path, overrides: tuple[str, ...], drafter_name: str | None, prime: bool
) -> None:
    """Stage 2: train every drafter of the run file, each in a process of its own."""
    from dflash_offline.config import load_run_file
    from dflash_offline.stages import launch_training, run_priming, run_training

    config = load_run_file(run_file, overrides=overrides)
    if prime:
        if drafter_name is None:
            raise ValueError("--prime goes with --drafter NAME; without it `train` does so itself")
        sys.exit(run_priming(config, drafter_name=drafter_name))
    if drafter_name is not None:
        sys.exit(
            run_training(config, drafter_name=drafter_name, run_file=run_file, overrides=overrides)
        )
    sys.exit(launch_training(config, run_file=run_file, overrides=overrides))


@main.command(name="eval")
@run_file_command
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
@run_file_command
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
@run_file_command
def regenerate(run_file: Path, overrides: tuple[str, ...]) -> None:
    """Let the target answer the prompts itself; the answers are the data to train on."""
    from dflash_offline.config import load_run_file
    from dflash_offline.stages import run_regeneration

    config = load_run_file(run_file, overrides=overrides)
    sys.exit(run_regeneration(config))


@main.command()
@run_file_command
@click.option("--watch", is_flag=True, help="Show it anew every five seconds, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def status(run_file: Path, overrides: tuple[str, ...], watch: bool, as_json: bool) -> None:
    """Say how far a run is, how fast, what sets the pace, and when it will be done."""
    from dflash_offline.config import load_run_file
    from dflash_offline.status import show_status

    show_status(load_run_file(run_file, overrides=overrides), watch=watch, as_json=as_json)


@main.command()
@run_file_command
def report(run_file: Path, overrides: tuple[str, ...]) -> None:
    """Write one HTML page with plots of all that is known of a run: `report.html`."""
    from dflash_offline.config import load_run_file
    from dflash_offline.report import write_report

    path = write_report(load_run_file(run_file, overrides=overrides))
    click.echo(f"wrote {path}")


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
@run_file_command
@click.option("--dry-run", is_flag=True, help="Write the sbatch files, print the commands only.")
@click.option("--again", is_flag=True, help="Also submit what is done: data or epochs were added.")
def submit(run_file: Path, overrides: tuple[str, ...], dry_run: bool, again: bool) -> None:
    """Write the sbatch files into the run folder and submit what is neither done nor alive."""
    from dflash_offline.config import load_run_file
    from dflash_offline.slurm import submit

    config = load_run_file(run_file, overrides=overrides)
    submit(config, only_left=False, again=again, dry_run=dry_run)


@slurm.command()
@run_file_command
@click.option("--dry-run", is_flag=True, help="Write the sbatch files, print the commands only.")
def retry(run_file: Path, overrides: tuple[str, ...], dry_run: bool) -> None:
    """Submit the array tasks whose work is incomplete and that are not alive, and no others."""
    from dflash_offline.config import load_run_file
    from dflash_offline.slurm import submit

    config = load_run_file(run_file, overrides=overrides)
    submit(config, only_left=True, again=False, dry_run=dry_run)


@slurm.command(name="status")
@run_file_command
def slurm_status(run_file: Path, overrides: tuple[str, ...]) -> None:
    """Say how much is committed and trained, and which jobs are alive."""
    from dflash_offline.config import load_run_file
    from dflash_offline.slurm import print_status

    print_status(load_run_file(run_file, overrides=overrides))


@slurm.command()
@run_file_command
def cancel(run_file: Path, overrides: tuple[str, ...]) -> None:
    """Cancel the run's live jobs; everything committed stays."""
    from dflash_offline.config import load_run_file
    from dflash_offline.slurm import cancel

    cancel(load_run_file(run_file, overrides=overrides))


@slurm.command()
@run_file_command
def finalize(run_file: Path, overrides: tuple[str, ...]) -> None:
    """Count what is done and print the `--array=` of what is left; exit code 75 if anything is."""
    from dflash_offline.config import load_run_file
    from dflash_offline.slurm import finalize

    sys.exit(finalize(load_run_file(run_file, overrides=overrides)))


@main.command()
@click.argument("place", type=str, required=False)
@click.option("--leave", is_flag=True, help="Leave a mark at PLACE for another host.")
@click.option("--find", "mark", help="Check the mark that another host left at PLACE.")
@one_line_errors
def doctor(place: str | None, leave: bool, mark: str | None) -> None:
    """Say what is wrong with this machine, and with PLACE for a store: exit code 2 if anything is.

    PLACE is a folder, a URL or a run file, whose store is meant.
    """
    from dflash_offline.doctor import diagnose

    sys.exit(diagnose(place, leave=leave, mark=mark))


main.add_command(store)


if __name__ == "__main__":
    main()
