"""Versions: those of the packages that are there, and the commit of this very code."""

import importlib.metadata
import subprocess
from pathlib import Path

import pytest

from storage.versions import git_commit_of, versions


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("1")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_the_commit_is_that_of_the_file(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    assert git_commit_of(repository / "code.py") == commit
    (repository / "code.py").write_text("2")
    assert git_commit_of(repository / "code.py") == f"{commit}-dirty"


def test_a_package_installed_inside_somebodys_repository_has_no_commit(repository: Path) -> None:
    (repository / "installed.py").write_text("1")
    assert git_commit_of(repository / "installed.py") is None


def test_without_a_repository_or_git_there_is_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert git_commit_of(tmp_path / "code.py") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_commit_of(tmp_path / "code.py") is None


def test_packages_have_their_versions() -> None:
    found = versions()
    assert found["torch"] == importlib.metadata.version("torch")
    assert found["dflash-offline"] == importlib.metadata.version("dflash-offline")
