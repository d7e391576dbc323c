"""Tensor parallel: two processes with half the target each store what one stores."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stage1_extract.config import DataConfig, ExtractConfig, ExtractRun, StoreConfig, TargetConfig
from stage1_extract.extract import prepare_store, run_worker
from stage1_extract.tensor_parallel import Group, find_group, worker_device
from storage.head import LAST_LAYERS_FILE, WEIGHTS_FILE
from storage.reader import open_store

LAYERS = ["0", "2"]
SCRIPT = """
import os, sys
from datetime import timedelta
from pathlib import Path
from stage1_extract.config import ExtractRun
from stage1_extract.extract import run_worker
from stage1_extract.target_transformers import TransformersTarget
import stage1_extract.tensor_parallel as module

FAULT = os.environ.get("FAULT")
rank = os.environ["RANK"]
right = TransformersTarget.hidden_states
calls = []

def hidden_states(self, token_ids, *, layers):
    calls.append(None)
    if FAULT == "alone" and rank == "1" and len(calls) == 3:
        raise RuntimeError("this GPU fell off the bus")
    if FAULT == "everywhere" and self.batching == "packed":
        raise RuntimeError("this model knows no packing")
    return right(self, token_ids, layers=layers)

module._AGREE = timedelta(seconds=5)
if FAULT:
    hidden_states.__qualname__ = right.__qualname__
    hidden_states.__module__ = right.__module__
    TransformersTarget.hidden_states = hidden_states
run = ExtractRun.model_validate_json(Path(sys.argv[1]).read_text())
sys.exit(run_worker(run, worker_index=0, num_workers=1))
"""


@pytest.fixture
def make_run(
    tmp_path: Path, target_folder: Callable[..., Path], write_jsonl: Callable[..., Path]
) -> Callable[..., ExtractRun]:
    """Gives a run over a few conversations, whose store lies in a folder of its own."""
    conversations = write_jsonl(
        *(
            {
                "id": f"c{index}",
                "messages": [
                    {"role": "user", "content": f"say {index}"},
                    {"role": "assistant", "content": "hello all " * (1 + index % 5)},
                ],
            }
            for index in range(12)
        )
    )

    def make(kind: str, *, num_processes: int) -> ExtractRun:
        folder = tmp_path / f"{kind}-{num_processes}"
        return ExtractRun(
            target=TargetConfig(model=str(target_folder(kind)), dtype="float32"),
            data=DataConfig(conversations=(str(conversations),), max_sequence_tokens=80),
            store=StoreConfig(target_layer_ids=(0, 2), encoding="bf16"),
            extract=ExtractConfig(batch_tokens=200, gpus_per_worker=num_processes),
            store_dir=folder / "store",
            run_dir=folder,
        )

    return make


def start(run: ExtractRun, tmp_path: Path, *, fault: str = "") -> list[subprocess.Popen[str]]:
    """Starts the processes of one worker as torchrun does; output goes to pipes."""
    prepare_store(run)
    path = tmp_path / "run.json"
    path.write_text(run.model_dump_json())
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    size = run.extract.gpus_per_worker
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
        "FAULT": fault,
    }
    return [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SCRIPT, str(path)],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]


def ended(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit code and output of each process."""
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    return [
        (process.returncode, output) for process, output in zip(processes, outputs, strict=True)
    ]


@pytest.mark.parametrize("kind", ["qwen3", pytest.param("llama", marks=pytest.mark.slow)])
def test_two_processes_store_what_one_stores(
    make_run: Callable[..., ExtractRun], tmp_path: Path, kind: str
) -> None:
    alone, together = (make_run(kind, num_processes=count) for count in (1, 2))
    prepare_store(alone)
    assert run_worker(alone, worker_index=0, num_workers=1) == 0
    results = ended(start(together, tmp_path))
    assert [code for code, _ in results] == [0, 0], results
    assert "12 sequences" in results[0][1]
    assert results[1][1] == "", "only the first process speaks"
    stores = [open_store(run.store_dir) for run in (alone, together)]
    for number in range(12):
        expected, found = (
            store.sequence(f"c{number}").hidden_states(layers=LAYERS) for store in stores
        )
        # Sums in another order, rounded to bf16: the last bit of some values.
        np.testing.assert_allclose(found, expected, rtol=2.0**-7, atol=1e-3)
    # The head is put together again from its parts, bit for bit.
    for name in (WEIGHTS_FILE, LAST_LAYERS_FILE):
        weights = [store.head_bytes(name) for store in stores]
        assert weights[0] == weights[1], name


def test_a_process_that_fails_alone_ends_with_its_reason(
    make_run: Callable[..., ExtractRun], tmp_path: Path
) -> None:
    processes = start(make_run("llama", num_processes=2), tmp_path, fault="alone")
    output = processes[1].communicate(timeout=120)[0]
    assert processes[1].returncode != 0
    assert "process 1 of this worker's 2 fails alone" in output
    assert "this GPU fell off the bus" in output
    # Whoever started the group kills the rest: it may wait for the failed one for ever.
    processes[0].kill()
    processes[0].communicate()


@pytest.mark.slow
def test_what_fails_everywhere_is_tried_in_another_way(
    make_run: Callable[..., ExtractRun], tmp_path: Path
) -> None:
    results = ended(start(make_run("llama", num_processes=2), tmp_path, fault="everywhere"))
    assert [code for code, _ in results] == [0, 0], results
    assert "packed batches do not suit this target" in results[0][1]


@pytest.mark.slow
def test_a_stop_reaches_the_first_process_which_ends_the_others(
    make_run: Callable[..., ExtractRun], tmp_path: Path
) -> None:
    run = make_run("llama", num_processes=2)
    processes = start(run, tmp_path)
    assert processes[0].stdout is not None
    metrics = run.run_dir / "extract" / "worker-00000.metrics.jsonl"
    while not metrics.exists():  # From then on signals are noted.
        assert processes[0].poll() is None
    for process in processes:
        process.send_signal(signal.SIGTERM)
    codes = [code for code, _ in ended(processes)]
    assert codes[0] in (0, 75)
    assert codes[1] == 0


@pytest.mark.slow
def test_a_target_without_a_plan_is_refused(
    make_run: Callable[..., ExtractRun], tmp_path: Path, make_tokenizer: Callable[..., Any]
) -> None:
    from transformers import StableLmConfig, StableLmForCausalLM

    folder = tmp_path / "no-plan"
    config = StableLmConfig(
        vocab_size=288,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
        eos_token_id=261,
    )
    StableLmForCausalLM(config).save_pretrained(folder)
    make_tokenizer("chatml").save_pretrained(folder)
    run = make_run("llama", num_processes=2)
    run = run.model_copy(update={"target": TargetConfig(model=str(folder), dtype="float32")})
    results = ended(start(run, tmp_path))
    assert results[0][0] != 0
    assert "transformers has no tensor parallel plan for stablelm" in results[0][1]


def test_a_process_that_sees_several_gpus_works_on_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels run on the current device, not where their tensors are."""
    current: list[int] = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.set_device", current.append)
    assert worker_device(6, Group()) == "cuda:2"
    assert worker_device(0, Group(rank=5, size=8, local_rank=1)) == "cuda:1"
    assert current == [2, 1]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert worker_device(6, Group()) == "cpu"


def test_the_place_in_the_group_is_torchruns() -> None:
    variables = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert find_group(variables, wanted_size=8) == Group(5, 8, 1)
    assert find_group(variables, wanted_size=1) == Group()
    with pytest.raises(ValueError, match=r"gpus_per_worker = 2, but .* as 1 process; start it"):
        find_group({}, wanted_size=2)
