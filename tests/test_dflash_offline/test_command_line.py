"""Errors of a command: one line and an exit code for the user's, a traceback for ours."""

import errno
import os

import click
import pytest
from click.testing import CliRunner, Result

from dflash_offline.command_line import one_line_errors


def run_failing_with(error: BaseException) -> Result:
    @click.command()
    @one_line_errors
    def command() -> None:
        raise error

    return CliRunner().invoke(command)


def refusal(code: int, *names: str) -> OSError:
    return OSError(code, os.strerror(code), names[0], None, *names[1:])


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("train.epochs = 0:\n  too few"), "train.epochs = 0: too few"),
        (refusal(errno.ENOENT, "/no"), "/no: No such file or directory"),
        (refusal(errno.EISDIR, "/tmp-1", "/run.toml"), "/run.toml: Is a directory"),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
            "the disk is full; free space there, then run the same command again",
        ),
        (
            refusal(errno.EROFS, "/a"),
            "/a: the file system is read-only; mount it writable or choose another folder",
        ),
    ],
)
def test_a_users_error_is_one_line(error: Exception, line: str) -> None:
    result = run_failing_with(error)
    assert result.exit_code == 2
    assert result.stderr == f"error: {line}\n"


def test_ctrl_c_says_that_nothing_is_lost() -> None:
    result = run_failing_with(KeyboardInterrupt())
    assert result.exit_code == 130
    assert result.stderr == "interrupted; what is finished stays: run the same command again\n"


def test_a_bug_keeps_its_traceback() -> None:
    assert isinstance(run_failing_with(TypeError("ours")).exception, TypeError)
