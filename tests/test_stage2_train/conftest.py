"""A tiny store that a drafter can learn from, and settings to train on it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from stage2_train.architecture import DrafterArchitecture
from stage2_train.config import DrafterConfig, DrafterRun, TrainConfig
from stage2_train.target_head import TargetHead
from storage.encodings import encode
from storage.schema import LM_HEAD_INPUT, LayerRecord, StoreIdentity
from storage.writer import create_store

HIDDEN_SIZE, VOCAB_SIZE, NUM_TARGET_LAYERS = 32, 64, 6
LAYERS = {"1": "bf16", "2": "bf16", "4": "fp8"}


def make_identity(**changes: Any) -> StoreIdentity:
    fields: dict[str, Any] = {
        "target_name": "tiny",
        "target_revision": None,
        "target_weights_sha256": "aa",
        "tokenizer_sha256": "bb",
        "chat_template_sha256": "cc",
        "template_arguments": {},
        "mask_rule_version": 1,
        "max_sequence_tokens": 256,
        "long_conversations": "truncate",
        "compute_dtype": "float32",
        "attention_backend": "sdpa",
        "hidden_size": HIDDEN_SIZE,
        "num_target_layers": NUM_TARGET_LAYERS,
        "vocab_size": VOCAB_SIZE,
        "held_out_fraction": 0.2,
    }
    return StoreIdentity(**{**fields, **changes})


def make_sequence(number: int, layers: Mapping[str, str] = LAYERS) -> dict[str, Any]:
    """A counting sequence whose states tell the token: a drafter can learn to go on."""
    rng = np.random.default_rng(number)
    num_tokens, num_prompt_tokens = int(rng.integers(24, 70)), int(rng.integers(2, 10))
    token_ids = (int(rng.integers(0, 40)) + np.arange(num_tokens)) % (VOCAB_SIZE - 4) + 1
    embedding = np.random.default_rng(0).standard_normal((VOCAB_SIZE, HIDDEN_SIZE))
    # The head's own row of the next token: the target is nearly sure of it.
    next_ids = np.append(token_ids[1:], 0)
    states = {
        name: 9.0 * head_embedding().numpy()[next_ids]
        if name == LM_HEAD_INPUT
        else embedding[token_ids] * (1 + int(name))
        for name in layers
    }
    return {
        "sequence_id": f"sequence-{number}",
        "token_ids": token_ids.astype(np.int32),
        "loss_mask": np.arange(num_tokens) >= num_prompt_tokens,
        "greedy": True,
        "states": {
            name: encode(encoding, states[name].astype(np.float32))
            for name, encoding in layers.items()
        },
    }


def head_embedding() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return 0.3 * torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator)


def tied_head(weight: torch.Tensor) -> TargetHead:
    """A target's head without scales, whose embedding is its LM head."""
    return TargetHead(
        config={},
        embed_weight=weight,
        lm_head_weight=weight,
        lm_head_bias=None,
        embedding_scale=1.0,
        logit_scale=1.0,
        final_logit_softcapping=None,
        tokenizer_size=len(weight),
        mask_token_id=None,
        eos_token_ids=(),
    )


def write_head(store: Any, **changes: Any) -> None:
    facts = {
        "config": {
            "hidden_size": HIDDEN_SIZE,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "max_position_embeddings": 512,
        },
        "tied": True,
        "embedding_scale": 1.0,
        "logit_scale": 1.0,
        "final_logit_softcapping": None,
        "norm_kind": "rms",
        "norm_eps": 1e-5,
        "vocab_size": VOCAB_SIZE,
        "tokenizer_size": VOCAB_SIZE - 1,
        "mask_token_id": VOCAB_SIZE - 1,
        "eos_token_ids": [0],
        "transformers_version": "5",
    }
    weights = {
        "embed_tokens.weight": head_embedding(),
        "norm.weight": torch.ones(HIDDEN_SIZE),
    }
    store.put_head_file("target.json", json.dumps(facts | changes).encode())
    store.put_head_file("target.safetensors", save(weights))


def fill_store(
    store_dir: Path,
    *,
    num_sequences: int = 24,
    num_units: int = 4,
    num_committed: int = 99,
    is_supervised: bool = True,
    layers: Mapping[str, str] = LAYERS,
) -> Path:
    store = create_store(store_dir, make_identity())
    store.add_layers(
        LayerRecord(name=name, encoding=encoding, hidden_size=HIDDEN_SIZE)
        for name, encoding in layers.items()
    )
    write_head(store)
    made = (make_sequence(number, layers) for number in range(num_sequences))
    sequences = {sequence["sequence_id"]: sequence for sequence in made}
    store.plan_generation(list(sequences), num_units=num_units)
    for sequence in sequences.values():
        sequence["loss_mask"] &= is_supervised
    commit_units(store, sequences, num_committed=num_committed)
    return store_dir


def commit_units(store: Any, sequences: dict[str, Any], *, num_committed: int) -> None:
    by_unit: dict[Any, list[Any]] = {}
    for sequence_id, sequence in sequences.items():
        by_unit.setdefault(store.unit_of(sequence_id), []).append(sequence)
    for unit in sorted(by_unit)[:num_committed]:
        if store.is_committed(unit):
            continue
        with store.start_shard(unit) as shard:
            for sequence in by_unit[unit]:
                shard.append(**sequence)
            assert shard.seal()


TRAIN: dict[str, Any] = {
    "epochs": 2,
    "batch_tokens": 192,
    "num_anchors": 12,
    "dtype": "float32",
    "checkpoint_steps": 4,
    "validation_steps": 7,
    "validation_sequences": 1,
    "log_steps": 2,
    "optimizer": {"learning_rate": 3e-3},
}


@pytest.fixture
def tiny_store() -> SimpleNamespace:
    """The functions that make and fill tiny stores."""
    return SimpleNamespace(
        fill_store=fill_store,
        commit_units=commit_units,
        make_sequence=make_sequence,
        write_head=write_head,
    )


@pytest.fixture(scope="session")
def shared_store_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete store that no test changes."""
    return fill_store(tmp_path_factory.mktemp("shared") / "store")


@pytest.fixture
def make_run(tmp_path: Path, shared_store_dir: Path) -> Callable[..., DrafterRun]:
    """Make settings of a training; `train` and `drafter` change single settings."""

    def make(
        *,
        name: str = "tiny",
        store_dir: Path = shared_store_dir,
        train: dict[str, Any] | None = None,
        drafter: dict[str, Any] | None = None,
    ) -> DrafterRun:
        return DrafterRun(
            drafter=DrafterConfig(
                **({"name": name, "num_layers": 2, "block_size": 5} | (drafter or {}))
            ),
            train=TrainConfig(**(TRAIN | (train or {}))),
            store_dir=store_dir,
            drafter_dir=tmp_path / "drafters" / name,
        )

    return make


@pytest.fixture
def architecture() -> DrafterArchitecture:
    return make_architecture()


def make_architecture(**changes: Any) -> DrafterArchitecture:
    settings: dict[str, Any] = {
        "hidden_size": HIDDEN_SIZE,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB_SIZE,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 512,
        "block_size": 5,
        "mask_token_id": VOCAB_SIZE - 1,
        "target_layer_ids": (1, 2),
        "num_target_layers": NUM_TARGET_LAYERS,
        "layer_types": ("full_attention",) * changes.get("num_hidden_layers", 2),
    }
    return DrafterArchitecture(**(settings | changes))
