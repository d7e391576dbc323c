"""Checkpoints are whole or passed over; the last good one is found whatever happened to others."""

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file

from stage2_train import checkpoint as module
from stage2_train.checkpoint import (
    CONFIG,
    EVALUATION,
    MODEL,
    OPTIMIZER,
    STATE,
    best_checkpoint,
    is_valid,
    latest_checkpoint,
    load_drafter,
    load_tensors,
    read_architecture,
    read_state,
    remove_old_checkpoints,
    save_checkpoint,
)
from stage2_train.drafter import Drafter
from stage2_train.export import export_official, load_any_drafter
from storage.errors import StoreWriteError

FILES = (CONFIG, MODEL, OPTIMIZER, STATE)


@pytest.fixture
def save(architecture, tmp_path):
    """Save a checkpoint of the step into the drafter's folder `tmp_path`."""
    drafter = Drafter(architecture)

    def save_step(step: int, **state):
        return save_checkpoint(
            tmp_path,
            step=step,
            architecture=architecture,
            weights=drafter.state_dict(),
            optimizer={"exp_avg.fc.weight": torch.full((2, 3), float(step))},
            state=state,
        )

    return save_step


def test_what_is_saved_is_read_back(save, architecture):
    folder = save(7, position={"step": 7})
    assert folder.name == "step-00000007"
    assert read_architecture(folder) == architecture
    assert read_state(folder)["position"] == {"step": 7}
    weights, optimizer = load_tensors(folder)
    assert weights.keys() == Drafter(architecture).state_dict().keys()
    assert torch.equal(optimizer["exp_avg.fc.weight"], torch.full((2, 3), 7.0))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", ["truncated", "removed", "altered", "emptied"])
def test_a_torn_checkpoint_is_passed_over(save, tmp_path, name, harm):
    good, torn = save(1), save(2)
    path = torn / name
    data = bytearray(path.read_bytes())
    if harm == "removed":
        path.unlink()
    elif harm == "altered":
        # Keeps the size: only a checksum can tell.
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    else:
        path.write_bytes(data[: len(data) // 2] if harm == "truncated" else b"")
    if name == STATE and harm == "altered":
        return
    assert not is_valid(torn)
    assert latest_checkpoint(tmp_path) == good
    assert best_checkpoint(tmp_path) == good


def test_no_checkpoint_is_none(tmp_path, save):
    assert latest_checkpoint(tmp_path) is None
    assert best_checkpoint(tmp_path) is None
    shutil.rmtree(save(1))
    assert latest_checkpoint(tmp_path) is None


@pytest.mark.parametrize("call", range(3))
def test_a_save_that_fails_leaves_the_old_ones(save, tmp_path, monkeypatch, call):
    good = save(1)
    calls = []

    def full_disk(path):
        calls.append(path)
        if len(calls) > call:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_flush_to_disk", full_disk)
    with pytest.raises(StoreWriteError, match="the disk is full; free space there"):
        save(2)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [good.name]
    assert latest_checkpoint(tmp_path) == good


def test_a_step_can_be_saved_again(save, tmp_path):
    save(3, note="first")
    assert read_state(save(3, note="second"))["note"] == "second"
    assert is_valid(latest_checkpoint(tmp_path))


def test_best_is_by_decoding_then_walk_then_teacher_forcing(save, tmp_path):
    save(1, validation={"simulated_acceptance_length": 9.0})
    assert best_checkpoint(tmp_path).name == "step-00000001"
    save(2, validation={"simulated_acceptance_length": 1.0, "acceptance_length": 2.0})
    save(3, validation={"acceptance_length": 1.5})
    save(4, validation=None)
    assert best_checkpoint(tmp_path).name == "step-00000002"
    (tmp_path / "checkpoints/step-00000003" / EVALUATION).write_text('{"acceptance_length": 1.2}')
    assert best_checkpoint(tmp_path).name == "step-00000003"


def test_old_checkpoints_go_but_never_the_best(save, tmp_path):
    for step, length in enumerate([1.0, 3.0, 2.0, 2.5, 2.0], start=1):
        save(step, validation={"acceptance_length": length})
        remove_old_checkpoints(tmp_path, keep=2)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000004", "step-00000005"]


def test_attempts_of_the_dead_are_removed(save, tmp_path):
    dead = tmp_path / "checkpoints" / ".step-00000009.123.partial"
    dead.mkdir(parents=True)
    save(1)
    remove_old_checkpoints(tmp_path, keep=1)
    assert not dead.exists()
    assert latest_checkpoint(tmp_path).name == "step-00000001"


def test_a_drafter_is_loaded_in_any_type(save, architecture):
    folder = save(1)
    drafter = load_drafter(folder, dtype=torch.bfloat16)
    assert drafter.architecture == architecture
    assert not drafter.training
    stored = load_file(folder / MODEL)
    for name, weight in drafter.state_dict().items():
        assert torch.equal(weight, stored[name].bfloat16())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("fc.weight"), "fc.weight is missing"),
        (lambda weights: weights.update(extra=torch.zeros(1)), "extra is unknown"),
        (lambda weights: weights.update({"norm.weight": torch.zeros(5)}), r"norm.weight is \[5\]"),
    ],
)
def test_weights_that_do_not_fit_are_named(save, change, message):
    folder = save(1)
    weights = load_file(folder / MODEL)
    change(weights)
    save_file(weights, folder / MODEL)
    with pytest.raises(ValueError, match=message):
        load_drafter(folder)


def test_what_is_no_drafter_is_refused(tmp_path, save):
    with pytest.raises(ValueError, match=r"is no drafter: it has no config\.json"):
        load_drafter(tmp_path / "nothing")
    folder = save(1)
    (folder / MODEL).write_bytes(b"torn")
    with pytest.raises(ValueError, match="damaged"):
        load_drafter(folder)


@pytest.mark.parametrize("load", [load_drafter, load_any_drafter])
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (b"", "damaged drafter"),
        (b"\xff", "damaged drafter"),
        (b"[]", "damaged drafter: config.json is no JSON object"),
        (b'{"hidden_size": 3}', r"config.json: the drafter's config has no 'num_hidden_layers'"),
    ],
)
def test_a_folder_with_a_bad_config_is_named(save, load, config, message):
    folder = save(1)
    (folder / CONFIG).write_bytes(config)
    with pytest.raises(ValueError, match=message) as caught:
        load(folder)
    assert str(folder) in str(caught.value)


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Lets the operating system refuse larger files, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_bytes", [100, 4_000])
def test_a_refusing_disk_gives_one_line_and_leaves_what_was_there(save, tmp_path, num_bytes):
    folder = save(1)
    exported = export_official(folder, tmp_path / "export")
    for write in (lambda: save(2), lambda: save(1), lambda: export_official(folder, exported)):
        with (
            pytest.raises(StoreWriteError, match=r"cannot write .*: .*raise `ulimit -f`"),
            files_of_at_most(num_bytes),
        ):
            write()
    assert is_valid(folder)
    assert latest_checkpoint(folder.parents[1]) == folder
    load_drafter(exported)
    left = [path.name for place in (folder, exported) for path in place.parent.glob(".*")]
    assert left == []
