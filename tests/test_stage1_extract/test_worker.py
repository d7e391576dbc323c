"""A whole worker with compiled layers, on the CPU and on a GPU: its store is the target's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, os, sys
from functools import partialmethod
from pathlib import Path
import numpy as np
import torch
from stage1_extract.config import (
    DataConfig, ExtractConfig, ExtractRun, StoreConfig, TargetConfig
)
from stage1_extract.extract import prepare_store, run_worker
from stage1_extract.target import load_target
from stage1_extract.target_transformers import TransformersTarget
from storage.reader import open_store

device = sys.argv[1]
torch.set_num_threads(1)
if device == "cpu":
    # The C++ compiler would take a minute.
    TransformersTarget.compile_layers = partialmethod(
        TransformersTarget.compile_layers, backend="aot_eager"
    )
folder, model = Path(os.environ["FOLDER"]), os.environ["MODEL"]
target = TargetConfig(model=model, dtype="float32" if device == "cpu" else "bfloat16")
run = ExtractRun(
    target=target,
    data=DataConfig(conversations=(str(folder / "talks.jsonl"),), max_sequence_tokens=80),
    store=StoreConfig(target_layer_ids=(0, 2), encoding="fp8"),
    extract=ExtractConfig(batch_tokens=256, compile=True, write_buffer_bytes=1),
    store_dir=folder / "store",
    run_dir=folder / "run",
)
run = run.model_copy(
    update={"store": run.store.model_copy(update={"shard_bytes": 20_000})}
)
store = prepare_store(run)
assert len(store.units()) > 2
assert run_worker(run, worker_index=0, num_workers=1) == 0
snapshot = open_store(run.store_dir).snapshot()
assert snapshot.num_sequences == 30
plain = load_target(target, device=device)
tolerance = 0.04 if device == "cpu" else 0.12
for index in range(snapshot.num_sequences):
    token_ids, _ = snapshot.read_tokens(index)
    expected = plain.plain_hidden_states(token_ids, layers=["0", "2"])
    found = open_store(run.store_dir).sequence(snapshot.sequence_id(index))
    states = found.hidden_states(layers=["0", "2"])
    for column, name in enumerate(("0", "2")):
        exact = expected[name].float().cpu().numpy()
        difference = np.linalg.norm(states[:, column] - exact, axis=-1)
        assert (difference / np.linalg.norm(exact, axis=-1)).mean() < tolerance
"""


@pytest.fixture
def talks(tmp_path: Path, write_jsonl: Callable[..., Path]) -> Path:
    lines: list[dict[str, Any]] = [
        {
            "id": f"c{index}",
            "messages": [
                {"role": "user", "content": f"say {index}"},
                {"role": "assistant", "content": "hello all " * (1 + index % 5)},
            ],
        }
        for index in range(30)
    ]
    return write_jsonl(*lines, name="talks.jsonl")


def test_a_compiled_worker_stores_the_targets_states(
    tmp_path: Path,
    talks: Path,
    target_folder: Callable[..., Path],
    run_script: Callable[..., None],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FOLDER", str(tmp_path))
    monkeypatch.setenv("MODEL", str(target_folder("qwen3")))
    run_script(SCRIPT, device=device)
    path = tmp_path / "run" / "extract" / "worker-00000.metrics.jsonl"
    end = json.loads(path.read_text().splitlines()[-1])
    assert end["event"] == "end"
    assert end["execution"] == "compiled"
    assert end["num_compiled_layer_runs"] == end["num_layer_runs"] > 0
    assert end["num_graph_breaks"] == 0
    assert end["num_sequences"] == 30
    shares = {name: end[f"{name}_fraction"] for name in ("forward", "encode", "write")}
    assert all(share > 0 for share in shares.values())
    assert (end["copy_fraction"] > 0) == (device == "cuda")
