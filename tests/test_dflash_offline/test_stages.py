"""A run's commands: started twice, and started again."""

import shlex
from pathlib import Path

import pytest

from dflash_offline import stages
from dflash_offline.config import RunConfig
from dflash_offline.stages import launch_extraction
from storage.lock import only_process_in


def test_a_second_extraction_of_a_run_is_refused(tiny_run: RunConfig, tmp_path: Path) -> None:
    config = tiny_run.model_copy(update={"run_dir": str(tmp_path / "run")})
    with (
        only_process_in(tmp_path / "run" / "extract", work="extraction"),
        pytest.raises(ValueError, match="another extraction is running"),
    ):
        launch_extraction(config, run_file=Path("demo"), overrides=())


def test_how_to_go_on_is_the_command_that_was_given() -> None:
    overrides = ["train.epochs=8", 'eval.suites=["gsm8k"]']
    command = stages._same_command("train", Path("my run.toml"), overrides)
    given = ["train", "my run.toml", "--set", overrides[0], "--set", overrides[1]]
    assert shlex.split(command) == ["dflash-offline", *given]
