"""Inputs of whole-host runs: a large target of random weights, conversations of random tokens."""

import json
from pathlib import Path

import numpy as np
import torch
from shapes import Shape
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)


def target_config(shape: Shape, *, num_layers: int) -> Qwen3Config:
    """A dense target of a shape, of some depth."""
    return Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=40_960,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


# A trained target's layers change its residual stream little by little. Untamed random ones blow
# rounding up from layer to layer, until no two ways of computing them agree.
EMBEDDING_STD, BRANCH_SCALE = 1.0, 0.05


@torch.no_grad()
def tame(model: PreTrainedModel) -> None:
    """Makes embeddings large and what each layer adds to them small."""
    model.get_input_embeddings().weight.normal_(std=EMBEDDING_STD)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(BRANCH_SCALE)
        layer.mlp.down_proj.weight.mul_(BRANCH_SCALE)


def make_target(
    folder: Path, shape: Shape, *, num_layers: int, num_distinct_layers: int | None = None
) -> Path:
    """Writes a target of random weights with a tokenizer that nothing uses.

    Args:
        folder: where to.
        shape: its widths.
        num_layers: its depth.
        num_distinct_layers: layers that are written; the others repeat them, one after the other,
            so that a target of 50 GB takes a file of a few. Loaded, every layer has its own memory,
            and its arithmetic is what it would be with weights of its own. None writes all.
    """
    if (folder / "config.json").is_file():
        return folder
    num_distinct = num_distinct_layers or num_layers
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(
            target_config(shape, num_layers=num_distinct), dtype=torch.bfloat16
        )
    tame(model)
    vocabulary = {f"<{number}>": number for number in range(shape.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<1>", chat_template="{{ messages }}"
    ).save_pretrained(folder)
    if num_distinct == num_layers:
        model.save_pretrained(folder)
        return folder
    weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    # Unlike safetensors, torch's own format keeps a tensor of many names once.
    torch.save(repeated(weights, num_distinct=num_distinct, num_layers=num_layers), bin_of(folder))
    target_config(shape, num_layers=num_layers).save_pretrained(folder)
    return folder


def bin_of(folder: Path) -> Path:
    """The weights in torch's own format."""
    return folder / "pytorch_model.bin"


def repeated(
    weights: dict[str, torch.Tensor], *, num_distinct: int, num_layers: int
) -> dict[str, torch.Tensor]:
    """The weights of a deeper model whose layers take turns with those of a shallow one."""
    start = "model.layers."
    deeper = {name: tensor for name, tensor in weights.items() if not name.startswith(start)}
    for number in range(num_layers):
        source = f"{start}{number % num_distinct}."
        for name, tensor in weights.items():
            if name.startswith(source):
                deeper[f"{start}{number}.{name.removeprefix(source)}"] = tensor
    return deeper


def make_conversations(path: Path, *, count: int, length: int, vocab_size: int) -> Path:
    """Writes conversations of random tokens, all of one length; its first eighth is no answer."""
    if path.is_file():
        return path
    rng = np.random.default_rng(0)
    mask = [0] * (length // 8) + [1] * (length - length // 8)
    with path.open("w") as lines:
        for number in range(count):
            token_ids = rng.integers(2, vocab_size, length).tolist()
            line = {"id": f"r{number:06d}", "token_ids": token_ids, "loss_mask": mask}
            lines.write(json.dumps(line) + "\n")
    return path
