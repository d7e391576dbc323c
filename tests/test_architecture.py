"""Laws of the whole tree: import rules, the CLI's start, the README's paths."""

import re
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize("page", sorted(p.name for p in ROOT.glob("*.md")))
def test_every_path_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    linked = re.findall(r"\]\(([^)#:]+)\)", text)
    quoted = re.findall(r"`([A-Za-z0-9_.-]+/[A-Za-z0-9_./-]*\.(?:md|py|toml|jsonl))`", text)
    missing = [path for path in {*linked, *quoted} if not (ROOT / path).exists()]
    assert not missing, f"{page} names {missing}"
