"""The sample is a part of the batch, and what is measured on it is what the encoding lost there."""

import numpy as np
import pytest
import torch

from stage1_extract.encode import encode_on_host
from stage1_extract.loss_sample import SAMPLED_TOKENS, measure_sample, take_sample
from storage.encodings import decode
from storage.schema import LayerRecord

LAYERS = {"1": LayerRecord(name="1", encoding="fp8", hidden_size=16)}


@pytest.mark.parametrize("num_tokens", [1, SAMPLED_TOKENS, 1000])
def test_the_loss_is_that_of_the_sampled_tokens(num_tokens: int) -> None:
    states = {"1": torch.randn(num_tokens, 16, generator=torch.Generator().manual_seed(0))}
    sample, batch = take_sample(states), encode_on_host(states, LAYERS)
    loss = measure_sample(sample, batch, LAYERS)["1"]
    assert loss.num_measured_tokens == len(sample["1"]) <= 2 * SAMPLED_TOKENS
    rows = slice(None, None, max(1, num_tokens // SAMPLED_TOKENS))
    exact = states["1"].numpy()[rows]
    decoded = decode("fp8", batch.encoded["1"])[rows]
    errors = np.linalg.norm(decoded - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert loss.relative_error == pytest.approx(np.sqrt((errors**2).mean()), rel=1e-4)


def test_broken_tokens_are_not_measured() -> None:
    states = {"1": torch.ones(4, 16)}
    states["1"][2, 5] = torch.nan
    loss = measure_sample(take_sample(states), encode_on_host(states, LAYERS), LAYERS)["1"]
    assert loss.num_measured_tokens == 3
    assert loss.relative_error < 0.05
