"""The `store` commands: look into a store, check, mend and grow it, derive another from it."""

import sys
from pathlib import Path

import click

from dflash_offline.command_line import one_line_errors, run_file_command


@click.group()
def store() -> None:
    """Look into a store, check it, mend it, make it grow, derive another from it."""


@store.command()
@click.argument("store_dir", type=str)
@click.option("--sequence", "sequence_id", help="Show this sequence with its loss mask in colour.")
@click.option("--skipped", is_flag=True, help="List the ids that were left out, with the reason.")
@one_line_errors
def info(store_dir: str, sequence_id: str | None, skipped: bool) -> None:
    """Say what a store holds, and what encoding lost."""
    from dflash_offline.stores import print_sequence, print_skipped, print_store

    if skipped and sequence_id is not None:
        raise ValueError("give either --sequence or --skipped")
    if skipped:
        print_skipped(store_dir)
    elif sequence_id is None:
        print_store(store_dir)
    else:
        print_sequence(store_dir, sequence_id=sequence_id)


@store.command()
@click.argument("store_dir", type=str)
@click.argument("sequence_id")
@click.option("--layers", help="Names such as 9,25; all by default.")
@click.option("--tokens", help="Positions such as 0:20; all by default.")
@click.option("--values", type=click.IntRange(min=0), default=4, help="Channels shown of each.")
@one_line_errors
def cat(
    store_dir: str, sequence_id: str, layers: str | None, tokens: str | None, values: int
) -> None:
    """Print a sequence token by token: id, text, mask, and the states of each layer."""
    from dflash_offline.stores import print_states

    names = None if layers is None else layers.split(",")
    print_states(store_dir, sequence_id, layers=names, tokens=tokens, num_values=values)


@store.command()
@click.argument("store_dir", type=str)
@click.option("--full", is_flag=True, help="Read and check every chunk, not only sizes.")
@click.option(
    "--log",
    "log_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File outside the store that notes checked shards: with it an interrupted check goes on.",
)
@click.option("--threads", type=click.IntRange(min=1), default=4, help="Shards checked at once.")
@one_line_errors
def verify(store_dir: str, full: bool, log_path: Path | None, threads: int) -> None:
    """Check a store; name every damaged shard, layer, chunk and sequence."""
    from dflash_offline.stores import print_verification

    sys.exit(print_verification(store_dir, full=full, log_path=log_path, num_threads=threads))


@store.command()
@click.argument("store_dir", type=str)
@one_line_errors
def repair(store_dir: str) -> None:
    """Give up damaged shards, so that the next `extract` fills exactly them again."""
    from dflash_offline.stores import repair_store

    repair_store(store_dir)


@store.command()
@click.argument("store_dir", type=str)
@one_line_errors
def gc(store_dir: str) -> None:
    """Remove what killed or losing workers left behind, a day old at least."""
    from dflash_offline.stores import remove_garbage

    remove_garbage(store_dir)


@store.command()
@click.argument("source", type=str)
@click.argument("target", type=str)
@one_line_errors
def copy(source: str, target: str) -> None:
    """Copy a store, checked, to a folder or URL; again: only what is missing there."""
    from dflash_offline.stores import print_copy

    print_copy(source, target)


@store.command()
@click.argument("source_dir", type=str)
@click.argument("target_dir", type=str)
@click.option("--encoding", help="bf16, fp8, int8, int4, int3 or int2.")
@click.option("--like", type=str, help="A store whose encodings and channel scales are taken.")
@click.option("--packing", type=click.Choice(["zstd"]), help="Pack without loss: bf16 by a third.")
@one_line_errors
def encode(
    source_dir: str, target_dir: str, encoding: str | None, like: str | None, packing: str | None
) -> None:
    """Write a store again with its states in another encoding; resumes where it stopped."""
    from dflash_offline.stores import encode_store

    encode_store(source_dir, target_dir, encoding=encoding, like=like, packing=packing)


@store.command()
@click.argument("joined_dir", type=str)
@click.argument("members", type=str, nargs=-1, required=True)
@one_line_errors
def join(joined_dir: str, members: tuple[str, ...]) -> None:
    """Make JOINED_DIR read as one store what lies in several of equal identity; copies nothing."""
    from dflash_offline.stores import join_into

    join_into(joined_dir, members)


@store.command(name="add-layers")
@run_file_command
@click.option("--layers", required=True, help="Decoder layers such as 3,5, or lm_head_input.")
@click.option("--worker", "worker_index", type=click.IntRange(min=0), help="Be one worker.")
@click.option("--num-workers", type=click.IntRange(min=1), help="Workers in all, with --worker.")
def add_layers(
    run_file: Path,
    overrides: tuple[str, ...],
    layers: str,
    worker_index: int | None,
    num_workers: int | None,
) -> None:
    """Capture more layers for the sequences that are stored; only these are computed."""
    from dflash_offline.config import load_run_file
    from dflash_offline.growth import launch_added_layers, run_added_layers

    config = load_run_file(run_file, overrides=overrides)
    names = layers.split(",")
    if (worker_index is None) != (num_workers is None):
        raise ValueError("--worker I and --num-workers N go together")
    if worker_index is None or num_workers is None:
        sys.exit(launch_added_layers(config, run_file=run_file, overrides=overrides, layers=names))
    sys.exit(
        run_added_layers(
            config,
            run_file=run_file,
            overrides=overrides,
            layers=names,
            worker_index=worker_index,
            num_workers=num_workers,
        )
    )


@store.command(name="import")
@run_file_command
@click.argument("cache_dir", type=click.Path(path_type=Path))
@click.option(
    "--from",
    "layout",
    type=click.Choice(["specforge", "speculators", "model-optimizer", "deepspec"]),
    help="Whose cache it is; told by its files if left out.",
)
@click.option("--layers", help="0-based decoder layers of the cache, in its order, such as 1,9,17.")
@click.option(
    "--loss-masks",
    type=click.Path(path_type=Path),
    help="JSON lines with id and loss_mask, for caches without.",
)
@click.option("--supervise-all", is_flag=True, help="Learn every token where no mask is known.")
@click.option(
    "--final-state",
    type=click.Choice(["normed", "before-norm"]),
    help="Where the cache's final states lie; its layout says so if left out.",
)
@click.option("--no-check", is_flag=True, help="Do not compare with the target's own states.")
def import_command(
    run_file: Path,
    overrides: tuple[str, ...],
    cache_dir: Path,
    layout: str | None,
    layers: str | None,
    loss_masks: Path | None,
    supervise_all: bool,
    final_state: str | None,
    no_check: bool,
) -> None:
    """Fill the run's store from another project's cache; the run's target gives its identity."""
    from dflash_offline.config import load_run_file
    from dflash_offline.conversions import import_into_run, parse_layer_ids

    sys.exit(
        import_into_run(
            load_run_file(run_file, overrides=overrides),
            source=cache_dir,
            layout=layout,
            layer_ids=None if layers is None else parse_layer_ids(layers),
            loss_masks=loss_masks,
            supervise_all=supervise_all,
            final_is_normed=None if final_state is None else final_state == "normed",
            is_checked=not no_check,
        )
    )


@store.command()
@click.argument("store_dir", type=str)
@click.argument("out_dir", type=click.Path(path_type=Path))
@click.option("--layers", help="Names such as 9,25; all by default.")
@one_line_errors
def export(store_dir: str, out_dir: Path, layers: str | None) -> None:
    """Write each sequence as a safetensors file, in bf16; resumes where it stopped."""
    from dflash_offline.conversions import export_to

    export_to(store_dir, out_dir, layers=None if layers is None else layers.split(","))
