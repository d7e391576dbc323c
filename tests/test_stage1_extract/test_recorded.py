"""Recorded passes give the states of passes launched one kernel at a time, batch after batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from stage1_extract import packed_attention
from stage1_extract.packed_attention import PackingUnsupportedError, attend_packed

SCRIPT = """
import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from stage1_extract import parity
from stage1_extract.parity import check_parity, choose_batching
from stage1_extract.target_transformers import TransformersTarget

SIZES = dict(
    vocab_size=288, hidden_size=128, intermediate_size=96, num_hidden_layers=12,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
    initializer_range=0.1, pad_token_id=None, bos_token_id=1, eos_token_id=2,
)
LAYERS = ["0", "10"]
rng = np.random.default_rng(0)

def sequences(*lengths):
    return [rng.integers(3, 280, length, dtype=np.int32) for length in lengths]

def make(kind, **changes):
    torch.manual_seed(0)
    torch.compiler.set_stance("default")
    config = CONFIG_MAPPING[kind](**(SIZES | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().cuda()
    return TransformersTarget(model, None, device="cuda")

def choose(target):
    choose_batching(
        target, sequences(5, 80, 200), layers=LAYERS, compiled_rows=[256, 512], must_compile=True
    )

# Whether it is worth it is not what is tested here.
worth_recording, parity._WORTH_RECORDING = parity._WORTH_RECORDING, 100.0
target = make("mistral", head_dim=32, sliding_window=70)
choose(target)
assert len(target._recorded) == 2
before = target.compiled.num_replays
lengths = ((3,), (200, 1, 90, 70), (64, 64), (300, 200), (1,) * 99)
batches = [sequences(*each) for each in lengths]
replayed = []
for batch in batches:
    states = target.hidden_states(batch, layers=LAYERS)
    replayed.append({name: each.clone() for name, each in states.items()})
    assert check_parity(target, batch[:4], layers=LAYERS) < 0.05
assert target.compiled.num_replays == before + 2 * len(batches)
target.forget_recorded()
for batch, states in zip(batches, replayed, strict=True):
    for name, each in target.hidden_states(batch, layers=LAYERS).items():
        torch.testing.assert_close(each, states[name], rtol=0.02, atol=0.02)

# A head that our kernel does not take: its attention looks at the host, and is not recorded.
target = make("llama", head_dim=24, hidden_size=96)
choose(target)
assert not target._recorded
assert check_parity(target, sequences(30, 100), layers=LAYERS) < 0.05
parity._WORTH_RECORDING = worth_recording
"""


@pytest.mark.gpu
def test_replayed_states_are_those_of_launched_passes(run_script: Callable[..., None]) -> None:
    run_script(SCRIPT, device="cuda")


def test_what_depends_on_the_host_is_never_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay would use the boundaries of the batch that was recorded."""
    states: list[Any] = [torch.zeros(1, 2, 4, 8) for _ in range(3)]
    ends = torch.tensor([0, 4], dtype=torch.int32)
    rule = (None, None, None, None)
    with pytest.raises(PackingUnsupportedError, match="depends on the host"):
        packed_attention._attend_in_recording(*states, None, *rule)
    monkeypatch.setattr("stage1_extract.attention_kernel.can_attend", lambda *_: False)
    with pytest.raises(PackingUnsupportedError, match="depends on the host"):
        packed_attention._attend_in_recording(*states, ends, *rule)
    # Nothing is recorded here, so nothing is refused.
    attend_packed(torch.nn.Module(), *states, None, cu_seq_lens_q=ends, host_boundaries=ends)
