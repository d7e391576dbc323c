"""The `store` commands, as a person types them."""

import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from dflash_offline.cli import main
from dflash_offline.config import RunConfig, drafter_run, store_dir_of
from dflash_offline.stores import parse_range
from stage2_train.checkpoint import latest_checkpoint
from stage2_train.train import train_drafter
from storage.losses import EncodingLoss
from storage.reader import open_store

Run = Callable[..., Result]


@pytest.fixture(scope="session")
def making() -> SimpleNamespace:
    path = Path(__file__).parents[1] / "test_storage" / "fill_store.py"
    return SimpleNamespace(**runpy.run_path(str(path)))


@pytest.fixture
def store_dir(tmp_path: Path, making: SimpleNamespace) -> Path:
    making.fill(making.make_store(tmp_path / "a störe"))
    return tmp_path / "a störe"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "200")

    def command(*arguments: Any, exit_code: int = 0) -> Result:
        result = CliRunner().invoke(main, ["store", *map(str, arguments)])
        assert result.exit_code == exit_code, result.output
        return result

    return command


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]


def test_info_shows_what_encoding_lost(run: Run, store_dir: Path, making: SimpleNamespace) -> None:
    table = run("info", store_dir).output
    assert ["9", "bf16", "32", "not measured", ""] in [cells(line) for line in table.splitlines()]
    store = making.make_store(store_dir)
    store.plan_generation(["measured"], num_units=1)
    (unit,) = set(store.units()) - store.committed()
    with store.start_shard(unit) as shard:
        shard.append(**making.make_sequence("measured"))
        loss = EncodingLoss(num_measured_tokens=4, sum_squared_errors=0.04, num_saturated=7)
        shard.count_losses({"1": loss})
        shard.seal()
    rows = [cells(line) for line in run("info", store_dir).output.splitlines()]
    assert ["1", "fp8", "20", "10.00%", "7"] in rows


def test_info_names_every_sequence_that_was_left_out(
    run: Run, store_dir: Path, making: SimpleNamespace
) -> None:
    before = run("info", store_dir, "--skipped").output
    store = making.make_store(store_dir)
    store.plan_generation(["long", "masked"], num_units=1)
    (unit,) = set(store.units()) - store.committed()
    with store.start_shard(unit) as shard:
        shard.skip(sequence_id="masked", reason="no supervised pair of tokens")
        shard.skip(sequence_id="long", reason="too long")
        shard.seal()
    new = run("info", store_dir, "--skipped").output.splitlines()
    assert set(new) - set(before.splitlines()) == {
        "long\ttoo long",
        "masked\tno supervised pair of tokens",
    }


def test_a_store_is_not_copied_onto_itself(run: Run, store_dir: Path) -> None:
    assert "is the source itself" in run("copy", store_dir, store_dir, exit_code=2).output


def test_a_store_is_packed_and_info_tells_what_it_takes(
    run: Run, store_dir: Path, tmp_path: Path
) -> None:
    run("encode", store_dir, tmp_path / "packed", "--encoding", "bf16", "--packing", "zstd")
    rows = [cells(line) for line in run("info", tmp_path / "packed").output.splitlines()]
    (row,) = [row for row in rows if row and row[0] == "9"]
    assert row[1] == "bf16, zstd"
    # Tiny chunks pack badly, but the files are what is counted.
    files = (tmp_path / "packed").glob("shards/*/*/layers/9/c/0/0")
    num_tokens = int(open_store(tmp_path / "packed").snapshot().num_tokens.sum())
    assert int(row[2]) == pytest.approx(sum(p.stat().st_size for p in files) / num_tokens, abs=1)
    digests = {open_store(place).content_digest() for place in (store_dir, tmp_path / "packed")}
    assert len(digests) == 2  # fp8 layers became bf16.


def test_cat_prints_a_line_a_token(run: Run, store_dir: Path) -> None:
    result = run("cat", store_dir, "s3", "--layers", "9,1", "--tokens", "5:9", "--values", "2")
    rows = [cells(line) for line in result.output.splitlines() if cells(line)]
    assert [row[0] for row in rows[1:]] == ["5", "6", "7", "8"]
    assert rows[0][4:] == ["layer 9", "layer 1"]
    token_ids, loss_mask = (
        open_store(store_dir)
        .snapshot()
        .read_tokens(open_store(store_dir).snapshot().index_of("s3"))
    )
    assert [int(row[1]) for row in rows[1:]] == token_ids[5:9].tolist()
    assert [row[3] == "learnt" for row in rows[1:]] == loss_mask[5:9].tolist()
    states = open_store(store_dir).sequence("s3").hidden_states(layers=["9"])[5, 0]
    assert rows[1][4].split()[1:] == [f"{value:.3g}" for value in states[:2]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, range(10)),
        ("2:5", range(2, 5)),
        ("8:", range(8, 10)),
        ("-3:", range(7, 10)),
        ("4", range(4, 5)),
        (":2", range(2)),
        ("7:99", range(7, 10)),
    ],
)
def test_token_ranges(text: str | None, expected: range) -> None:
    assert parse_range(text, num_tokens=10) == expected


@pytest.mark.parametrize("text", ["0:0", ":0", "5:2", "10", "-11", "10:"])
def test_ranges_without_tokens_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="holds none of the sequence's 10 tokens"):
        parse_range(text, num_tokens=10)


