"""Versions: of the program and of the packages that shape a result, to be kept beside it."""

import functools
import importlib.metadata
import platform
import subprocess
from pathlib import Path

PACKAGES = ("torch", "triton", "transformers", "safetensors", "numpy", "zarr", "numcodecs")


@functools.cache
def versions() -> dict[str, str | None]:
    """Versions by name; `git_commit` is None outside a checkout and ends in `-dirty` if changed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    found["git_commit"] = git_commit_of(Path(__file__))
    for name in ("dflash-offline", *PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def git_commit_of(path: Path) -> str | None:
    """The commit a file is checked out from; None where it is not: git is asked about that file.

    An installed package may lie inside somebody's repository without being part of it.
    """

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(path.parent), *arguments]
        try:
            result = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    if git("ls-files", "--error-unmatch", path.name) is None:
        return None
    return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
