"""Write docs/run-file.md from the settings themselves, so that the page cannot drift from them.

python docs/write_run_file_page.py
"""

from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from dflash_offline.config import RunConfig

PAGE = Path(__file__).parent / "run-file.md"
HEADER = """# The run file

One TOML file says everything about a run; `dflash-offline COMMAND RUN.toml` takes it, or the bare
name of a preset (`demo`). `--set table.key=value` overrides one setting and may be repeated. An
unknown key is refused, with the nearest known one named. Relative paths in a run file start at its
folder (a `target.model` too, where a folder of that name is there or it starts with `.`); those
given with `--set`, the default of `run_dir` and what a preset writes start at the working folder.
This page is written by `docs/write_run_file_page.py` from the settings' own definitions.
"""


def page() -> str:
    """The whole page as Markdown."""
    return HEADER + "".join(_table(RunConfig, name="", title="Top level"))


def _table(model: type[BaseModel], *, name: str, title: str) -> list[str]:
    lines = [f"\n## {title}\n"]
    if name:
        lines.append(f"{model.__doc__}\n")
    lines.append("\n| setting | default | meaning |\n|---|---|---|\n")
    nested: list[str] = []
    for key, field in model.model_fields.items():
        inner = _inner_model(field.annotation)
        path = f"{name}.{key}" if name else key
        if inner is None:
            meaning = (field.description or "").replace("\n", " ").replace("|", "\\|")
            default = _default(field.get_default(call_default_factory=True))
            lines.append(f"| `{key}` | {default} | {meaning} |\n")
        else:
            brackets = f"[[{path}]]" if key == "drafter" else f"[{path}]"
            nested += _table(inner, name=path, title=f"`{brackets}`")
    if lines[-1].startswith("\n| setting"):
        lines.pop()
    return [*lines, *nested]


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
