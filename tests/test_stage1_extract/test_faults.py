"""Faults of the machine and of the target: nothing committed is lost, and the message helps."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stage1_extract.config import ExtractRun
from stage1_extract.extract import prepare_store, run_worker
from storage.errors import StoreWriteError
from storage.reader import open_store
from storage.verify import verify_store

MakeRun = Callable[..., ExtractRun]
Mount = Callable[[str], None]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, Mount]]:
    """A file system of 600 kB in memory, and a way to give it another size."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("this process may not mount a file system; a full disk needs one")
    try:
        yield (
            folder,
            lambda size: subprocess.run(  # type: ignore[func-returns-value]
                ["mount", "-o", f"remount,size={size}", str(folder)], check=True
            ),
        )
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def moved(run: ExtractRun, folder: Path) -> ExtractRun:
    return run.model_copy(update={"run_dir": folder / "run", "store_dir": folder / "run/store"})


def test_a_disk_that_fills_up_stops_with_the_bytes_needed_and_resumes(
    make_run: MakeRun, small_disk: tuple[Path, Mount]
) -> None:
    folder, resize = small_disk
    run = moved(make_run(num_conversations=100, extract={"force": True}), folder)
    prepare_store(run)
    with pytest.raises(StoreWriteError) as caught:
        run_worker(run, worker_index=0, num_workers=1)
    message = str(caught.value)
    assert "\n" not in message
    assert "the disk is full; free space" in message
    assert "(the units left need about " in message
    assert " are free)" in message
    store = open_store(run.store_dir)
    num_shards = store.snapshot().num_shards
    assert 0 < num_shards < len(prepare_store(run).units())
    assert verify_store(run.store_dir, full=True).problems == []

    # Without `force` the next start says at once that it cannot end well.
    careful = run.model_copy(update={"extract": run.extract.model_copy(update={"force": False})})
    with pytest.raises(ValueError, match=r"needs about .* more and \S+ has .* free"):
        prepare_store(careful)
    resize("16m")
    prepare_store(careful)
    assert run_worker(careful, worker_index=0, num_workers=1) == 0
    whole = make_run(num_conversations=100, place="whole")
    prepare_store(whole)
    assert run_worker(whole, worker_index=0, num_workers=1) == 0
    assert open_store(run.store_dir).content_digest() == (
        open_store(whole.store_dir).content_digest()
    )


@pytest.fixture
def broken_target(target_folder: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Gives the folder of a target whose embedding of some tokens is NaN."""

    def make(token_ids: slice) -> Path:
        folder = tmp_path / "broken"
        folder.mkdir()
        for path in target_folder("qwen3").iterdir():
            if path.suffix != ".safetensors":
                (folder / path.name).write_bytes(path.read_bytes())
        weights = load_file(target_folder("qwen3") / "model.safetensors")
        weights["model.embed_tokens.weight"][token_ids] = torch.nan
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def token_of(folder: Path, text: str) -> int:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    token_id: int = tokenizer["model"]["vocab"][text]
    return token_id


def marked(talks: list[dict[str, Any]], ids: tuple[str, ...]) -> list[dict[str, Any]]:
    """The talks, those of some ids with a letter that no other one holds."""
    for talk in talks:
        if talk["id"] in ids:
            talk["messages"][0]["content"] += " Q"
    return talks


@pytest.mark.parametrize("encoding", ["bf16", "int3"])
@pytest.mark.parametrize(("limit", "exit_code"), [(0.05, 1), (0.1, 0)])
def test_nan_states_are_named_skipped_and_past_the_limit_a_failure(
    make_run: MakeRun,
    talks: Callable[..., Any],
    broken_target: Callable[..., Path],
    target_folder: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    limit: float,
    exit_code: int,
    encoding: str,
) -> None:
    """Also where the encoding is calibrated on conversations of which some give NaN."""
    token_id = token_of(target_folder("qwen3"), "Q")
    folder = broken_target(slice(token_id, token_id + 1))
    run = make_run(
        *marked(talks(24), ("c0", "c7")),
        target={"model": str(folder)},
        store={"encoding": encoding},
        extract={"max_failed_fraction": limit},
    )
    prepare_store(run)
    codes = [run_worker(run, worker_index=index, num_workers=2) for index in range(2)]
    assert codes == [exit_code, exit_code]
    output = capsys.readouterr().err
    assert "skipped sequence c0: NaN or infinity in layer 0" in output
    assert "skipped sequence c7: NaN or infinity in layer 0" in output
    assert ("8.3% of 24 sequences failed" in output) == bool(exit_code)
    snapshot = open_store(run.store_dir).snapshot()
    assert snapshot.skipped().keys() == {"c0", "c7"}
    assert snapshot.num_sequences == 22


@pytest.mark.parametrize("encoding", ["bf16", "int3"])
def test_a_target_of_nothing_but_nan_stops_before_anything_is_stored(
    make_run: MakeRun, broken_target: Callable[..., Path], encoding: str
) -> None:
    broken = {"model": str(broken_target(slice(None)))}
    run = make_run(target=broken, store={"encoding": encoding})

    def extract() -> None:
        prepare_store(run)
        run_worker(run, worker_index=0, num_workers=1)

    with pytest.raises(ValueError, match=r"gives NaN or infinity for all \d+ \w+"):
        extract()
    assert open_store(run.store_dir).snapshot().num_shards == 0
