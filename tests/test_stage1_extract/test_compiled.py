"""Compiled layers give the plain states, on few graphs, and never compile again."""

from collections.abc import Callable

import pytest

SCRIPT = """
import sys
from functools import partialmethod
import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from stage1_extract.parity import check_parity, choose_batching
from stage1_extract.target_transformers import TransformersTarget

device = sys.argv[1]
torch.set_num_threads(1)
if device == "cpu":
    # The C++ compiler would take a minute.
    TransformersTarget.compile_layers = partialmethod(
        TransformersTarget.compile_layers, backend="aot_eager"
    )
dtype = torch.bfloat16 if device == "cuda" else torch.float32
SIZES = dict(
    vocab_size=288, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
    initializer_range=0.2, pad_token_id=None, bos_token_id=1, eos_token_id=2,
)
WINDOW = dict(sliding_window=8)
KINDS = {
    "qwen3": {},
    "llama": {},
    "gemma2": WINDOW | dict(query_pre_attn_scalar=8),
    "phi3": dict(partial_rotary_factor=0.5),
}
# One graph for each length of rows, and for each kind of layers where some have a window.
NUM_KINDS_OF_LAYERS = {"gemma2": 2}
ROWS = [64, 128]
LAYERS = ["0", "2", "lm_head_input"]
rng = np.random.default_rng(0)
SEQUENCES = [rng.integers(3, 280, length, dtype=np.int32) for length in (7, 20, 33)]

def make(kind, changes):
    torch.manual_seed(0)
    torch.compiler.set_stance("default")
    config = CONFIG_MAPPING[kind](**(SIZES | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().to(device)
    return TransformersTarget(model, None, device=device)

if device == "cuda":
    # The real compiler takes its time: two kinds tell enough.
    KINDS = {kind: KINDS[kind] for kind in ("qwen3", "gemma2")}
    ROWS = [64]
for kind, changes in KINDS.items():
    target = make(kind, changes)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    way = choose_batching(
        target, SEQUENCES, layers=LAYERS, compiled_rows=ROWS, must_compile=True
    )
    assert way == "packed" and target.compiled is not None
    for count in (1, 2, 3):
        assert check_parity(target, SEQUENCES[:count], layers=LAYERS) < 0.05
    evidence = target.compiled.evidence()
    assert evidence["execution"] == "compiled", evidence
    assert evidence["num_compiled_layer_runs"] == evidence["num_layer_runs"] > 0
    assert evidence["num_graph_breaks"] == 0
    num_graphs = len(ROWS) * NUM_KINDS_OF_LAYERS.get(kind, 1)
    assert evidence["num_compiles"] - before == num_graphs, (kind, evidence)
    assert not any("forward" in vars(layer) for layer in target.decoder.layers)

# What does not fit any row is refused in words; nothing is compiled for it.
try:
    target.hidden_states([np.zeros(200, dtype=np.int32)], layers=LAYERS)
except ValueError as error:
    assert "set extract.batch_tokens" in str(error)
else:
    raise AssertionError("too long a batch ran")

# What cannot be traced runs eagerly, and says so; or stops where compiling is a must.
target = make("qwen3", {})
right = type(target.decoder.layers[0]).forward
def untraceable(self, hidden_states, *inputs, **arguments):
    torch._dynamo.graph_break()
    return right(self, hidden_states, *inputs, **arguments)
type(target.decoder.layers[0]).forward = untraceable
assert choose_batching(target, SEQUENCES, layers=LAYERS, compiled_rows=[64]) == "packed"
assert target.compiled is None
try:
    choose_batching(target, SEQUENCES, layers=LAYERS, compiled_rows=[64], must_compile=True)
except Exception:
    pass
else:
    raise AssertionError("ran although it could not be compiled")
"""


def test_compiled_layers_give_the_plain_states(
    run_script: Callable[..., None], device: str
) -> None:
    run_script(SCRIPT, device=device)


def test_the_witness_tells_eager_from_compiled() -> None:
    from torch import nn

    from stage1_extract.compiled import layer_forward

    layer = nn.Identity()
    assert layer_forward(layer, 3) == (3, False)


@pytest.mark.parametrize(("compiled", "word"), [(0, "eager"), (3, "mixed"), (4, "compiled")])
def test_the_evidence_in_a_word(compiled: int, word: str) -> None:
    from stage1_extract.compiled import CompiledLayers

    layers = CompiledLayers(backend="eager", num_layer_runs=4, num_compiled_layer_runs=compiled)
    assert layers.evidence()["execution"] == word
