"""The whole path through the real command line, and what a stranger's mistakes end with."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import tomli_w
from click.testing import CliRunner

from dflash_offline.cli import main

RUN = {
    "target": {"model": "target", "dtype": "float32"},
    "data": {"conversations": ["conversations.jsonl"], "max_sequence_tokens": 128},
    "store": {"encoding": "bf16", "target_layer_ids": [0, 1], "held_out_fraction": 0.3},
    "extract": {"num_workers": 2},
    "train": {
        "max_steps": 3,
        "batch_tokens": 128,
        "num_anchors": 16,
        "dtype": "float32",
        "checkpoint_steps": 3,
        "validation_steps": 3,
        "validation_sequences": 2,
    },
    "drafter": [
        {"name": "one", "num_layers": 1, "block_size": 4, "mask_token_id": 260},
        {"name": "two", "num_layers": 2, "block_size": 4, "mask_token_id": 260},
    ],
    "eval": {"num_prompts": 2, "max_new_tokens": 8, "batch_size": 2, "torch_threads": 1},
}
ONE_WORKER = ("--worker", "0", "--num-workers", "1")
Command = Callable[..., "Ended"]


@pytest.fixture
def folder(tiny_target_dir: Path, tmp_path: Path) -> Path:
    """A folder with a run file, a tiny target and conversations, as a user would have it."""
    (tmp_path / "target").symlink_to(tiny_target_dir, target_is_directory=True)
    numbers = random.Random(0)
    with (tmp_path / "conversations.jsonl").open("w") as file:
        for index in range(16):
            one, other = numbers.randrange(50), numbers.randrange(50)
            line = {"id": f"c{index}", "prompt": f"{one}+{other}?", "response": f"{one + other}."}
            file.write(json.dumps(line) + "\n")
    (tmp_path / "run.toml").write_text(tomli_w.dumps(RUN))
    return tmp_path


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str


@pytest.fixture
def command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs `dflash-offline` in that folder; what it launches are processes of their own."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*arguments: str) -> Ended:
        result = CliRunner().invoke(main, arguments)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Ended(result.exit_code, result.stdout, result.stderr)

    return run


def test_extract_train_eval_export(command: Command, folder: Path) -> None:
    for name in ("extract", "train", "eval", "export"):
        result = command(name, "run.toml")
        assert result.exit_code == 0, f"{name}: {result.stdout}{result.stderr}"
    run_dir = folder / "runs" / "run"
    for drafter in ("one", "two"):
        drafter_dir = run_dir / "drafters" / drafter
        assert json.loads((drafter_dir / "eval.json").read_text())["step"] == 3
        assert (drafter_dir / "export" / "model.safetensors").is_file()
        assert (drafter_dir / "metrics.jsonl").is_file()
    assert (run_dir / "run.resolved.toml").is_file()
    again = command("extract", "run.toml")
    assert again.exit_code == 0
    assert "nothing to extract" in again.stdout
    info = command("store", "info", "runs/run/store", "--sequence", "c3")
    assert info.exit_code == 0, info.stderr
    assert "supervised" in info.stdout
    assert command("store", "verify", "--full", "runs/run/store").exit_code == 0


@pytest.mark.slow
def test_two_processes_hold_one_target(command: Command, folder: Path) -> None:
    two_processes = ("--set", "extract.gpus_per_worker=2", "--set", "extract.num_workers=1")
    extracted = command("extract", "run.toml", *two_processes)
    assert extracted.exit_code == 0, extracted.stdout + extracted.stderr
    extract_dir = folder / "runs" / "run" / "extract"
    assert (extract_dir / "worker-00000" / "rank-00001.log").is_file()
    assert "16 sequences" in (extract_dir / "worker-00000" / "rank-00000.log").read_text()
    assert "nothing to extract" in command("extract", "run.toml", *two_processes).stdout


TWO_RANKS = ("--set", "train.gpus_per_drafter=2")


def test_two_processes_train_one_drafter(command: Command, folder: Path) -> None:
    assert command("extract", "run.toml", *ONE_WORKER).exit_code == 0
    trained = command("train", "run.toml", *TWO_RANKS)
    assert trained.exit_code == 0, trained.stdout + trained.stderr
    for drafter in ("one", "two"):
        drafter_dir = folder / "runs" / "run" / "drafters" / drafter
        records = map(json.loads, (drafter_dir / "metrics.jsonl").read_text().splitlines())
        assert [r["num_ranks"] for r in records if r["kind"] == "train"] == [2, 2]
        assert (drafter_dir / "ranks" / "rank-00001.log").is_file()


@pytest.mark.slow
def test_torchrun_trains_a_drafter(command: Command, folder: Path) -> None:
    assert command("extract", "run.toml", *ONE_WORKER).exit_code == 0
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")
    arguments = ("dflash_offline.cli", "train", "run.toml", "--drafter", "one", *TWO_RANKS)
    ended = subprocess.run(
        [sys.executable, "-m", *torchrun, "-m", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "2 x cpu" in ended.stdout
    assert "done after step 3" in ended.stdout


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_damage_is_named_given_up_and_filled_again(command: Command, folder: Path) -> None:
    assert command("extract", "run.toml", *ONE_WORKER).exit_code == 0
    assert (folder / "runs" / "run" / "run.resolved.toml").is_file(), "a worker alone records it"
    data_files = [
        path
        for path in (folder / "runs" / "run" / "store").rglob("*")
        if path.is_file() and path.stat().st_size > 10_000 and "head" not in path.parts
    ]
    damage(max(data_files, key=lambda path: path.stat().st_size))
    result = command("store", "verify", "--full", "runs/run/store")
    assert result.exit_code == 1
    assert "damaged" in result.stdout
    assert "layer" in result.stdout
    assert command("store", "repair", "runs/run/store").exit_code == 0
    refill = command("extract", "run.toml", *ONE_WORKER)
    assert refill.exit_code == 0, refill.stderr
    assert command("store", "verify", "--full", "runs/run/store").exit_code == 0
    assert command("store", "gc", "runs/run/store").exit_code == 0


def test_a_store_is_derived_in_another_encoding(command: Command) -> None:
    assert command("extract", "run.toml", *ONE_WORKER).exit_code == 0
    result = command("store", "encode", "runs/run/store", "int8-store", "--encoding", "int8")
    assert result.exit_code == 0, result.stderr
    assert "int8-store: 72 bytes of states a token" in result.stdout
    refused = command("store", "encode", "runs/run/store", "other", "--encoding", "int9")
    assert refused.exit_code == 2
    assert "expected one of bf16, fp8, int8" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("extract", "absent.toml"), "absent.toml: no such run file"),
        (("extract", "run.toml", "--set", "data.conversations=['absent.jsonl']"), "absent.jsonl"),
        (("extract", "run.toml", "--set", "target.model=absent"), "absent"),
        (("extract", "run.toml", "--set", "store.target_layer_ids=[0,9]"), "9"),
        (("extract", "run.toml", "--set", "stor.encoding=bf16"), "did you mean store"),
        (("extract", "run.toml", "--worker", "2", "--num-workers", "2"), "expected 0..1"),
        (("train", "run.toml", "--drafter", "absent"), "no such drafter; it has one, two"),
        (("eval", "run.toml"), "no checkpoint"),
        (("export", "run.toml"), "no checkpoint"),
        (("store", "info", "absent"), "absent"),
        (("store", "verify", "absent"), "absent"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    command: Command, arguments: tuple[str, ...], message: str
) -> None:
    result = command(*arguments)
    assert result.exit_code == 2, result.stdout + result.stderr
    line = result.stderr.strip()
    assert line.startswith("error: "), line
    assert "\n" not in line
    assert message in line


def test_another_identity_is_refused_and_the_store_left_whole(
    command: Command, folder: Path
) -> None:
    assert command("extract", "run.toml", *ONE_WORKER).exit_code == 0
    result = command("extract", "run.toml", "--set", "data.max_sequence_tokens=64")
    assert result.exit_code == 2
    assert "max_sequence_tokens" in result.stderr
    assert command("store", "verify", "--full", "runs/run/store").exit_code == 0


def test_bad_lines_are_counted_or_stop_the_run(command: Command, folder: Path) -> None:
    path = folder / "conversations.jsonl"
    path.write_text(path.read_text() + "{broken\n" + '{"id": "e", "messages": []}\n')
    strict = command("extract", "run.toml", "--strict")
    assert strict.exit_code == 2
    assert "conversations.jsonl" in strict.stderr
    assert "17" in strict.stderr
    lenient = command("extract", "run.toml", *ONE_WORKER)
    assert lenient.exit_code == 0, lenient.stderr
    assert "1 x bad JSON, 1 x empty conversation" in lenient.stdout + lenient.stderr


def test_duplicate_ids_are_refused_with_both_lines(command: Command, folder: Path) -> None:
    path = folder / "conversations.jsonl"
    first = path.read_text().splitlines()[0]
    path.write_text(path.read_text() + first + "\n")
    result = command("extract", "run.toml")
    assert result.exit_code == 2
    assert "c0" in result.stderr
    assert "17" in result.stderr
