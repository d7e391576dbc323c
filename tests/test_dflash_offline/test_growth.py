"""`store add-layers`, as a person types it."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from dflash_offline import growth
from dflash_offline.cli import main
from dflash_offline.config import RunConfig, load_run_file, store_dir_of
from dflash_offline.launch import Job
from storage.reader import open_store
from storage.verify import verify_store


@pytest.fixture
def run_file(tiny_run: RunConfig, tmp_path: Path) -> Path:
    """A run file whose store is a copy of the tiny run's."""
    shutil.copytree(store_dir_of(tiny_run), tmp_path / "store")
    path = tmp_path / "run.toml"
    path.write_text(
        f"""
run_dir = "{tmp_path / "run"}"
[target]
model = "{tiny_run.target.model}"
dtype = "float32"
[data]
conversations = ["not needed.jsonl"]
max_sequence_tokens = 128
[store]
dir = "{tmp_path / "store"}"
encoding = "int8"
target_layer_ids = [0, 1]
held_out_fraction = 0.3
[extract]
num_workers = 2
[[drafter]]
name = "small"
"""
    )
    return path


def test_a_worker_adds_layers_and_shows_them(run_file: Path, tmp_path: Path) -> None:
    before = open_store(tmp_path / "store").snapshot().id
    command = ["store", "add-layers", str(run_file), "--layers", "2,lm_head_input"]
    result = CliRunner().invoke(main, [*command, "--worker", "0", "--num-workers", "1"])
    assert result.exit_code == 0, result.output
    store = open_store(tmp_path / "store")
    assert {name: layer.encoding for name, layer in store.layers.items()} == {
        "0": "bf16",
        "1": "bf16",
        "2": "int8",
        "lm_head_input": "int8",
    }
    assert verify_store(tmp_path / "store", full=True).ok
    assert store.snapshot().id == before
    assert store.snapshot().losses_of_shard(0)["2"].relative_error < 0.02


def test_the_launcher_starts_a_worker_a_place(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Job] = []

    def run_jobs(jobs: list[Job], **_: object) -> dict[str, int]:
        started.extend(jobs)
        return {job.name: 0 for job in jobs}

    monkeypatch.setattr(growth, "run_jobs", run_jobs)
    config = load_run_file(run_file, overrides=["store.encoding=fp8"])
    code = growth.launch_added_layers(
        config, run_file=run_file, overrides=["store.encoding=fp8"], layers=["2"]
    )
    assert code == 0
    head = ["store", "add-layers", str(run_file), "--layers", "2", "--set", "store.encoding=fp8"]
    assert [list(job.arguments) for job in started] == [
        [*head, "--worker", str(index), "--num-workers", "2"] for index in range(2)
    ]


def test_a_target_on_several_gpus_is_spread_over_each_workers_processes(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Job] = []
    monkeypatch.setattr(growth, "run_jobs", lambda each, **_: jobs.extend(each) or {})
    overrides = ["extract.gpus_per_worker=2"]
    config = load_run_file(run_file, overrides=overrides)
    growth.launch_added_layers(config, run_file=run_file, overrides=overrides, layers=["2"])
    assert [job.num_places for job in jobs] == [2, 2]
    # Real processes: they form a group, add the layer together, and the first one writes.
    command = ["store", "add-layers", str(run_file), "--layers", "2", "--set", *overrides]
    result = CliRunner().invoke(main, [*command, "--worker", "0", "--num-workers", "1"])
    assert result.exit_code == 0, result.output
    assert "2" in open_store(tmp_path / "store").layers
    assert verify_store(tmp_path / "store", full=True).ok
    # Nothing is left to do, so nothing is started.
    jobs.clear()
    assert (
        growth.launch_added_layers(config, run_file=run_file, overrides=overrides, layers=["2"])
        == 0
    )
    assert jobs == []


def test_wrong_arguments_are_one_line(run_file: Path) -> None:
    command = ["store", "add-layers", str(run_file), "--layers"]
    for arguments, expected in {
        ("x",): "expected decoder layers such as 3,5",
        ("9",): "9 out of range",
        ("2", "--worker", "0"): "--worker I and --num-workers N go together",
    }.items():
        result = CliRunner().invoke(main, [*command, *arguments])
        assert result.exit_code == 2
        assert expected in result.output
        assert result.output.count("\n") == 1
