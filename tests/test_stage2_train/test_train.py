"""Training learns, stops, resumes exactly, and refuses settings that do not fit."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from stage2_train.checkpoint import MODEL, OPTIMIZER, STATE, latest_checkpoint
from stage2_train.config import DrafterRun
from stage2_train.train import EXIT_DONE, EXIT_STOPPED_EARLY, Training, train_drafter
from storage.records import dump_record, parse_record

# Kills its own process, without a word, in the middle of a step.
KILLED = """
import os, signal, sys
from pathlib import Path
import stage2_train.train as page
from stage2_train.config import DrafterRun
run = DrafterRun.model_validate_json(sys.argv[1])
plain_step = page.Training.step
def step(self, batches, position, **arguments):
    if position.step == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return plain_step(self, batches, position, **arguments)
page.Training.step = step
page.train_drafter(run)
"""


def records(run: DrafterRun, kind: str = "train") -> list[dict]:
    lines = (run.drafter_dir / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == kind]


def final_tensors(run: DrafterRun) -> dict[str, torch.Tensor]:
    folder = latest_checkpoint(run.drafter_dir)
    assert folder is not None
    return load_file(folder / MODEL) | load_file(folder / OPTIMIZER)


def assert_same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_learns(make_run, capsys, dtype):
    run = make_run(
        train={
            "epochs": 16,
            "num_anchors": 32,
            "dtype": dtype,
            "checkpoint_steps": 1000,
            "validation_steps": 1000,
            "optimizer": {"learning_rate": 2e-2},
        }
    )
    assert train_drafter(run) == EXIT_DONE
    first, *_, last = records(run)
    assert last["loss"] < 0.3 * first["loss"]
    validations = records(run, "validation")
    assert validations[-1]["acceptance_length"] > 2.0
    assert validations[-1]["num_walked"] == 1
    assert "held out: loss" in capsys.readouterr().out


@pytest.mark.parametrize(
    "train",
    [{"dtype": "float32"}, {"dtype": "bfloat16", "batches_per_step": 2, "checkpoint_steps": 1}],
    ids=["float32", "bfloat16-two-batches"],
)
def test_killed_and_resumed_is_uninterrupted(make_run, train):
    whole = make_run(name="whole", train=train)
    assert train_drafter(whole) == EXIT_DONE
    killed = make_run(name="killed", train=train)
    num_steps = records(whole)[-1]["step"]
    assert exit_code_of(KILLED, killed, num_steps - 4) == -signal.SIGKILL
    assert train_drafter(killed) == EXIT_DONE
    assert_same_tensors(final_tensors(killed), final_tensors(whole))
    timeless = ("loss", "accuracy_by_offset", "gradient_norm", "learning_rate", "step")
    timeless += ("num_tokens_seen", "total_steps")
    assert [[r[key] for key in timeless] for r in records(killed)] == [
        [r[key] for key in timeless] for r in records(whole)
    ]


PRIMED = """
import sys
from stage2_train.config import DrafterRun
from stage2_train.prime import prime
prime(DrafterRun.model_validate_json(sys.argv[1]))
"""


NEVER = 10**9


def exit_code_of(script: str, run: DrafterRun, *arguments: object, **environment: str) -> int:
    """Runs a script in a process of its own, as a training has on a GPU."""
    return subprocess.run(
        [sys.executable, "-c", script, run.model_dump_json(), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        check=False,
    ).returncode


@pytest.mark.gpu
def test_killed_and_resumed_is_uninterrupted_on_a_gpu_where_kernels_are_those_pinned(make_run):
    settings = {
        "drafter": {"block_size": 8, "head_dim": 32},
        "train": {"dtype": "bfloat16", "num_anchors": 16, "validation_steps": 1000},
    }
    whole, killed = (make_run(name=name, **settings) for name in ("whole", "killed"))
    assert exit_code_of(PRIMED, whole) == 0
    assert exit_code_of(KILLED, whole, NEVER) == 0
    num_steps = records(whole)[-1]["step"]
    assert exit_code_of(KILLED, killed, num_steps - 4) == -signal.SIGKILL
    assert exit_code_of(KILLED, killed, NEVER) == 0
    assert {record["execution"] for record in records(killed)} == {"compiled"}
    assert sum(record["num_compiles_cold"] for record in records(killed)) == 0
    assert_same_tensors(final_tensors(killed), final_tensors(whole))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("train", "tolerance"),
    [({"dtype": "float32"}, 1e-3), ({"dtype": "bfloat16", "fp8": "all"}, 0.05)],
    ids=["float32", "fp8"],
)
def test_training_on_a_gpu_follows_that_on_a_cpu(make_run, train, tolerance):
    drafter = {"block_size": 8, "head_dim": 32}
    common = {"num_anchors": 16, "validation_steps": 1000, "log_steps": 1, "max_steps": 8}
    on_gpu = make_run(name="gpu", drafter=drafter, train=common | train)
    on_cpu = make_run(name="cpu", drafter=drafter, train=common)
    assert exit_code_of(KILLED, on_gpu, NEVER) == 0
    assert exit_code_of(KILLED, on_cpu, NEVER, CUDA_VISIBLE_DEVICES="") == 0
    assert {record["execution"] for record in records(on_gpu)} == {"compiled"}
    losses, expected = ([record["loss"] for record in records(each)] for each in (on_gpu, on_cpu))
    assert losses == pytest.approx(expected, rel=tolerance)


def test_other_processes_that_read_change_nothing_stopped_and_resumed_too(make_run, monkeypatch):
    whole = make_run(name="whole", train={"max_steps": 9})
    assert train_drafter(whole) == EXIT_DONE
    beside = make_run(name="beside", train={"max_steps": 9, "read_processes": 2})
    plain_step = Training.step

    def step_with_signal(self, batches, position, **arguments):
        if position.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain_step(self, batches, position, **arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "step", step_with_signal)
        assert train_drafter(beside) == EXIT_STOPPED_EARLY
    assert train_drafter(beside) == EXIT_DONE
    assert_same_tensors(final_tensors(beside), final_tensors(whole))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_makes_a_checkpoint_and_resumes(make_run, monkeypatch, number):
    whole = make_run(name="whole")
    assert train_drafter(whole) == EXIT_DONE
    stopped = make_run(name="stopped")
    plain_step = Training.step

    def step_with_signal(self, batches, position, **arguments):
        if position.step == 2:
            os.kill(os.getpid(), number)
        return plain_step(self, batches, position, **arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "step", step_with_signal)
        assert train_drafter(stopped) == EXIT_STOPPED_EARLY
    folder = latest_checkpoint(stopped.drafter_dir)
    assert json.loads((folder / STATE).read_text())["position"]["step"] == 3
    assert train_drafter(stopped) == EXIT_DONE
    assert_same_tensors(final_tensors(stopped), final_tensors(whole))


def test_what_an_epoch_trains_is_said_until_it_changes(make_run, capsys):
    train_drafter(make_run(train={"max_steps": 9, "batch_tokens": 40}))
    lines = capsys.readouterr().out.splitlines()
    said = [line for line in lines if line.startswith("epoch ")]
    assert len(said) == 1
    assert said[0].startswith("epoch 0: ")
    assert "sequences are longer than train.batch_tokens = 40: of each a window" in said[0]


def test_a_finished_training_has_nothing_to_do(make_run):
    run = make_run(train={"max_steps": 3})
    assert train_drafter(run) == EXIT_DONE
    before = final_tensors(run)
    assert train_drafter(run) == EXIT_DONE
    assert_same_tensors(final_tensors(run), before)
    assert records(run)[-1]["step"] == 3


def test_two_drafters_of_one_store_are_independent(make_run):
    alone = make_run(name="alone")
    train_drafter(alone)
    train_drafter(make_run(name="deeper", drafter={"num_layers": 3, "block_size": 8}))
    again = make_run(name="again")
    train_drafter(again)
    assert_same_tensors(final_tensors(again), final_tensors(alone))


def test_a_checkpoint_says_what_it_was_trained_on(make_run):
    run = make_run(train={"max_steps": 2})
    train_drafter(run)
    state = json.loads((latest_checkpoint(run.drafter_dir) / STATE).read_text())
    assert state["position"]["snapshot_id"]
    assert state["settings"]["train"]["batch_tokens"] == 192
    assert state["versions"]["torch"] == torch.__version__
    assert state["validation"]["step"] == 2


@pytest.mark.parametrize(
    ("drafter", "train", "message"),
    [
        ({"mask_token_id": 64}, {}, "mask_token_id 64 is outside the vocabulary of 64 rows"),
        ({"target_layer_ids": (1, 3)}, {}, r"target_layer_ids \[3\] are not in the store"),
        ({}, {"batch_tokens": 4}, "batch_tokens 4 is smaller than a block of 5"),
        ({}, {"window_tokens": 4}, "window_tokens 4 is smaller than a block of 5"),
        ({"sliding_layers": (2,), "sliding_window": 4}, {}, r"sliding_layers \[2\] lie outside"),
        ({"sliding_layers": (1,)}, {}, "needs sliding_window"),
        ({"num_attention_heads": 3}, {}, "is no multiple of"),
        ({"init_from": "/nowhere"}, {}, "/nowhere is no drafter"),
        ({}, {"attention": "flex"}, "needs a GPU, for FlexAttention has no gradient on a CPU"),
        (
            {},
            {"fp8": True, "dtype": "bfloat16"},
            "train.fp8 needs a GPU with fp8 products, found cpu",
        ),
        ({}, {"compile": True}, "train.compile = true needs a GPU, and not"),
    ],
)
def test_bad_settings_are_one_clear_line(make_run, drafter, train, message):
    run = make_run(drafter=drafter, train=train)
    with pytest.raises(ValueError, match=message) as raised:
        train_drafter(run)
    assert "\n" not in str(raised.value)
    assert latest_checkpoint(run.drafter_dir) is None


@pytest.mark.parametrize(
    ("drafter", "train", "message"),
    [
        ({}, {"seed": 5}, "train.seed was 0, is 5"),
        ({}, {"batch_tokens": 100}, "train.batch_tokens was 192, is 100"),
        ({}, {"window_tokens": 50}, "train.window_tokens was None, is 50"),
        ({}, {"data_fraction": 0.5}, "train.data_fraction was 1.0, is 0.5"),
        ({"num_layers": 1}, {}, "num_hidden_layers was 2, is 1"),
    ],
)
def test_a_checkpoint_is_not_resumed_as_another_training(make_run, drafter, train, message):
    train_drafter(make_run(train={"max_steps": 2}))
    with pytest.raises(ValueError, match=message):
        train_drafter(make_run(train=train, drafter=drafter))


def test_a_drafter_of_another_target_is_not_resumed(make_run, shared_store_dir, tmp_path):
    train_drafter(make_run(train={"max_steps": 2}))
    other = tmp_path / "other-store"
    shutil.copytree(shared_store_dir, other)
    record = parse_record((other / "store.json").read_bytes(), place="store.json")
    same = record | {"target_name": "the-same/renamed"}
    (other / "store.json").write_bytes(dump_record(same))
    assert train_drafter(make_run(train={"max_steps": 3}, store_dir=other)) == EXIT_DONE
    (other / "store.json").write_bytes(dump_record(same | {"target_weights_sha256": "0" * 64}))
    with pytest.raises(ValueError, match="holds those of other weights, the-same/renamed"):
        train_drafter(make_run(train={"max_steps": 4}, store_dir=other))


def test_a_checkpoint_that_is_passed_over_is_said(make_run, capsys):
    train_drafter(make_run(train={"max_steps": 2, "checkpoint_steps": 1}))
    newest = latest_checkpoint(make_run().drafter_dir)
    (newest / MODEL).write_bytes(b"")
    train_drafter(make_run(train={"max_steps": 3}))
    said = capsys.readouterr().out
    assert f"{newest} is damaged: passed over" in said
    assert "from step 1" in said


def test_what_is_learned_otherwise_from_here_on_is_said(make_run, capsys):
    train_drafter(make_run(train={"max_steps": 2}))
    train_drafter(make_run(train={"max_steps": 2, "log_steps": 3}))
    assert "other settings" not in capsys.readouterr().out
    train_drafter(make_run(train={"max_steps": 3, "loss": {"gamma": 2.0}, "num_anchors": 8}))
    said = capsys.readouterr().out
    assert "going on with other settings: train.max_steps was 2, is 3; " in said
    assert "train.loss.gamma was None, is 2.0" in said
    assert "train.num_anchors was " in said


def test_training_starts_from_another_drafter(make_run):
    first = make_run(name="first", train={"max_steps": 2})
    train_drafter(first)
    start = latest_checkpoint(first.drafter_dir)
    frozen = {"max_steps": 1, "optimizer": {"learning_rate": 1e-30, "warmup_fraction": 0.0}}
    second = make_run(name="second", train=frozen, drafter={"init_from": str(start)})
    train_drafter(second)
    found = load_file(latest_checkpoint(second.drafter_dir) / MODEL)
    assert_same_tensors(found, load_file(start / MODEL))


def test_a_loss_that_is_no_number_stops_training(make_run):
    run = make_run(train={"optimizer": {"learning_rate": 1e30}})
    with pytest.raises(ValueError, match=r"lower train\.optimizer\.learning_rate"):
        train_drafter(run)


def test_no_checkpoint_holds_weights_gone_astray_though_no_line_is_due(make_run):
    run = make_run(
        train={"optimizer": {"learning_rate": 1e30}, "log_steps": 1000, "checkpoint_steps": 1}
    )
    with pytest.raises(ValueError, match=r"lower train\.optimizer\.learning_rate"):
        train_drafter(run)
    folder = latest_checkpoint(run.drafter_dir)
    assert folder is None or all(torch.isfinite(each).all() for each in final_tensors(run).values())


def test_steps_before_a_signal_have_their_line(make_run, monkeypatch):
    run = make_run(train={"log_steps": 1000, "checkpoint_steps": 1000})
    plain_step = Training.step

    def step_with_signal(self, batches, position, **arguments):
        if position.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain_step(self, batches, position, **arguments)

    monkeypatch.setattr(Training, "step", step_with_signal)
    assert train_drafter(run) == EXIT_STOPPED_EARLY
    assert [each["step"] for each in records(run)] == [1, 3]
