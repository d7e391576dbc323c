"""The documentation follows the code."""

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import click
import pytest
from pydantic import BaseModel

from dflash_offline.cli import main
from dflash_offline.config import RunConfig

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]
TABLES = tuple(RunConfig.model_fields)


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


def code_blocks(page: Path) -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def inline_code(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.findall(r"`([^`]+)`", text)


def unknown_setting(key: str) -> str | None:
    """The first part of a dotted key that no table of the run file has."""
    model: Any = RunConfig
    # A drafter's `train` is the table of that name.
    for part in re.sub(r"^drafter\.(?=train\.)", "", key).split("."):
        if model is None or not issubclass(model, BaseModel):
            return None  # Settings of a free form, as `data.template_arguments`.
        if part not in model.model_fields:
            return key
        annotation = model.model_fields[part].annotation
        inner = [each for each in (annotation, *get_args(annotation)) if isinstance(each, type)]
        model = next((each for each in inner if issubclass(each, BaseModel)), None)
    return None


def keys_of(tables: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tables.items():
        yield prefix + name
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Mapping) and (prefix + name) != "drafter.grid":
                yield from keys_of(each, f"{prefix}{name}.")


def problem_of(arguments: list[str]) -> str | None:
    """What is wrong with the words behind `dflash-offline`."""
    command: click.Command = main
    words = list(arguments)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.commands.get(words[0])
        if found is None and command.name == "slurm":
            found = command.commands["submit"]  # As the group itself does.
        elif found is None:
            return f"no command {words[0]}"
        else:
            words.pop(0)
        command = found
    known = {"-h", "--help", *(name for each in command.params for name in each.opts)}
    known |= {"--version"} if command is main else set()
    for place, word in enumerate(words):
        if word.startswith("-") and word.split("=")[0] not in known:
            return f"{command.name} has no option {word}"
        key = words[place + 1].partition("=")[0] if word == "--set" else "run_dir"
        if unknown_setting(key.removeprefix("TABLE.")) and not key.startswith("TABLE"):
            return f"no setting {key}"
    return None


def commands_of(page: Path) -> Iterator[str]:
    """Each `dflash-offline` command that a page shows, lines that go on put together."""
    for block in code_blocks(page):
        for line in block.replace("\\\n", " ").splitlines():
            if found := re.search(r"(?:^|[ /])dflash-offline (.+)", line):
                yield found[1].rstrip(" &")
    for text in inline_code(page):
        if found := re.match(r"(?:dflash-offline|\.\.\.) ((?:store )?[a-z].+)", text, re.S):
            yield " ".join(found[1].split())


def pages(parts: Any) -> Any:
    return pytest.mark.parametrize("page", parts, ids=lambda page: page.name)


@pages(PAGES)
def test_every_command_a_page_shows_exists_with_its_options(page: Path) -> None:
    shown = {
        command: problem_of(shlex.split(command, comments=True)) for command in commands_of(page)
    }
    assert {command: problem for command, problem in shown.items() if problem} == {}


@pages(PAGES)
def test_every_setting_a_page_names_exists(page: Path) -> None:
    names = rf"((?:{'|'.join(TABLES)})\.[a-z_][a-z_0-9.]*)(?: = .*)?"
    files = (".json", ".svg", ".md", ".log", ".toml", ".html", ".gguf")
    found = [match[1] for text in inline_code(page) if (match := re.fullmatch(names, text, re.S))]
    assert [key for key in found if not key.endswith(files) and unknown_setting(key)] == []


@pages(PAGES)
def test_every_table_a_page_shows_is_one_of_the_run_file(page: Path) -> None:
    for block in code_blocks(page):
        if block.startswith("["):
            unknown = [key for key in keys_of(tomllib.loads(block)) if unknown_setting(key)]
            assert unknown == [], block


@pages(PAGES)
def test_every_test_a_page_names_exists(page: Path) -> None:
    tests = DOCS.parent / "tests"
    for text in inline_code(page):
        if found := re.fullmatch(r"(test_\w+\.py)::(test_\w+)", text):
            holding = [path.read_text(encoding="utf-8") for path in tests.rglob(found[1])]
            assert any(f"def {found[2]}(" in each for each in holding), text


def test_what_is_unknown_would_be_noticed() -> None:
    assert problem_of(["extarct", "run.toml"]) == "no command extarct"
    assert (
        problem_of(["extract", "run.toml", "--workers", "2"]) == "extract has no option --workers"
    )
    assert problem_of(["train", "run.toml", "--set", "train.optimizr.x=1"]) is not None
    assert problem_of(["slurm", "run.toml", "--dry-run"]) is None
    assert problem_of(["store", "info", "STORE", "--sequence", "ID"]) is None
    assert unknown_setting("drafter.train.loss.kind") is None
    assert unknown_setting("drafter.train.los.kind") is not None
