"""The documentation follows the code."""

import importlib.util
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parent.parent / "docs"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_run_file_page_is_what_the_settings_say() -> None:
    written = (DOCS / "run-file.md").read_text(encoding="utf-8")
    assert written == load(DOCS / "write_run_file_page.py").page(), (
        "settings changed; run: python docs/write_run_file_page.py"
    )


def test_the_scale_page_is_what_its_formulas_give() -> None:
    written = (DOCS / "internet-scale.md").read_text(encoding="utf-8")
    assert written == load(DOCS / "write_internet_scale_page.py").page(), (
        "a constant or formula changed; run: python docs/write_internet_scale_page.py"
    )
