"""The run file: one TOML file that says everything about a run."""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from stage1_extract.config import (
    DataConfig,
    ExtractConfig,
    ExtractRun,
    RegenerateConfig,
    StoreConfig,
    TargetConfig,
)
from stage2_train.config import DrafterConfig, DrafterRun, TrainConfig

PRESETS_DIR = Path(__file__).parent / "presets"


class Settings(BaseModel):
    """Base of every table of the run file: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class EvalConfig(Settings):
    """Real speculative decoding: what is decoded and how it is judged."""

    suites: tuple[str, ...] = ("held_out",)
    """`held_out` (the store's own split), a suite's name, or a JSONL file of prompts."""
    num_prompts: int = Field(default=64, ge=1)
    """Prompts of each suite at most."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Longest answer, in tokens."""
    batch_size: int = Field(default=16, ge=1)
    """Prompts decoded at once."""
    temperature: float = Field(default=0.0, ge=0.0)
    """0 is greedy decoding; above it, rejection sampling."""
    tie_margin: float = Field(default=0.02, ge=0.0)
    """A token that differs from plain greedy decoding counts as a tie below this top-2 margin."""
    torch_threads: int = Field(default=2, ge=1)
    """CPU threads of the evaluation process."""
    seed: int = 0
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

    @model_validator(mode="after")
    def _drafter_names_are_unique(self) -> Self:
        names = [drafter.name for drafter in self.drafter]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two drafters share the name {', '.join(twice)}; rename one")
        return self