def test_a_joined_store_names_its_members(run: Run, store_dir: Path, tmp_path: Path) -> None:
    run("join", tmp_path / "joined", store_dir)
    for command in ("verify", "repair", "gc"):
        result = run(command, tmp_path / "joined", exit_code=2)
        assert f"only joins others; give one of them: {store_dir}" in result.stderr
        assert result.output.count("\n") == 1


def test_brackets_in_a_path_are_no_markup(run: Run, store_dir: Path, tmp_path: Path) -> None:
    place = store_dir.rename(tmp_path / "run[1] [red]")
    assert f"store {place}" in run("info", place).output
    assert f"{place}: 3 shards, whole" in run("verify", place).output
    next(place.glob("shards/*/*/tokens.bin")).write_bytes(b"")
    assert str(place) in run("verify", place, exit_code=1).output


def test_bad_input_is_one_line(run: Run, store_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no log")
    for arguments, expected in {
        ("cat", store_dir, "s3", "--tokens", "0:0"): "holds none of the sequence's",
        ("copy", store_dir, store_dir / "copy"): "lies inside the source",
        ("encode", store_dir, store_dir / "b", "--encoding", "fp8"): "lies inside the source",
        ("export", store_dir, store_dir): "is the source itself",
        ("verify", tmp_path / "file"): "there is no store at",
        ("repair", tmp_path / "file"): "there is no store at",
        ("gc", tmp_path / "file"): "there is no store at",
        ("gc", tmp_path): "there is no store at",
        ("verify", store_dir, "--log", store_dir / "log"): "lies inside the source",
        ("verify", store_dir, "--log", tmp_path / "file"): "is no log of a check",
        ("cat", store_dir, "s3", "--tokens", "x"): "--tokens x: expected a range such as 0:20",
        ("cat", store_dir, "s3", "--layers", "7"): "has no layer 7; it has 1, 9, lm_head_input",
        ("cat", store_dir, "s99"): "holds no committed sequence 's99'",
        ("info", tmp_path): "there is no store at",
        ("info", store_dir, "--skipped", "--sequence", "s3"): "give either --sequence or --skipped",
        ("encode", store_dir, tmp_path / "b"): "give either --encoding or --like",
        ("encode", store_dir, tmp_path / "b", "--like", store_dir, "--packing", "zstd"): (
            "--packing goes with --encoding"
        ),
        ("encode", store_dir, tmp_path / "b", "--encoding", "int5"): "expected one of bf16, fp8",
        ("join", tmp_path / "j", store_dir, tmp_path / "no"): "there is no store at",
    }.items():
        result = run(*arguments, exit_code=2)
        assert expected in result.output
        assert result.output.startswith("error: ")
        assert result.output.count("\n") == 1


def test_an_interrupted_check_goes_on(run: Run, store_dir: Path, tmp_path: Path) -> None:
    log_path = tmp_path / "checked.jsonl"
    assert "3 shards, whole" in run("verify", store_dir, "--full", "--log", log_path).output
    names = [json.loads(line)["name"] for line in log_path.read_text().splitlines()]
    assert len(names) == 3
    assert "3 shards, whole" in run("verify", store_dir, "--full", "--log", log_path).output
    assert len(log_path.read_text().splitlines()) == 3


def test_a_damaged_store_is_named_and_given_up(run: Run, store_dir: Path) -> None:
    victim = next(store_dir.glob("shards/*/*/layers/9/c/0/0"))
    victim.write_bytes(victim.read_bytes()[:-1])
    verdict = run("verify", store_dir, exit_code=1).output
    assert "layer 9" in verdict
    assert "1 problems" in verdict
    assert "run `extract` again" in run("repair", store_dir).output
    assert "whole" in run("verify", store_dir).output


def test_stores_are_encoded_joined_and_cleaned(
    run: Run, store_dir: Path, tmp_path: Path, making: SimpleNamespace
) -> None:
    other = making.create_store(tmp_path / "other", making.make_identity())
    other.add_layers(making.LAYERS)
    other.plan_generation(["t1", "t2"], num_units=1)
    making.fill(other)
    run("encode", store_dir, tmp_path / "a8", "--encoding", "int8")
    run("encode", tmp_path / "other", tmp_path / "b8", "--like", tmp_path / "a8")
    joined = run("join", tmp_path / "joined", tmp_path / "a8", tmp_path / "b8").output
    assert "2 stores, 4 shards, 14 sequences" in joined
    assert "14 sequences" in run("info", tmp_path / "joined").output
    refused = run("gc", tmp_path / "joined", exit_code=2).output
    assert "give one of them" in refused
    store = making.make_store(store_dir)
    store.plan_generation(["later"], num_units=1)
    (unit,) = set(store.units()) - store.committed()
    store.start_shard(unit)
    assert "0 leftovers removed" in run("gc", store_dir).output  # too young


def test_a_drafter_is_trained_on_joined_stores_as_on_the_store_itself(
    run: Run, tiny_run: RunConfig, tmp_path: Path
) -> None:
    run("join", tmp_path / "joined", store_dir_of(tiny_run))
    place = tiny_run.store.model_copy(update={"dir": str(tmp_path / "joined")})
    config = tiny_run.model_copy(update={"store": place, "run_dir": str(tmp_path / "run")})
    assert train_drafter(drafter_run(config, "small")) == 0
    weights = [
        load_file(latest_checkpoint(drafter_run(each, "small").drafter_dir) / "model.safetensors")
        for each in (tiny_run, config)
    ]
    assert weights[0].keys() == weights[1].keys()
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name])
