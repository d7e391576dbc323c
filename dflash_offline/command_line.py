"""What all commands share: the run file, `--set`, and errors in one line."""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

EXIT_BAD_INPUT = 2
TRACEBACK_VARIABLE = "DFLASH_OFFLINE_TRACEBACK"


def one_line_errors(command: Callable[..., None]) -> Callable[..., None]:
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


def run_file_command(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the run file, `--set` and the error handling that most commands share."""
    command = one_line_errors(command)
    command = click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="TABLE.KEY=VALUE",
        help="Override one setting of the run file; may be repeated.",
    )(command)
    return click.argument("run_file", type=click.Path(path_type=Path))(command)
