"""The run file: defaults, overrides, and one clear line for every fault."""

import re
from pathlib import Path

import pytest

from dflash_offline.config import (
    PRESETS_DIR,
    as_toml_tables,
    drafter_run,
    load_run_file,
    store_dir_of,
)

MINIMAL = """
[target]
model = "some/model"
[data]
conversations = ["data.jsonl"]
[[drafter]]
name = "one"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "experiment.toml"
    path.write_text(text)
    return path


def test_relative_paths_start_at_the_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "files"
    (folder / "models" / "mine").mkdir(parents=True)
    text = """
run_dir = "out"
[target]
model = "models/mine"
[data]
conversations = ["data.jsonl", "/abs/data.jsonl"]
[store]
dir = "../store"
[regenerate]
prompts = ["prompts"]
output = "answers.jsonl"
[eval]
suites = ["held_out", "own.jsonl"]
[train]
read_cache_dir = "cache"
[[drafter]]
name = "one"
init_from = "drafters/old"
train = { read_cache_dir = "own-cache" }
"""
    config = load_run_file(write(folder, text))
    assert config.run_dir == str(folder / "out")
    assert config.target.model == str(folder / "models" / "mine")
    assert config.data.conversations == (str(folder / "data.jsonl"), "/abs/data.jsonl")
    assert store_dir_of(config).resolve() == tmp_path / "store"
    assert config.regenerate.prompts == (str(folder / "prompts"),)
    assert config.regenerate.output == str(folder / "answers.jsonl")
    assert config.eval.suites == ("held_out", str(folder / "own.jsonl"))
    assert config.drafter[0].init_from == str(folder / "drafters" / "old")
    assert config.train.read_cache_dir == str(folder / "cache")
    assert config.drafter[0].train["read_cache_dir"] == str(folder / "own-cache")


def test_paths_given_with_set_and_defaults_start_at_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "here" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    path = write(tmp_path / "files", MINIMAL)
    config = load_run_file(path)
    assert config.run_dir == str(tmp_path / "here" / "runs" / "experiment")
    assert store_dir_of(config) == tmp_path / "here" / "runs" / "experiment" / "store"
    overrides = ["run_dir=out", "target.model=model", 'data.conversations=["data.jsonl"]']
    config = load_run_file(path, overrides=overrides)
    assert config.run_dir == str(tmp_path / "here" / "out")
    assert config.target.model == str(tmp_path / "here" / "model")
    assert config.data.conversations == (str(tmp_path / "here" / "data.jsonl"),)


def test_a_preset_writes_to_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_run_file(Path("slurm"))
    assert config.run_dir == str(tmp_path / "runs" / "slurm")
    (data,) = load_run_file(Path("demo")).data.conversations
    assert Path(data).is_file()


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "embedded:smollm2-135m-instruct", "gpt2"])
def test_a_target_that_is_no_folder_keeps_its_name(tmp_path: Path, name: str) -> None:
    config = load_run_file(write(tmp_path, MINIMAL), overrides=[f"target.model={name}"])
    assert config.target.model == name


def test_a_gguf_target_starts_at_the_run_file(tmp_path: Path) -> None:
    text = re.sub(r'model = "[^"]*"', 'model = "weights.gguf"', MINIMAL, count=1)
    assert load_run_file(write(tmp_path, text)).target.model == str(tmp_path / "weights.gguf")


def test_a_path_to_a_target_is_a_path_though_nothing_is_there(tmp_path: Path) -> None:
    text = MINIMAL.replace("some/model", "./some/model")
    assert load_run_file(write(tmp_path, text)).target.model == str(tmp_path / "some" / "model")


def test_override_reaches_a_nested_setting(tmp_path: Path) -> None:
    config = load_run_file(
        write(tmp_path, MINIMAL),
        overrides=["train.optimizer.learning_rate=3e-4", "target.revision=main"],
    )
    assert config.train.optimizer.learning_rate == 3e-4
    assert config.target.revision == "main"


def test_a_drafters_own_settings_win_over_the_shared_table(tmp_path: Path) -> None:
    text = MINIMAL + "train = { seed = 7, optimizer = { learning_rate = 0.5 } }\n"
    config = load_run_file(write(tmp_path, text), overrides=["train.epochs=3"])
    train = drafter_run(config, "one").train
    assert (train.seed, train.epochs) == (7, 3)
    assert train.optimizer.learning_rate == 0.5
    assert train.optimizer.clip_norm == config.train.optimizer.clip_norm


def test_resolved_settings_read_back_equal(tmp_path: Path) -> None:
    tomli_w = pytest.importorskip("tomli_w")
    config = load_run_file(write(tmp_path, MINIMAL))
    again = write(tmp_path, tomli_w.dumps(as_toml_tables(config)))
    assert load_run_file(again) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epoch=1", "unknown key train.epoch; did you mean epochs?"),
        ("trainn.epochs=1", "unknown key trainn; did you mean train?"),
        ("train.loss.gama=1", "unknown key train.loss.gama; did you mean gamma?"),
        ("store.encoding=fp7", "store.encoding = 'fp7': should be 'bf16', 'fp8'"),
        ("train.epochs=0", "train.epochs = 0: should be greater than or equal to 1"),
        ("train.seed=-1", "train.seed = -1: should be greater than or equal to 0"),
        ("train.optimizer.learning_rate=inf", "learning_rate = inf: should be a finite number"),
        ("eval.temperature=nan", "eval.temperature = nan: should be a finite number"),
        ("store.held_out_fraction=nan", "store.held_out_fraction = nan: should be a finite"),
        ("train.optimizer.betas=[0.9, 1.0]", "train.optimizer.betas.1 = 1.0: should be less"),
        ("train.fp8=maybe", "train.fp8 = 'maybe': should be a valid boolean"),
        ("train.fp8=maybe", "or should be 'all'"),
        ("train.loss=3", "train.loss = 3: expected a table of settings"),
        ("train.batch_tokens=2", "drafter one: train.batch_tokens 2 is smaller than a block of 16"),
        ("train.window_tokens=8", "drafter one: train.window_tokens 8 is smaller than a block"),
        ("eval.suites=[]", "eval.suites is empty; give at least 1"),
        ("store.dir=s3:/bucket/prefix", "s3:/bucket/prefix: a URL has two slashes"),
        ("run_dir=", "run_dir is empty; give a path"),
        ("store.dir=", "dir is empty; give a path"),
        ("data.conversations=['']", "conversations is empty; give a path"),
        ("train.epochs", "expected table.key=value"),
        ("target.model.name=x", "model is not a table"),
        ("drafter=[]", "drafter is empty; give at least 1"),
    ],
)
def test_bad_setting_is_one_line_that_names_it(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        load_run_file(write(tmp_path, MINIMAL), overrides=[override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_key_of_a_drafters_train_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="drafter one: train: unknown key sed; did you mean seed"):
        load_run_file(write(tmp_path, MINIMAL + "train = { sed = 1 }\n"))


def test_two_drafters_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two drafters share the name one"):
        load_run_file(write(tmp_path, MINIMAL + '[[drafter]]\nname = "one"\n'))


def test_one_value_for_a_list_shows_the_list(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.conversations: expected a list"):
        load_run_file(write(tmp_path, MINIMAL), overrides=["data.conversations=x.jsonl"])


def test_missing_run_file_lists_the_presets(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no such run file; .*presets: .*demo"):
        load_run_file(tmp_path / "absent.toml")


def test_broken_toml_names_the_file_and_the_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"experiment\.toml: not a valid TOML file: .*line 2"):
        load_run_file(write(tmp_path, "[target]\nmodel =\n"))


def test_a_mark_of_the_encoding_is_no_setting(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_run_file(path).target.model == "some/model"


def test_a_store_in_an_object_store_keeps_its_url(tmp_path: Path) -> None:
    url = "s3://bucket/prefix"
    config = load_run_file(write(tmp_path, MINIMAL), overrides=[f"store.dir={url}"])
    assert store_dir_of(config) == url
    assert drafter_run(config, "one").store_dir == url


@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS_DIR.glob("*.toml")))
def test_every_preset_is_a_valid_run_file(preset: str) -> None:
    config = load_run_file(Path(preset))
    assert drafter_run(config, config.drafter[0].name).train == config.train
