"""The receipt: believed only while nothing that decides the work has changed."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stage1_extract.config import ExtractRun, TargetConfig
from stage1_extract.extract import prepare_store, run_worker
from stage1_extract.receipt import is_finished, note_finished, run_digest
from storage.commits import read_commit
from storage.repair import bury_damaged
from storage.verify import verify_store
from storage.writer import open_for_writing

MakeRun = Callable[..., ExtractRun]


@pytest.fixture
def finished(make_run: MakeRun) -> ExtractRun:
    """A run that came to its end."""
    run = make_run()
    assert not is_finished(run)
    prepare_store(run)
    assert run_worker(run, worker_index=0, num_workers=1) == 0
    assert not is_finished(run)
    note_finished(run, digest=run_digest(run))
    assert is_finished(run)
    return run


@pytest.mark.parametrize(
    ("table", "changes"),
    [
        ("data", {"limit": 5}),
        ("data", {"max_sequence_tokens": 79}),
        ("data", {"template_arguments": {"enable_thinking": False}}),
        ("target", {"dtype": "bfloat16"}),
        ("store", {"encoding": "fp8"}),
        ("extract", {"max_failed_fraction": 0.0}),
    ],
)
def test_other_settings_are_another_run(
    finished: ExtractRun, table: str, changes: dict[str, Any]
) -> None:
    changed = getattr(finished, table).model_copy(update=changes)
    assert not is_finished(finished.model_copy(update={table: changed}))


def test_how_many_work_does_not_matter(finished: ExtractRun) -> None:
    changed = finished.extract.model_copy(update={"num_workers": 7, "batch_tokens": 99})
    assert is_finished(finished.model_copy(update={"extract": changed}))


@pytest.mark.parametrize("lost", ["target.json", "target.safetensors", "tokenizer/tokenizer.json"])
def test_a_head_that_was_lost_is_written_again(finished: ExtractRun, lost: str) -> None:
    path = Path(finished.store_dir) / "head" / lost
    before = path.read_bytes()
    path.unlink()
    assert not is_finished(finished)
    assert run_worker(finished, worker_index=0, num_workers=1) == 0
    assert path.read_bytes() == before
    assert is_finished(finished)


def test_changed_data_are_looked_at(finished: ExtractRun) -> None:
    (path,) = map(Path, finished.data.conversations)
    with path.open("a") as file:
        file.write('{"prompt": "more", "response": "data"}\n')
    assert not is_finished(finished)


def test_data_that_grew_during_the_extraction_are_looked_at(make_run: MakeRun) -> None:
    run = make_run()
    digest = run_digest(run)
    prepare_store(run)
    assert run_worker(run, worker_index=0, num_workers=1) == 0
    (path,) = map(Path, run.data.conversations)
    with path.open("a") as file:
        file.write('{"prompt": "more", "response": "data"}\n')
    note_finished(run, digest=digest)
    assert not is_finished(run)


def test_a_touched_target_is_looked_at(finished: ExtractRun) -> None:
    weights = Path(finished.target.model) / "model.safetensors"
    before = weights.stat()
    os.utime(weights, ns=(1, 1))
    try:
        assert not is_finished(finished)
    finally:
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert is_finished(finished)


def test_a_store_that_lost_a_shard_is_looked_at(finished: ExtractRun) -> None:
    store = open_for_writing(finished.store_dir)
    unit = store.units()[0]
    record = read_commit(store.files, unit)
    (finished.store_dir / record.attempt_dir / "tokens.bin").unlink()
    bury_damaged(finished.store_dir, verify_store(finished.store_dir, full=True).problems)
    assert not is_finished(finished), "what was given up is to be filled again"
    prepare_store(finished)
    assert not is_finished(finished)
    assert run_worker(finished, worker_index=0, num_workers=1) == 0
    note_finished(finished, digest=run_digest(finished))
    assert is_finished(finished)


@pytest.mark.parametrize("text", ["", "no json", "[]", "{}", '{"digest": null}'])
def test_a_receipt_that_cannot_be_read_says_nothing(finished: ExtractRun, text: str) -> None:
    (finished.run_dir / "extract" / "finished.json").write_text(text)
    assert not is_finished(finished)


def test_a_gguf_file_is_told_with_the_tokenizer_beside_it(
    finished: ExtractRun, tmp_path: Path
) -> None:
    path = tmp_path / "target.gguf"
    path.write_bytes(b"weights")
    run = finished.model_copy(update={"target": TargetConfig(model=str(path))})
    alone = run_digest(run)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert None is not alone != run_digest(run)
    path.write_bytes(b"other weights")
    assert run_digest(run) not in (alone, None)


def test_a_hub_target_has_no_receipt(finished: ExtractRun) -> None:
    target = finished.target.model_copy(update={"model": "some/model"})
    run = finished.model_copy(update={"target": target, "run_dir": finished.run_dir / "hub"})
    note_finished(run, digest=run_digest(run))
    assert not is_finished(run)


def test_the_question_loads_no_model_code() -> None:
    code = (
        "import sys, stage1_extract.receipt;"
        "print([name for name in ('torch', 'transformers', 'zarr') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
