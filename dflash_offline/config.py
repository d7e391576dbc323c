"""The run file: one TOML file that says everything about a run."""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dflash_offline.grid import expand_grids
from dflash_offline.run_paths import is_url, with_absolute_paths
from dflash_offline.slurm_config import SlurmConfig
from stage1_extract.config import (
    DataConfig,
    ExtractConfig,
    ExtractRun,
    RegenerateConfig,
    StoreConfig,
    TargetConfig,
)
from stage2_train.config import (
    DrafterConfig,
    DrafterRun,
    TrainConfig,
    refuse_less_than_a_block,
)

PRESETS_DIR = Path(__file__).parent / "presets"


class Settings(BaseModel):
    """Base of every table of the run file: frozen, unknown keys refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class EvalConfig(Settings):
    """Real speculative decoding: what is decoded and how it is judged."""

    suites: tuple[str, ...] = Field(default=("held_out",), min_length=1)
    """`held_out` (the store's own split), a suite's name, or a JSONL file of prompts."""
    num_prompts: int = Field(default=64, ge=1)
    """Prompts of each suite at most."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Longest answer, in tokens."""
    batch_size: int = Field(default=16, ge=1)
    """Prompts decoded at once."""
    temperature: float = Field(default=0.0, ge=0.0)
    """0 is greedy decoding; above it, rejection sampling."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus share of probability kept when sampling."""
    top_k: int = Field(default=0, ge=0)
    """Most likely tokens kept when sampling; 0 keeps all."""
    tie_margin: float | None = Field(default=None, ge=0.0)
    """A token that differs from plain greedy decoding counts as a tie below this top-2 margin of
    the target; None takes 0.02 in fp32 and 0.25 in half precision."""
    untrained: bool = True
    """Also decode the first suite with an untrained drafter of the same shape."""
    torch_threads: int = Field(default=2, ge=1)
    """CPU threads of the evaluation process."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of sampling and of the bootstrap interval."""


class LaunchConfig(Settings):
    """Which devices the drafters' processes get."""

    gpus: tuple[int, ...] | None = None
    """GPUs of stage 2, one drafter each; None takes the last three of eight, else all."""
    max_processes: int = Field(default=2, ge=1)
    """Drafters trained at once on a machine without a GPU; the others queue."""


class RunConfig(Settings):
    """The whole run file."""

    run_dir: str | None = None
    """Folder of everything the run writes; None is `runs/<name of the run file>`."""
    target: TargetConfig
    data: DataConfig
    store: StoreConfig = StoreConfig()
    extract: ExtractConfig = ExtractConfig()
    regenerate: RegenerateConfig = RegenerateConfig()
    train: TrainConfig = TrainConfig()
    launch: LaunchConfig = LaunchConfig()
    drafter: tuple[DrafterConfig, ...] = Field(min_length=1)
    eval: EvalConfig = EvalConfig()
    slurm: SlurmConfig = SlurmConfig()

    @model_validator(mode="before")
    @classmethod
    def _grids_are_expanded(cls, tables: Any) -> Any:
        return expand_grids(tables) if isinstance(tables, Mapping) else tables

    @model_validator(mode="after")
    def _drafter_names_are_unique(self) -> "RunConfig":
        names = [drafter.name for drafter in self.drafter]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two drafters share the name {', '.join(twice)}; rename one")
        return self


def load_run_file(path: Path, *, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a run file or a preset's name, applies `--set` overrides, and checks every key.

    Relative paths become absolute, see `run_paths`.

    Args:
        path: A TOML file, or the bare name of a preset such as `demo`.
        overrides: `table.key=value` strings; the value is read as TOML, else taken as text.

    Raises:
        ValueError: The file is missing or not TOML, a key is unknown, a value does not fit.
    """
    path = find_run_file(path)
    try:
        # Some editors begin a file with a mark of its encoding.
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a valid TOML file: {error}") from error
    here, folder = Path.cwd(), path.resolve().parent
    outputs_dir = here if folder == PRESETS_DIR.resolve() else folder
    tables = with_absolute_paths(tables, inputs_dir=folder, outputs_dir=outputs_dir)
    for override in overrides:
        _apply_override(tables, override)
    # What is still relative was given with --set.
    tables = with_absolute_paths(tables, inputs_dir=here, outputs_dir=here)
    tables.setdefault("run_dir", str(here / "runs" / path.stem))
    try:
        config = RunConfig.model_validate(tables)
    except ValidationError as error:
        raise ValueError(f"{path}: {_describe(error)}") from error
    for drafter in config.drafter:
        refuse_less_than_a_block(_merged_train(config.train, drafter), drafter)
    return config


def find_run_file(path: Path) -> Path:
    """The file itself, or the preset of that name.

    Raises:
        ValueError: Neither exists; the message lists the presets.
    """
    if path.is_file():
        return path
    preset = PRESETS_DIR / f"{path}.toml"
    if preset.is_file():
        return preset
    names = ", ".join(sorted(preset.stem for preset in PRESETS_DIR.glob("*.toml")))
    raise ValueError(f"{path}: no such run file; give a TOML file or one of the presets: {names}")


def extract_run(config: RunConfig) -> ExtractRun:
    """Stage 1's part of the run file."""
    run_dir = run_dir_of(config)
    return ExtractRun(
        target=config.target,
        data=config.data,
        store=config.store,
        extract=config.extract,
        store_dir=store_dir_of(config),
        run_dir=run_dir,
    )


def drafter_run(config: RunConfig, name: str) -> DrafterRun:
    """One drafter's part of the run file.

    Raises:
        ValueError: The run file has no drafter of that name.
    """
    for drafter in config.drafter:
        if drafter.name == name:
            return DrafterRun(
                drafter=drafter,
                train=_merged_train(config.train, drafter),
                store_dir=store_dir_of(config),
                drafter_dir=run_dir_of(config) / "drafters" / name,
            )
    names = ", ".join(drafter.name for drafter in config.drafter)
    raise ValueError(f"--drafter {name}: the run file has no such drafter; it has {names}")


def run_dir_of(config: RunConfig) -> Path:
    """The run folder, absolute."""
    assert config.run_dir is not None, "load_run_file fills run_dir in"
    return Path(config.run_dir)


def store_dir_of(config: RunConfig) -> Path | str:
    """The store's folder, absolute, or its URL; by default inside the run folder."""
    if config.store.dir is None:
        return run_dir_of(config) / "store"
    return config.store.dir if is_url(config.store.dir) else Path(config.store.dir)


def as_toml_tables(config: RunConfig) -> dict[str, Any]:
    """The resolved settings as TOML knows them: no nulls."""
    tables = config.model_dump(mode="json")
    pruned = _without_none(tables)
    assert isinstance(pruned, dict)
    return pruned


def _merged_train(train: TrainConfig, drafter: DrafterConfig) -> TrainConfig:
    """The shared `[train]` table with this drafter's own settings over it."""
    tables = _merge(train.model_dump(), drafter.train)
    try:
        return TrainConfig.model_validate(tables)
    except ValidationError as error:
        fault = _describe(error, root=TrainConfig)
        raise ValueError(f"drafter {drafter.name}: train: {fault}") from error


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        inner = merged.get(key)
        merged[key] = _merge(inner, value) if isinstance(inner, dict) else value
    return merged


def _apply_override(tables: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ValueError(f"--set {override}: expected table.key=value")
    *parents, leaf = [part.strip() for part in key.split(".")]
    table = tables
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ValueError(f"--set {override}: {parent} is not a table of the run file")
    table[leaf] = _toml_value(text.strip())


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _describe(error: ValidationError, *, root: type[BaseModel] = RunConfig) -> str:
    """The first fault in one line, with a suggestion where a key is merely misspelt."""
    fault = error.errors()[0]
    if fault["type"] == "extra_forbidden":
        where = ".".join(map(str, fault["loc"]))
        return f"unknown key {where}{_did_you_mean(root, fault['loc'])}"
    location = _as_in_the_file(root, fault["loc"])
    where = ".".join(map(str, location))
    if fault["type"] == "missing":
        return f"{where} is missing; add it to the run file"
    if fault["type"] == "tuple_type":
        return f'{where}: expected a list, such as ["a", "b"], also for a single value'
    if fault["type"] in ("model_type", "dict_type"):
        return f"{where} = {fault['input']!r}: expected a table of settings"
    if fault["type"] == "too_short":
        return f"{where} is empty; give at least {fault['ctx']['min_length']}"
    if fault["type"] == "value_error":
        return ": ".join(filter(None, [where, str(fault["ctx"]["error"])]))
    # A setting of several types has a fault for each.
    same = [each for each in error.errors() if _as_in_the_file(root, each["loc"]) == location]
    wanted = " or ".join(each["msg"].removeprefix("Input ") for each in same)
    return f"{where} = {fault['input']!r}: {wanted}"


def _as_in_the_file(root: type[BaseModel], location: Sequence[int | str]) -> list[int | str]:
    """A fault's place without the types that a setting of several was tried as."""
    named: list[int | str] = []
    for part in location:
        if isinstance(part, str) and part not in _known_keys(root, named):
            break
        named.append(part)
    return named


def _did_you_mean(root: type[BaseModel], location: Sequence[int | str]) -> str:
    known = _known_keys(root, location[:-1])
    close = difflib.get_close_matches(str(location[-1]), known, n=1)
    return (
        f"; did you mean {close[0]}?" if close else f"; known keys are {', '.join(sorted(known))}"
    )


def _known_keys(model: type[BaseModel], parents: Sequence[int | str]) -> list[str]:
    """The keys of the table that `parents` leads to, through nested tables and arrays of them."""
    for parent in parents:
        if isinstance(parent, int):
            continue
        annotation = model.model_fields[parent].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        tables = [each for each in candidates if isinstance(each, type)]
        inner = next((each for each in tables if issubclass(each, BaseModel)), None)
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
