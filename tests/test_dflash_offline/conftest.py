"""A whole tiny run, made once: target, store, two checkpoints of one drafter."""

import json
import random
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dflash_offline.config import RunConfig, drafter_run, extract_run

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""


def save_tiny_target(folder: Path) -> None:
    """Save a tiny random Llama with a tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=257,
        bos_token_id=None,
        architectures=["LlamaForCausalLM"],
    )
    LlamaForCausalLM(config).save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random target and its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-target")
    save_tiny_target(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run whose store is filled and whose drafter has two checkpoints."""
    from stage1_extract.extract import prepare_store, run_worker
    from stage2_train.train import train_drafter

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny-run")
    save_tiny_target(folder / "target")
    numbers = random.Random(0)
    conversations = folder / "conversations.jsonl"
    with conversations.open("w") as file:
        for index in range(24):
            one, other = numbers.randrange(50), numbers.randrange(50)
            question = {"role": "user", "content": f"{one}+{other}?"}
            answer = {"role": "assistant", "content": f"It is {one + other}."}
            file.write(json.dumps({"id": f"c{index}", "messages": [question, answer]}) + "\n")
    config = RunConfig.model_validate(
        {
            "run_dir": str(folder / "run"),
            "target": {"model": str(folder / "target"), "dtype": "float32"},
            "data": {"conversations": [str(conversations)], "max_sequence_tokens": 128},
            "store": {"encoding": "bf16", "target_layer_ids": [0, 1], "held_out_fraction": 0.3},
            "train": {
                "max_steps": 4,
                "batch_tokens": 128,
                "num_anchors": 16,
                "dtype": "float32",
                "checkpoint_steps": 2,
                "validation_steps": 2,
                "validation_sequences": 4,
            },
            "drafter": [
                {"name": "small", "num_layers": 1, "block_size": 4, "mask_token_id": 260},
            ],
            "eval": {"num_prompts": 6, "max_new_tokens": 12, "batch_size": 4, "torch_threads": 1},
        }
    )
    run = extract_run(config)
    prepare_store(run)
    assert run_worker(run, worker_index=0, num_workers=1) == 0
    assert train_drafter(drafter_run(config, "small")) == 0
    return config
