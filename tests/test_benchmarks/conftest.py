"""Benchmarks lie outside of the packages: tests import them as the scripts import each other."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `import shapes` find `benchmarks/shapes.py`."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
