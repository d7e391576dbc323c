"""A sample of each shard's states, by which its commit record says what encoding lost."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float
from torch import Tensor

from stage1_extract.encode import EncodedBatch
from storage.encodings import EncodedStates
from storage.losses import EncodingLoss, measure_loss
from storage.schema import LayerRecord

SAMPLED_TOKENS = 32
"""Tokens of a shard's first batch that are decoded again, about."""


def take_sample(
    states: Mapping[str, Float[Tensor, "tokens hidden"]],
) -> dict[str, Float[Tensor, "sampled hidden"]]:
    """Some tokens of a batch, evenly spread, where they are; the device is not waited for."""
    return {name: each[_every(len(each))].detach().clone() for name, each in states.items()}


def measure_sample(
    sample: Mapping[str, Float[Tensor, "sampled hidden"]],
    batch: EncodedBatch,
    layers: Mapping[str, LayerRecord],
) -> dict[str, EncodingLoss]:
    """What the encoded form of a batch lost of its sample, by layer; broken tokens left out."""
    losses = {}
    for name, record in layers.items():
        exact = sample[name].float().cpu().numpy()
        encoded, rows = batch.encoded[name], _every(len(batch.encoded[name].data))
        scales = None if encoded.scales is None else encoded.scales[rows]
        finite = np.isfinite(exact).all(axis=1)
        kept = EncodedStates(encoded.data[rows][finite], None if scales is None else scales[finite])
        losses[name] = measure_loss(record, exact[finite], kept)
    return losses


def _every(num_tokens: int) -> slice:
    return slice(None, None, max(1, num_tokens // SAMPLED_TOKENS))
