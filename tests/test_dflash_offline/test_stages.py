"""A run's commands, started twice."""

from pathlib import Path

import pytest

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
