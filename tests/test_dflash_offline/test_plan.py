"""The plan of a run: true to what the run then does, from configuration and data alone."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from transformers import Qwen3Config

from dflash_offline import plan as module
from dflash_offline.cli import main
from dflash_offline.config import RunConfig
from dflash_offline.plan import plan_run
from dflash_offline.plan_report import plan_as_json, print_plan, verdict
from dflash_offline.plan_training import TrainingPlan, plan_training
from stage1_extract.plan import StoreShape
from stage1_extract.plan_counts import TokenCount
from stage2_train.config import DrafterConfig, DrafterRun, TrainConfig
from stage2_train.drafter import Drafter
from storage.reader import open_store


def test_the_plan_is_what_the_run_did(tiny_run: RunConfig) -> None:
    plan = plan_run(tiny_run, measure=False)
    snapshot = open_store(Path(str(tiny_run.run_dir)) / "store").snapshot()
    count = plan.extraction.count
    assert count.is_exact
    assert count.num_sequences == snapshot.num_sequences
    assert count.num_tokens == int(snapshot.num_tokens.sum())
    assert count.longest_tokens == int(snapshot.num_tokens.max())
    assert plan.extraction.size.num_shards == snapshot.num_shards
    assert plan.extraction.problem is None


def test_no_weights_are_needed(tiny_run: RunConfig, tmp_path: Path) -> None:
    folder = tmp_path / "no-weights"
    shutil.copytree(tiny_run.target.model, folder)
    (folder / "model.safetensors").unlink()
    target = tiny_run.target.model_copy(update={"model": str(folder)})
    plan = plan_run(tiny_run.model_copy(update={"target": target}), measure=False)
    assert plan.extraction.num_parameters > 0
    assert not (tmp_path / "run").exists()


def test_the_drafter_is_the_one_that_training_makes(tiny_run: RunConfig) -> None:
    from stage2_train.checkpoint import latest_checkpoint, load_drafter

    folder = Path(str(tiny_run.run_dir)) / "drafters" / "small"
    checkpoint = latest_checkpoint(folder)
    assert checkpoint is not None
    drafter: Drafter = load_drafter(checkpoint)
    (planned,) = plan_run(tiny_run, measure=False).training
    assert planned.num_parameters == sum(weight.numel() for weight in drafter.parameters())
    # Two layers of 32 in bf16, token id and mask.
    assert planned.read_token_bytes == 2 * 32 * 2 + 5


def test_an_8b_targets_drafter_takes_what_was_measured() -> None:
    """23.4 GiB on an H200, and 25.3 (fp8: 36.5) thousand tokens a second."""
    target = Qwen3Config(
        hidden_size=4096,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=12288,
        vocab_size=151936,
        tie_word_embeddings=False,
        max_position_embeddings=40960,
    )
    shape = StoreShape(
        layers=("1", "9", "17", "25", "33"),
        encoding="fp8",
        hidden_size=4096,
        shard_bytes=10**9,
        head_bytes=10**12,  # The store's own matter: training loads embedding and LM head only.
    )
    count = TokenCount(
        num_conversations=1,
        num_counted=1,
        num_sequences=1,
        num_tokens=3072,
        num_tokens_error=0,
        mean_context_tokens=1536.5,
        longest_tokens=3072,
        num_truncated=0,
    )
    run = DrafterRun(
        drafter=DrafterConfig(name="d", mask_token_id=1),
        train=TrainConfig(batch_tokens=3072, num_anchors=512),
        store_dir="s3://x/y",
        drafter_dir=Path("x"),
    )

    def planned(**changes: object) -> TrainingPlan:
        changed = run.model_copy(update={"train": run.train.model_copy(update=changes)})
        return plan_training(
            changed, target, shape, count, held_out_fraction=0.0, gpu_name="NVIDIA H200"
        )

    plan = planned()
    assert plan.memory_bytes == pytest.approx(23.4 * 2**30, rel=0.1)
    assert plan.tokens_per_s == pytest.approx(36_500, rel=0.1)
    assert planned(fp8=False).tokens_per_s == pytest.approx(25_300, rel=0.1)
    for uncompiled in ({"compile": False}, {"attention": "sdpa"}):
        assert planned(**uncompiled).tokens_per_s == planned(fp8=False).tokens_per_s
    assert plan.read_token_bytes == 5 * 4100 + 5
    four = planned(gpus_per_drafter=4, max_steps=1, epochs=9, parallel="fsdp")
    one = planned(max_steps=1, epochs=9, fp8=False)  # As sharded ones are.
    assert (four.tokens_per_s, four.num_tokens) == pytest.approx(
        (4 * (one.tokens_per_s or 0), 4 * one.num_tokens), rel=1e-3
    )
    assert one.memory_bytes - four.memory_bytes == pytest.approx(12 * one.num_parameters, rel=1e-3)
    assert planned(batches_per_step=2, max_steps=1, epochs=9).num_tokens == pytest.approx(
        2 * one.num_tokens, abs=1
    )
    assert planned(data_fraction=0.5).num_tokens == plan.num_tokens / 2


def test_a_store_that_does_not_fit_says_so_with_the_ways(
    tiny_run: RunConfig, tmp_path: Path
) -> None:
    changes = {
        "extract": tiny_run.extract.model_copy(update={"max_store_bytes": 200_000}),
        "store": tiny_run.store.model_copy(update={"dir": str(tmp_path / "new")}),
    }
    plan = plan_run(tiny_run.model_copy(update=changes), measure=False)
    assert not plan_as_json(plan)["store"]["fits"]
    assert plan.extraction.ways
    assert all(way.num_bytes <= 200_000 for way in plan.extraction.ways)
    assert verdict(plan.extraction)[0].startswith("does not fit: extract.max_store_bytes")


def test_what_is_stored_needs_no_room_again(
    tiny_run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stage1_extract import plan_room

    monkeypatch.setattr(plan_room, "free_space", lambda _: (15_000, None))
    assert plan_run(tiny_run, measure=False).extraction.problem is None
    elsewhere = tiny_run.store.model_copy(update={"dir": str(tmp_path / "new")})
    plan = plan_run(tiny_run.model_copy(update={"store": elsewhere}), measure=False)
    assert plan.extraction.problem is not None


def test_a_sample_shows_its_error(tiny_run: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    data = tiny_run.data.model_copy(update={"counted_conversations": 10})
    plan = plan_run(tiny_run.model_copy(update={"data": data}), measure=False)
    assert plan.extraction.count.num_tokens_error > 0
    print_plan(plan)
    output = capsys.readouterr().out
    assert "(10 counted)" in output
    assert "±" in output


def test_a_measured_rate_is_called_so(
    tiny_run: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "MEASURED_S", 0.1)
    plan = plan_run(tiny_run, measure=True)
    assert plan.extraction.hours is not None
    print_plan(plan)
    assert "(measured)" in capsys.readouterr().out.replace("\n", "")


def run_file(tiny_run: RunConfig, folder: Path) -> Path:
    path = folder / "tiny.toml"
    path.write_text(
        f'[target]\nmodel = "{tiny_run.target.model}"\ndtype = "float32"\n'
        f"[data]\nconversations = {json.dumps(tiny_run.data.conversations)}\n"
        '[store]\nencoding = "bf16"\ntarget_layer_ids = [0, 1]\n'
        '[[drafter]]\nname = "small"\nnum_layers = 1\nblock_size = 4\nmask_token_id = 260\n'
    )
    return path


def test_the_command_prints_json(
    tiny_run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["plan", str(run_file(tiny_run, tmp_path)), "--json"])
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["data"]["num_sequences"] == 24
    assert plan["train"][0]["drafter"] == "small"
    assert not (tmp_path / "runs").exists(), "a plan writes nothing"


def test_extract_refuses_what_the_plan_says_does_not_fit(
    tiny_run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [str(run_file(tiny_run, tmp_path)), "--set", "extract.max_store_bytes=200kB"]
    result = CliRunner().invoke(main, ["extract", *arguments])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: extract.max_store_bytes = 200 kB leaves 200 kB and the store")


@pytest.mark.parametrize("command", ["plan", "extract"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("target_layer_ids = [2]", "drafter small: target_layer_ids [2] are not in the store"),
        ("head_dim = 7", "drafter small: head_dim 7 is odd"),
        ('[eval]\nsuites = ["gsm9k"]', "eval.suites: unknown suite 'gsm9k'"),
        ('[eval]\nsuites = ["/no.jsonl"]', "eval.suites: there is no file /no.jsonl"),
    ],
)
def test_what_would_stop_later_stages_stops_the_first(
    tiny_run: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    settings: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = run_file(tiny_run, tmp_path)
    path.write_text(f"{path.read_text()}{settings}\n")
    result = CliRunner().invoke(main, [command, str(path)])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {message}")
    assert not (tmp_path / "runs").exists()
