"""A real store on disk with random hidden states, for benchmarks of what reads stores.

Sequences share a few random states: what is in them costs neither the reader nor the trainer time.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from shapes import Shape

from stage2_train.architecture import default_target_layer_ids
from storage.encodings import ENCODINGS, EncodedStates, encode
from storage.head import FACTS_FILE, WEIGHTS_FILE
from storage.schema import LayerRecord, StoreIdentity
from storage.writer import WritableStore, create_store

NUM_KINDS = 3
SHARD_BYTES = 1_000_000_000


def make_store(
    store_dir: Path,
    shape: Shape,
    lengths: Sequence[int],
    *,
    encoding: str,
    supervised_fraction: float = 7 / 8,
    num_units: int | None = None,
) -> Path:
    """Writes a store of so many sequences, through the writer that extraction uses.

    Args:
        store_dir: where; must not exist.
        shape: sizes.
        lengths: tokens of each sequence.
        encoding: of every layer.
        supervised_fraction: share of each sequence's end that is the answer.
        num_units: shards; None makes them about 1 GB.
    """
    store = create_store(store_dir, identity_of(shape))
    names = [str(i) for i in default_target_layer_ids(shape.num_layers, shape.num_target_layers)]
    scales = channel_scales(shape, encoding)
    store.add_layers(
        LayerRecord(
            name=name, encoding=encoding, hidden_size=shape.hidden_size, channel_scales=scales
        )
        for name in names
    )
    write_head(store, shape)
    length_of = {f"sequence-{number}": length for number, length in enumerate(lengths)}
    kinds = random_states(max(lengths), shape, encoding)
    if num_units is None:
        token_bytes = len(names) * kinds[0].data[:1].nbytes
        num_units = max(1, sum(lengths) * token_bytes // SHARD_BYTES)
    store.plan_generation(list(length_of), num_units=num_units)
    rng = np.random.default_rng(0)
    for unit in store.units():
        with store.start_shard(unit) as shard:
            for sequence_id in store.sequences_of(unit):
                length = length_of[sequence_id]
                shard.append(
                    sequence_id=sequence_id,
                    token_ids=rng.integers(0, shape.vocab_size - 1, length, dtype=np.int32),
                    loss_mask=np.arange(length) >= round(length * (1 - supervised_fraction)),
                    greedy=False,
                    states={
                        name: first_tokens(kinds[number % NUM_KINDS], length)
                        for number, name in enumerate(names)
                    },
                )
            assert shard.seal(), "nobody else writes here"
    return store_dir


def identity_of(shape: Shape) -> StoreIdentity:
    """An identity without meaning; nothing is held out."""
    return StoreIdentity(
        target_name="synthetic",
        target_revision=None,
        target_weights_sha256="",
        tokenizer_sha256="",
        chat_template_sha256="",
        template_arguments={},
        mask_rule_version=1,
        max_sequence_tokens=4096,
        long_conversations="truncate",
        compute_dtype="bfloat16",
        attention_backend="sdpa",
        hidden_size=shape.hidden_size,
        num_target_layers=shape.num_target_layers,
        vocab_size=shape.vocab_size,
        held_out_fraction=0.0,
    )


def random_states(num_tokens: int, shape: Shape, encoding: str) -> list[EncodedStates]:
    """A few layers of random states, encoded by the reference."""
    rng = np.random.default_rng(1)
    kinds = []
    for _ in range(NUM_KINDS):
        states = rng.standard_normal((num_tokens, shape.hidden_size), dtype=np.float32)
        scales = channel_scales(shape, encoding)
        kinds.append(
            encode(
                encoding,
                states,
                channel_scales=None if scales is None else np.array(scales, np.float32),
            )
        )
    return kinds


def channel_scales(shape: Shape, encoding: str) -> tuple[float, ...] | None:
    """What calibrating would find: the random channels all have the size one."""
    return (1.0,) * shape.hidden_size if ENCODINGS[encoding].calibrated else None


def first_tokens(states: EncodedStates, num_tokens: int) -> EncodedStates:
    """The states of the first tokens."""
    return EncodedStates(
        data=states.data[:num_tokens],
        scales=None if states.scales is None else states.scales[:num_tokens],
    )


def write_head(store: WritableStore, shape: Shape) -> None:
    """An untied embedding and LM head of the size of a trained one's."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(min(4093, shape.vocab_size), shape.hidden_size, generator=generator)
    # Rows come again and again: a billion random numbers would take longer than the benchmark.
    repeated = (0.02 * rows).bfloat16().repeat(-(-shape.vocab_size // len(rows)), 1)
    weights = {
        "embed_tokens.weight": repeated[: shape.vocab_size],
        "lm_head.weight": repeated[: shape.vocab_size].clone(),
    }
    weights["norm.weight"] = torch.ones(shape.hidden_size, dtype=torch.bfloat16)
    facts = {
        "config": {
            "hidden_size": shape.hidden_size,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "intermediate_size": shape.intermediate_size,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "max_position_embeddings": 40_960,
        },
        "tied": False,
        "embedding_scale": 1.0,
        "logit_scale": 1.0,
        "final_logit_softcapping": None,
        "norm_kind": "rms",
        "norm_eps": 1e-6,
        "vocab_size": shape.vocab_size,
        "tokenizer_size": shape.vocab_size - 1,
        "mask_token_id": shape.vocab_size - 1,
        "eos_token_ids": [0],
        "transformers_version": "5",
    }
    store.put_head_file(FACTS_FILE, json.dumps(facts).encode())
    store.put_head_file(WEIGHTS_FILE, save(weights))
