"""A grid stands for its combinations: one drafter each, named after its settings."""

from pathlib import Path

import pytest

from dflash_offline.config import drafter_run, load_run_file
from dflash_offline.grid import expand_grids

HEAD = """
[target]
model = "some/model"
[data]
conversations = ["data.jsonl"]
[[drafter]]
name = "alone"
[[drafter]]
name = "sweep"
block_size = 8
"""


def write(folder: Path, grid: str) -> Path:
    path = folder / "experiment.toml"
    path.write_text(HEAD + grid)
    return path


def test_every_combination_is_a_drafter_with_a_readable_name(tmp_path: Path) -> None:
    grid = """
train = {num_anchors = 64}
[drafter.grid]
num_layers = [1, 2]
train.optimizer.learning_rate = [3e-4, 6e-4]
"train.seed" = [0]
"""
    config = load_run_file(write(tmp_path, grid))
    assert [drafter.name for drafter in config.drafter] == [
        "alone",
        "sweep.num_layers-1.learning_rate-0.0003.seed-0",
        "sweep.num_layers-1.learning_rate-0.0006.seed-0",
        "sweep.num_layers-2.learning_rate-0.0003.seed-0",
        "sweep.num_layers-2.learning_rate-0.0006.seed-0",
    ]
    run = drafter_run(config, "sweep.num_layers-2.learning_rate-0.0006.seed-0")
    assert (run.drafter.num_layers, run.drafter.block_size) == (2, 8)
    assert run.train.optimizer.learning_rate == 6e-4
    assert run.train.num_anchors == 64
    assert run.drafter.grid == {}


def test_values_that_are_lists_or_have_odd_characters_make_names_too(tmp_path: Path) -> None:
    grid = """
[drafter.grid]
target_layer_ids = [[1, 9], [1, 9, 17]]
init_from = ["runs/a b"]
"""
    names = [drafter.name for drafter in load_run_file(write(tmp_path, grid)).drafter]
    assert names[1:] == [
        "sweep.target_layer_ids-1_9.init_from-runs_a_b",
        "sweep.target_layer_ids-1_9_17.init_from-runs_a_b",
    ]


def test_expansion_changes_nothing_that_has_no_grid() -> None:
    tables = {"drafter": [{"name": "one", "train": {"seed": 1}}], "train": {"seed": 2}}
    assert expand_grids(tables) == tables
    assert expand_grids({}) == {}


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("num_layers = [1, 1]", "two drafters share the name sweep.num_layers-1; rename one"),
        ("num_layers = 1", r"drafter sweep: grid.num_layers must list the values to try, found 1"),
        ("train.seed = []", r"grid.train.seed must list the values to try, found \[\]"),
        ("num_layer = [1]", "unknown key drafter.1.num_layer; did you mean num_layers"),
        ("train.sed = [1]", "drafter sweep.sed-1: train: unknown key sed; did you mean seed"),
    ],
)
def test_a_wrong_grid_is_one_clear_line(tmp_path: Path, grid: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        load_run_file(write(tmp_path, f"[drafter.grid]\n{grid}\n"))
    assert "\n" not in str(raised.value)
