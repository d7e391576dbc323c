"""Laws of the whole tree: import rules, the CLI's start, the README's paths."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).parent.parent


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)


def test_import_rules_hold() -> None:
    result = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports")],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("module", ["dflash_offline.cli", "dflash_offline.config"])
def test_import_loads_no_heavy_package(module: str) -> None:
    code = (
        f"import sys, {module}; heavy = ('torch', 'zarr', 'transformers', 'numpy');"
        "print([name for name in heavy if name in sys.modules])"
    )
    result = run_python(code)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_storage_loads_no_torch() -> None:
    code = (
        "import sys, storage.reader, storage.writer, storage.stream, storage.verify;"
        "print([name for name in ('torch', 'transformers', 'click') if name in sys.modules])"
    )
    result = run_python(code)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


PAGES = sorted(
    str(path.relative_to(ROOT))
    for folder in (".", "docs", "storage")
    for path in ROOT.glob(f"{folder}/*.md")
)


@pytest.mark.parametrize("page", PAGES)
def test_every_path_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    linked = {(ROOT / page).parent / path for path in re.findall(r"\]\(([^)#:]+)\)", text)}
    own = (
        r"`((?:dflash_offline|stage1_extract|stage2_train|storage|tests|benchmarks|docs)[\w./-]*)`"
    )
    named = {ROOT / path for path in re.findall(own, text) if "." in path or path.isidentifier()}
    missing = [str(path) for path in linked | named if not path.exists()]
    assert not missing, f"{page} names {missing}"


def test_the_readme_names_every_command() -> None:
    from dflash_offline.cli import main

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    store = main.commands["store"]
    assert isinstance(store, click.Group)
    for name in main.commands:
        assert f"`{name} " in text, name
    for name in store.commands:
        assert f"`store {name}`" in text or f"`{name}`" in text, name


def test_the_readme_names_the_top_level() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for folder in ("dflash_offline", "stage1_extract", "stage2_train", "storage", "benchmarks"):
        assert f"`{folder}`" in text
        assert (ROOT / folder).is_dir()


@pytest.mark.slow
def test_an_installed_wheel_is_whole(tmp_path: Path) -> None:
    """Presets and their data lie in it, and nothing asks for the checkout."""
    source, installed = tmp_path / "source", tmp_path / "installed"
    for name in ("dflash_offline", "stage1_extract", "stage2_train", "storage"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-build-isolation", "--target", str(installed), str(source)]
    subprocess.run([*pip, "install", *options], check=True)
    expected = {path.name for path in (ROOT / "dflash_offline" / "presets").iterdir()}
    found = {path.name for path in (installed / "dflash_offline" / "presets").iterdir()}
    assert expected - {"__pycache__"} <= found
    command = [sys.executable, "-P", "-m", "dflash_offline.cli", "status", "demo"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"run {tmp_path / 'runs' / 'demo'}" in done.stdout
