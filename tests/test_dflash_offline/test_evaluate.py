"""Evaluation: what is measured, what is written, what is refused."""

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dflash_offline import evaluate as evaluate_module
from dflash_offline.config import drafter_run
from dflash_offline.evaluate import evaluate, forget_other_evaluations, is_training_done
from stage2_train.checkpoint import best_checkpoint, latest_checkpoint, list_checkpoints
from stage2_train.export import export_official


@pytest.fixture
def run(tiny_run, tmp_path):
    """A private copy of the tiny run."""
    copy = tmp_path / "run"
    shutil.copytree(tiny_run.run_dir, copy)
    return tiny_run.model_copy(update={"run_dir": str(copy)})


def changed(config, **settings):
    return config.model_copy(update={"eval": config.eval.model_copy(update=settings)})


def test_eval_json_says_what_was_measured(run, capsys):
    assert evaluate(run, drafter_names=(), folder=None, watch=False) == 0
    drafter_dir = drafter_run(run, "small").drafter_dir
    result = json.loads((drafter_dir / "eval.json").read_text())
    assert (result["drafter"], result["step"]) == ("small", 4)
    assert result["untrained_acceptance_length"] >= 1.0
    assert result["suites"]["held_out"]["untrained"]["lossless_fraction"] == 1.0
    found = result["suites"]["held_out"]
    assert found["num_prompts"] == 4  # as many as are held out
    assert found["lossless_fraction"] == 1.0
    low, high = found["acceptance_length_interval"]
    assert 1.0 <= low <= found["acceptance_length"] <= high <= 4.0
    assert len(found["accepted_by_offset"]) == 3
    assert found["target_tokens_per_s"] > 0
    assert found["drafted_tokens_per_s"] > 0
    assert "Real speculative decoding" in capsys.readouterr().out
    ElementTree.parse(Path(run.run_dir) / "eval.svg")


def test_each_decoded_checkpoint_is_a_point_beside_the_trainings_curves(run):
    for _ in range(2):
        evaluate(run, drafter_names=("small",), folder=None, watch=False)
    drafter_dir = drafter_run(run, "small").drafter_dir
    lines = [json.loads(line) for line in (drafter_dir / "decoded.jsonl").open()]
    result = json.loads((drafter_dir / "eval.json").read_text())
    assert [line["step"] for line in lines] == [4, 4]
    assert lines[0]["acceptance_length"] == {
        "held_out": result["suites"]["held_out"]["acceptance_length"]
    }
    curves = EventAccumulator(str(drafter_dir / "tensorboard")).Reload()
    assert curves.Scalars("decoding/held_out")[0].step == 4
    assert "train/loss" in curves.Tags()["scalars"]


def test_the_best_checkpoint_is_the_one_decoded_best(run):
    drafter_dir = drafter_run(run, "small").drafter_dir
    first = list_checkpoints(drafter_dir)[-1]
    (first / "evaluation.json").write_text(json.dumps({"acceptance_length": 3.5, "suites": {}}))
    evaluate(run, drafter_names=("small",), folder=None, watch=False)
    assert best_checkpoint(drafter_dir) != first, "an evaluation of other settings was believed"


@pytest.mark.parametrize("damaged", [b"", b"{", b"[]", bytes(range(128, 256))])
def test_an_evaluation_that_cannot_be_read_is_made_again(run, damaged):
    drafter_dir = drafter_run(run, "small").drafter_dir
    path = list_checkpoints(drafter_dir)[0] / "evaluation.json"
    path.write_bytes(damaged)
    forget_other_evaluations(drafter_dir, run.eval)
    assert not path.exists()


def test_watching_ends_with_training_and_evaluates_what_is_there(run):
    assert is_training_done(drafter_run(run, "small").drafter_dir)
    assert evaluate(run, drafter_names=("small",), folder=None, watch=True) == 0
    checkpoint = latest_checkpoint(drafter_run(run, "small").drafter_dir)
    assert (checkpoint / "evaluation.json").is_file()
    metrics_path = drafter_run(run, "small").drafter_dir / "metrics.jsonl"
    newest = json.loads(metrics_path.read_bytes().splitlines()[-1])
    with metrics_path.open("a") as file:  # It goes on with more epochs.
        file.write(json.dumps(newest | {"kind": "train", "step": 5, "total_steps": 8}) + "\n")
    assert not is_training_done(drafter_run(run, "small").drafter_dir)


def test_any_folder_and_sampling(run, tmp_path, monkeypatch):
    checkpoint = latest_checkpoint(drafter_run(run, "small").drafter_dir)
    exported = export_official(checkpoint, tmp_path / "exported")
    sampled = changed(run, temperature=0.8, top_p=0.9)
    monkeypatch.chdir(exported)
    assert evaluate(sampled, drafter_names=(), folder=Path(), watch=False) == 0
    result = json.loads((Path(run.run_dir) / "eval-exported.json").read_text())
    assert result["suites"]["held_out"]["lossless_fraction"] is None
    assert (Path(run.run_dir) / "eval-exported.svg").is_file()


def test_a_folder_that_is_no_drafter_is_refused_before_anything_is_decoded(
    run, tmp_path, monkeypatch
):
    monkeypatch.setattr(evaluate_module, "open_bench", lambda _: pytest.fail("decoded"))
    with pytest.raises(ValueError, match="absent"):
        evaluate(run, drafter_names=(), folder=tmp_path / "absent", watch=False)
    for given in ({"drafter_names": ("small",)}, {"watch": True}):
        with pytest.raises(ValueError, match="goes without --drafter and --watch"):
            evaluate(run, **({"drafter_names": (), "folder": tmp_path, "watch": False} | given))


def test_another_target_is_refused(run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run.target.model, other)
    weights = other / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    config = run.model_copy(update={"target": run.target.model_copy(update={"model": str(other)})})
    with pytest.raises(ValueError, match="has other weights than the target of the store"):
        evaluate(config, drafter_names=(), folder=None, watch=False)


def test_a_drafter_without_checkpoints_is_named(run):
    shutil.rmtree(drafter_run(run, "small").drafter_dir)
    with pytest.raises(ValueError, match="no checkpoint; train drafter small first"):
        evaluate(run, drafter_names=(), folder=None, watch=False)
