"""Layers of one rule share a mask, and all that masks are made of is known."""

import dataclasses

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from stage2_train import masks as module
from stage2_train.architecture import SLIDING
from stage2_train.block_attention import BlockTables
from stage2_train.masks import batch_masks

STOP = torch.arange(3, 35) * 7
START = torch.zeros_like(STOP)


@pytest.fixture
def mixed(architecture):
    """Three layers, of which the second has a window; 32 blocks of it fill whole tiles."""
    return dataclasses.replace(
        architecture,
        num_hidden_layers=3,
        layer_types=("full_attention", SLIDING, "full_attention"),
        sliding_window=6,
        block_size=8,
        head_dim=16,
        is_causal=False,
    )


def masks_of(architecture, **options):
    return batch_masks(START, STOP, num_context_tokens=256, architecture=architecture, **options)


@pytest.mark.parametrize("has_room", [False, True])
def test_layers_of_one_rule_share_a_mask(mixed, monkeypatch, has_room):
    monkeypatch.setattr(module, "has_room", lambda device: has_room)
    of_layers = masks_of(mixed).of_layers
    assert of_layers[0] is of_layers[2]
    assert of_layers[0] is not of_layers[1]
    assert all(isinstance(m, BlockTables if has_room else BlockMask) for m in of_layers)


def test_flex_attention_can_be_wanted(mixed, monkeypatch):
    monkeypatch.setattr(module, "has_room", lambda device: True)
    of_layers = masks_of(mixed, is_flex_wanted=True).of_layers
    assert all(isinstance(mask, BlockMask) for mask in of_layers)


def test_a_cpu_takes_flex_attentions_masks(mixed):
    assert all(isinstance(mask, BlockMask) for mask in masks_of(mixed).of_layers)


@pytest.mark.parametrize("has_room", [False, True])
def test_all_tensors_of_the_masks_are_known(mixed, monkeypatch, has_room):
    monkeypatch.setattr(module, "has_room", lambda device: has_room)
    masks = masks_of(mixed)
    known = {tensor.data_ptr() for tensor in masks.tensors}
    for mask in masks.of_layers:
        parts = list(mask) if isinstance(mask, BlockTables) else list(mask.as_tuple())
        if isinstance(mask, BlockMask):
            # The rule itself reads the runs of each query.
            parts += [cell.cell_contents for cell in mask.mask_mod.__closure__]
        for part in parts:
            assert not isinstance(part, torch.Tensor) or part.data_ptr() in known
