"""What the tests of several packages share: tiny targets and drafters, scripts on a device."""

import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from stage2_train.architecture import DrafterArchitecture
from stage2_train.drafter import Drafter, initialize
from stage2_train.target_head import TargetHead

VOCAB_SIZE = 64
MASK_TOKEN_ID = VOCAB_SIZE - 1


def make_tiny_target(**changes: Any) -> PreTrainedModel:
    settings: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval()


def make_tiny_drafter(target: PreTrainedModel, *, seed: int = 1, **changes: Any) -> Drafter:
    config = target.config.get_text_config()
    settings: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "rms_norm_eps": 1e-6,
        "vocab_size": config.vocab_size,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 512,
        "block_size": 5,
        "mask_token_id": config.vocab_size - 1,
        "target_layer_ids": (0, 1),
        "num_target_layers": config.num_hidden_layers,
        "layer_types": ("full_attention",) * changes.get("num_hidden_layers", 2),
    }
    drafter = Drafter(DrafterArchitecture(**{**settings, **changes}))
    initialize(drafter, seed=seed)
    with torch.no_grad():
        # Larger than the usual start, so that attention and masks show in what is drafted.
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10.0)
    return drafter.to(next(target.parameters()).dtype).eval()


def tiny_head(target: PreTrainedModel) -> TargetHead:
    config = target.config.get_text_config()
    output = target.get_output_embeddings()
    return TargetHead(
        config=config.to_dict(),
        embed_weight=target.get_input_embeddings().weight.detach(),
        lm_head_weight=output.weight.detach(),
        lm_head_bias=None if output.bias is None else output.bias.detach(),
        embedding_scale=1.0,
        logit_scale=1.0,
        final_logit_softcapping=None,
        tokenizer_size=config.vocab_size,
        mask_token_id=None,
        eos_token_ids=(2,),
    )


@pytest.fixture
def make_target() -> Callable[..., PreTrainedModel]:
    """Make a tiny random Llama; arguments change its configuration."""
    return make_tiny_target


@pytest.fixture
def make_drafter() -> Callable[..., Drafter]:
    """Make a tiny random drafter for a target; arguments change its architecture."""
    return make_tiny_drafter


@pytest.fixture
def make_head() -> Callable[..., TargetHead]:
    """Take the embedding and LM head of a target."""
    return tiny_head


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    # Tiny models on several threads wait for each other more than they compute.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def _s3_server() -> Iterator[Any]:
    pytest.importorskip("moto", reason='no moto: pip install -e ".[services]"')
    module = runpy.run_path(str(Path(__file__).with_name("s3_server.py")))
    with module["running_s3_server"]() as server:
        yield server


@pytest.fixture
def s3_server(_s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An S3 server on loopback that behaves, to be found through the environment."""
    for name, value in _s3_server.environment.items():
        monkeypatch.setenv(name, value)
    _s3_server.fault, _s3_server.forgets, _s3_server.ignores_conditions = None, False, False
    _s3_server.requests.clear()
    return _s3_server


@pytest.fixture(scope="session")
def _gpu_process() -> Iterator[Any]:
    module = runpy.run_path(str(Path(__file__).with_name("script_process.py")))
    process = module["ScriptProcess"]({"PYTHONPATH": _script_path()})
    yield process
    process.stop()


def _script_path() -> str:
    folders = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, folders))


@pytest.fixture
def run_script(_gpu_process: Any) -> Callable[..., None]:
    """Run a script in another process, on a device; kernels are interpreted on the CPU.

    Another process, for Triton's interpreter is chosen when kernels are defined, and what the shape
    checker of the tests has wrapped cannot be compiled. On the CPU each script has one of its own;
    all those of a GPU share one.
    """

    def run(script: str, *, device: str = "cpu") -> None:
        if device != "cpu":
            error = _gpu_process.run(script, [device])
            assert not error, error
            return
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, device],
            env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": _script_path()},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    return run


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Every device that a kernel is tested on."""
    return str(request.param)
