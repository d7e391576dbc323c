"""Checkpoints: folders written whole or not at all, and found by validity, not by name.

A checkpoint `checkpoints/step-00001200/` holds `config.json` (the official layout),
`model.safetensors` (the fp32 master weights under the official names), `optimizer.safetensors` and
`state.json`, which lists every other file with its size and checksum. It is built under a
temporary name, flushed to disk and renamed; a folder that is torn all the same is passed over.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import crc32c
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from stage2_train.architecture import DrafterArchitecture
from stage2_train.drafter import Drafter
from storage.errors import explain_os_errors

CONFIG, MODEL, OPTIMIZER, STATE = (
    "config.json",
    "model.safetensors",
    "optimizer.safetensors",
    "state.json",
)
# The evaluation process adds this file to a finished checkpoint; it is not part of its validity.
EVALUATION = "evaluation.json"
_READ_BYTES = 1 << 24


def checkpoint_dir(drafter_dir: Path, step: int) -> Path:
    """Gives the folder of the checkpoint after `step` optimizer updates."""
    return drafter_dir / "checkpoints" / f"step-{step:08d}"


def save_checkpoint(
    drafter_dir: Path,
    *,
    step: int,
    architecture: DrafterArchitecture,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: Mapping[str, Any],
) -> Path:
    """Writes a checkpoint atomically and durably; one of the same step is replaced.

    Args:
        drafter_dir: the drafter's folder.
        step: optimizer updates done.
        architecture: the drafter's shape.
        weights: fp32 master weights by official name.
        optimizer: optimizer state by name.
        state: everything else needed to resume, as JSON values; must not use the key `files`.

    Raises:
        StoreWriteError: the disk refuses, in one line; what was there is there still.
    """
    final = checkpoint_dir(drafter_dir, step)
    attempt = final.with_name(f".{final.name}.{os.getpid()}.partial")
    with explain_os_errors("write", final):
        shutil.rmtree(attempt, ignore_errors=True)
        attempt.mkdir(parents=True)
        try:
            _write_json(attempt / CONFIG, architecture.to_config())
            _save_tensors(attempt / MODEL, weights)
            _save_tensors(attempt / OPTIMIZER, optimizer)
            files = {name: describe(attempt / name) for name in (CONFIG, MODEL, OPTIMIZER)}
            _write_json(attempt / STATE, {**state, "step": step, "files": files})
            for path in attempt.iterdir():
                _flush_to_disk(path)
            _flush_to_disk(attempt)
            if final.exists():
                shutil.rmtree(final)
            attempt.rename(final)
        except BaseException:
            shutil.rmtree(attempt, ignore_errors=True)
            raise
        _flush_to_disk(final.parent)
    return final


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Reads the state of a checkpoint: its step, position and settings."""
    state: dict[str, Any] = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    return state


def read_architecture(checkpoint: Path) -> DrafterArchitecture:
    """Reads the shape of the drafter in a checkpoint or an export folder."""
    return DrafterArchitecture.from_config(
        json.loads((checkpoint / CONFIG).read_text(encoding="utf-8"))
    )


