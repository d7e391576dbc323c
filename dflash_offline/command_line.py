"""What all commands share: the run file, `--set`, and errors in one line."""

import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from storage.errors import advice_on

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
"""As shells say it; extraction and training, once begun, end with 75 instead."""
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
            click.echo(f"error: {one_line(error)}", err=True)
            sys.exit(EXIT_BAD_INPUT)
        except KeyboardInterrupt:
            click.echo("interrupted; what is finished stays: run the same command again", err=True)
            sys.exit(EXIT_INTERRUPTED)

    return wrapped


def one_line(error: Exception) -> str:
    """An error's message in one line; the system's own names the file first, without numbers."""
    message = str(error)
    if isinstance(error, OSError) and error.strerror is not None:
        message = advice_on(error) or error.strerror
        if error.filename is not None:
            place = error.filename if error.filename2 is None else error.filename2
            message = f"{place}: {message}"
    return " ".join(message.split())


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
