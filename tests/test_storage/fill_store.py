"""Deterministic tiny sequences, and a process that fills a store with them (to be killed)."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from storage.encodings import EncodedStates, encode
from storage.schema import LayerRecord, StoreIdentity, hash_id
from storage.writer import WritableStore, create_store

HIDDEN_SIZE = 16
LAYERS = (
    LayerRecord(name="1", encoding="fp8", hidden_size=HIDDEN_SIZE),
    LayerRecord(name="9", encoding="bf16", hidden_size=HIDDEN_SIZE),
    LayerRecord(name="lm_head_input", encoding="fp8", hidden_size=HIDDEN_SIZE),
)


def make_identity(**changes: Any) -> StoreIdentity:
    fields: dict[str, Any] = {
        "target_name": "tiny",
        "target_revision": None,
        "target_weights_sha256": "aa",
        "tokenizer_sha256": "bb",
        "chat_template_sha256": "cc",
        "template_arguments": {"enable_thinking": False},
        "mask_rule_version": 1,
        "max_sequence_tokens": 1024,
        "long_conversations": "truncate",
        "compute_dtype": "float32",
        "attention_backend": "sdpa",
        "hidden_size": HIDDEN_SIZE,
        "num_target_layers": 12,
        "vocab_size": 100,
        "held_out_fraction": 0.25,
    }
    return StoreIdentity(**{**fields, **changes})


def make_sequence(
    sequence_id: str, layers: tuple[LayerRecord, ...] = LAYERS, max_tokens: int = 700
) -> dict[str, Any]:
    """What `append` takes, as a function of the id only."""
    rng = np.random.default_rng(hash_id(sequence_id))
    num_tokens = int(rng.integers(1, max_tokens + 1))
    states: dict[str, EncodedStates] = {}
    for record in layers:
        values = rng.standard_normal((num_tokens, record.hidden_size)).astype(np.float32)
        states[record.name] = encode(record.encoding, values * 100)
    return {
        "sequence_id": sequence_id,
        "token_ids": rng.integers(0, 100, num_tokens).astype(np.int32),
        "loss_mask": rng.random(num_tokens) < 0.5,
        "greedy": bool(rng.random() < 0.5),
        "states": states,
    }


def make_store(
    store_dir: Path, *, num_sequences: int = 12, num_units: int = 3, packing: str | None = None
) -> WritableStore:
    """A planned store without any committed unit."""
    store = create_store(store_dir, make_identity())
    store.add_layers(replace(record, packing=packing) for record in LAYERS)
    store.put_head_file("tokenizer/tokenizer.json", b"{}")
    store.plan_generation([f"s{i}" for i in range(num_sequences)], num_units=num_units)
    return store


def fill_unit(store: WritableStore, unit: Any) -> bool:
    with store.start_shard(unit) as shard:
        for sequence_id in store.sequences_of(unit):
            shard.append(**make_sequence(sequence_id))
        return shard.seal()


def fill(store: WritableStore) -> None:
    """Fills every unit that is not committed."""
    for unit in store.units():
        if not store.is_committed(unit):
            fill_unit(store, unit)


if __name__ == "__main__":
    num_units = int(sys.argv[2])
    fill(make_store(Path(sys.argv[1]), num_sequences=4 * num_units, num_units=num_units))