def load_tensors(checkpoint: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Reads the master weights and the optimizer state of a checkpoint."""
    return load_file(checkpoint / MODEL), load_file(checkpoint / OPTIMIZER)


def describe(path: Path) -> dict[str, Any]:
    """Gives size and checksum of a file."""
    checksum, num_bytes = 0, 0
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            checksum = crc32c.crc32c(piece, checksum)
            num_bytes += len(piece)
    return {"num_bytes": num_bytes, "crc32c": checksum}


def is_valid(checkpoint: Path) -> bool:
    """Says whether a checkpoint is whole: every listed file is there, unaltered."""
    try:
        files = read_state(checkpoint)["files"]
        return all(
            (checkpoint / name).stat().st_size == expected["num_bytes"]
            and describe(checkpoint / name) == expected
            for name, expected in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def list_checkpoints(drafter_dir: Path) -> list[Path]:
    """Gives the checkpoint folders of a drafter, whole or not, newest step first."""
    return sorted((drafter_dir / "checkpoints").glob("step-*"), reverse=True)


def latest_checkpoint(drafter_dir: Path) -> Path | None:
    """Gives the newest checkpoint that is whole, or None."""
    return next((path for path in list_checkpoints(Path(drafter_dir)) if is_valid(path)), None)


def best_checkpoint(drafter_dir: Path) -> Path | None:
    """Gives the whole checkpoint of the highest held-out acceptance length; ties go to the newest.

    An evaluation by real decoding counts before the validation of the training process; where no
    checkpoint has either, the newest is the best.
    """
    ranked = sorted(
        list_checkpoints(Path(drafter_dir)), key=lambda path: _merit(path), reverse=True
    )
    return next((path for path in ranked if is_valid(path)), None)


def remove_old_checkpoints(drafter_dir: Path, *, keep: int) -> None:
    """Removes checkpoints except the newest `keep` and the best one, and torn attempts."""
    checkpoints = list_checkpoints(drafter_dir)
    kept = {*checkpoints[:keep], best_checkpoint(drafter_dir)}
    for path in checkpoints:
        if path not in kept:
            shutil.rmtree(path)
    for attempt in (drafter_dir / "checkpoints").glob(".step-*.partial"):
        shutil.rmtree(attempt, ignore_errors=True)


def load_drafter(
    folder: Path | str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Drafter:
    """Loads a drafter from a checkpoint or an export folder, ours or z-lab's.

    Raises:
        ValueError: the folder is no drafter, or its weights do not fit its `config.json`.
    """
    folder = Path(folder)
    config = read_config(folder)
    try:
        architecture = DrafterArchitecture.from_config(config)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error
    weights = read_weights(folder)
    with torch.device("meta"):
        drafter = Drafter(architecture)
    _check_fit(drafter.state_dict(), weights, folder)
    moved = {name: weight.to(device, dtype) for name, weight in weights.items()}
    drafter.load_state_dict(moved, assign=True)
    return drafter.eval()


def read_config(folder: Path) -> dict[str, Any]:
    """Reads the configuration in a drafter's folder of any layout.

    Raises:
        ValueError: it is missing, or damaged.
    """
    _refuse_without(folder, CONFIG)
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except ValueError as error:
        raise ValueError(f"{folder} holds a damaged drafter: {CONFIG}: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{folder} holds a damaged drafter: {CONFIG} is no JSON object")
    return config


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Reads the weights in a drafter's folder of any layout.

    Raises:
        ValueError: they are missing, or damaged.
    """
    _refuse_without(folder, MODEL)
    try:
        return load_file(folder / MODEL)
    except SafetensorError as error:
        raise ValueError(f"{folder} holds a damaged drafter: {MODEL}: {error}") from error


def _refuse_without(folder: Path, name: str) -> None:
    if not (folder / name).is_file():
        raise ValueError(f"{folder} is no drafter: it has no {name}")


def _check_fit(expected: Mapping[str, Tensor], weights: Mapping[str, Tensor], folder: Path) -> None:
    wrong = [f"{name} is missing" for name in expected if name not in weights]
    wrong += [f"{name} is unknown" for name in weights if name not in expected]
    wrong += [
        f"{name} is {list(weights[name].shape)}, expected {list(weight.shape)}"
        for name, weight in expected.items()
        if name in weights and weights[name].shape != weight.shape
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"{folder / MODEL} does not fit its config: {'; '.join(wrong[:3])}{more}")


def _merit(checkpoint: Path) -> tuple[int, float, str]:
    """Ranks a checkpoint: decoded before walked before teacher-forced acceptance."""
    for rank, read in ((3, _evaluated), (2, _walked), (1, _simulated)):
        value = read(checkpoint)
        if value is not None:
            return rank, value, checkpoint.name
    return 0, 0.0, checkpoint.name


def _evaluated(checkpoint: Path) -> float | None:
    return _number(checkpoint / EVALUATION, "acceptance_length")


def _walked(checkpoint: Path) -> float | None:
    return _number(checkpoint / STATE, "validation", "acceptance_length")


def _simulated(checkpoint: Path) -> float | None:
    return _number(checkpoint / STATE, "validation", "simulated_acceptance_length")


def _number(path: Path, *keys: str) -> float | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        for key in keys:
            value = value[key]
        return float(value)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
