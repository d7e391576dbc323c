"""The decoder's hooks: what is collected, and that nothing stays behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stage1_extract.decoder import capture, find_decoder, no_hook_left_behind
from storage.schema import LM_HEAD_INPUT


@pytest.fixture
def model(target_folder: Callable[..., Path]) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target_folder("llama")).eval()


def hooks(model: Any) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


TOKENS = torch.arange(6)[None]


@torch.inference_mode()
def test_captured_states_are_the_models_own(model: Any) -> None:
    decoder = find_decoder(model)
    expected = model(TOKENS, output_hidden_states=True).hidden_states
    with capture(decoder, ["0", "2", LM_HEAD_INPUT]) as captured:
        decoder.module(TOKENS)
    for name, entry in (("0", 1), ("2", 3), (LM_HEAD_INPUT, 4)):
        torch.testing.assert_close(captured[name], expected[entry])


@torch.inference_mode()
def test_an_error_inside_leaves_no_hook(model: Any) -> None:
    before = hooks(model)
    with pytest.raises(RuntimeError, match="broken"), capture(find_decoder(model), ["1"]):
        raise RuntimeError("broken")
    assert hooks(model) == before


@torch.inference_mode()
def test_hooks_of_transformers_are_taken_away_and_come_again(model: Any) -> None:
    before = hooks(model)
    for _ in range(2):
        with no_hook_left_behind(model):
            output = model(TOKENS, output_hidden_states=True)
        assert len(output.hidden_states) == 5
        assert hooks(model) == before
