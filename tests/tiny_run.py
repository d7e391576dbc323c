"""A whole run in seconds: a random two-layer target, conversations, a run file."""

import json
import runpy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

STAGE_1_CONFTEST = Path(__file__).parent / "test_stage1_extract" / "conftest.py"
SLOW_CLI = Path(__file__).parent / "slow_cli.py"


def make_inputs(folder: Path) -> Path:
    """A random two-layer target, and conversations for four units of its states."""
    families = runpy.run_path(str(STAGE_1_CONFTEST))
    config = families["target_config"]("llama")
    config.num_hidden_layers = 2
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "target")
    families["build_tokenizer"]("chatml").save_pretrained(folder / "target")
    lines = [
        {
            "id": f"c{number}",
            "messages": [
                {"role": "user", "content": f"question {number} " * 10},
                {"role": "assistant", "content": f"answer {number} and so on, " * 30},
            ],
        }
        for number in range(40)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "conversations.jsonl").write_text(text)
    return folder


def run_tables(run_dir: Path, inputs: Path, *, num_drafters: int = 1) -> dict[str, Any]:
    """The tables of a run file: four units, twenty steps."""
    return {
        "run_dir": str(run_dir),
        "target": {"model": str(inputs / "target"), "dtype": "float32"},
        "data": {
            "conversations": [str(inputs / "conversations.jsonl")],
            "max_sequence_tokens": 1024,
        },
        "store": {"encoding": "bf16", "target_layer_ids": [0, 1], "shard_bytes": 1_000_000},
        "extract": {"batch_tokens": 1024, "num_workers": 1, "stop_grace_s": 1.0},
        "train": {
            "epochs": 100,
            "max_steps": 20,
            "batch_tokens": 512,
            "num_anchors": 16,
            "checkpoint_steps": 10,
            "validation_steps": 20,
            "validation_sequences": 2,
        },
        "drafter": [
            {"name": "one", "num_layers": 1, "block_size": 4},
            {"name": "two", "num_layers": 2, "block_size": 4},
        ][:num_drafters],
    }
