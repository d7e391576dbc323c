"""Inputs of whole-host runs: repeated layers share a file, not a meaning."""

import importlib

import torch


def test_layers_of_a_deeper_target_take_turns():
    inputs = importlib.import_module("host_inputs")
    weights = {
        "model.embed_tokens.weight": torch.zeros(2),
        "model.layers.0.mlp.weight": torch.full((2,), 1.0),
        "model.layers.1.mlp.weight": torch.full((2,), 2.0),
    }
    deeper = inputs.repeated(weights, num_distinct=2, num_layers=12)
    assert len(deeper) == 13
    values = [deeper[f"model.layers.{number}.mlp.weight"][0].item() for number in range(12)]
    assert values == [1.0, 2.0] * 6
    assert deeper["model.layers.10.mlp.weight"] is weights["model.layers.0.mlp.weight"]
