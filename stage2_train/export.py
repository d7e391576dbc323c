"""Drafter folders for others and from others: the official layout and that of speculators.

The official layout (`dflash`, vLLM, SGLang) is our own checkpoint's, in half precision and without
the training state. The speculators layout holds the same weights under the same names; its
configuration counts target layers from one: its id i is the input of decoder layer i, so the
output of ours, i - 1.
"""

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, Qwen3Config

from stage2_train.architecture import SLIDING, DrafterArchitecture
from stage2_train.checkpoint import CONFIG, MODEL, load_drafter, read_config, read_weights
from stage2_train.drafter import Drafter
from storage.errors import explain_os_errors

SPECULATORS_VERSION = "0.9.0"
# Weights of the target that a speculators folder may carry; a drafter borrows them instead.
_BORROWED = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight")
_BORROWED_NORM = "verifier_norm.weight"


def export_official(
    source: Path | str, out_dir: Path | str, *, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Writes a checkpoint as a folder that the official package, vLLM and SGLang load.

    The folder appears whole or not at all; one that is there is replaced.

    Args:
        source: a checkpoint, or a drafter folder of either layout that says its target's depth.
        out_dir: the folder to write.
        dtype: type of the weights.
    """
    drafter = load_any_drafter(source)
    config = drafter.architecture.to_config() | _record_of(dtype)
    return _write_folder(Path(out_dir), config=config, weights=_weights(drafter, dtype))


def export_speculators(
    source: Path | str,
    out_dir: Path | str,
    *,
    target: str,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Writes a checkpoint as a folder that `speculators` and vLLM load.

    Args:
        source: a checkpoint or an official folder.
        out_dir: the folder to write; one that is there is replaced.
        target: hub id or folder of the target; engines take embedding and LM head from it.
        dtype: type of the weights.

    Raises:
        ValueError: the layout has no way to say what this drafter needs.
    """
    drafter = load_any_drafter(source)
    target_config, _ = PretrainedConfig.get_config_dict(target)
    config = speculators_config(
        drafter.architecture,
        target=target,
        target_architectures=target_config.get("architectures") or [],
    )
    config |= _record_of(dtype)
    return _write_folder(Path(out_dir), config=config, weights=_weights(drafter, dtype))


def speculators_config(
    architecture: DrafterArchitecture, *, target: str, target_architectures: list[str]
) -> dict[str, Any]:
    """Gives the `config.json` of the speculators layout.

    Raises:
        ValueError: the drafter scales the target's embedding, or is causal in a layer without a
            sliding window; the layout knows neither.
    """
    if architecture.input_embedding_scale != 1.0:
        # The other two scales keep the order of the logits, so greedy proposals need no key.
        raise ValueError(
            f"the speculators layout cannot scale the target's embedding (this drafter needs "
            f"{architecture.input_embedding_scale:g}); export the official layout"
        )
    if architecture.is_causal and SLIDING not in architecture.layer_types:
        raise ValueError(
            "the speculators layout knows causal blocks in sliding-window layers only; export the "
            "official layout"
        )
    own = architecture.to_config()
    unknown_there = ("architectures", "block_size", "dflash_config", "num_target_layers")
    layer_config = {key: value for key, value in own.items() if key not in unknown_there}
    return {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [index + 1 for index in architecture.target_layer_ids],
        "block_size": architecture.block_size,
        "draft_vocab_size": architecture.vocab_size,
        "mask_token_id": architecture.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": architecture.is_causal is False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": architecture.block_size - 1,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"name_or_path": target, "architectures": target_architectures},
        },
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "transformer_layer_config": layer_config,
    }


def load_any_drafter(
    folder: Path | str,
    *,
    num_target_layers: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Drafter:
    """Loads a drafter from a checkpoint or a folder of either layout.

    Args:
        folder: the folder.
        num_target_layers: decoder layers of the target; only the speculators layout needs it,
            which does not say.
        dtype: type of the weights.
        device: where they go.

    Raises:
        ValueError: the folder is no drafter, or of a kind that cannot be drafted with here.
    """
    folder = Path(folder)
    config = read_config(folder)
    if "speculators_model_type" not in config:
        return load_drafter(folder, dtype=dtype, device=device)
    architecture = read_speculators_config(config, num_target_layers=num_target_layers)
    borrowed = (*_BORROWED, _BORROWED_NORM)
    weights = {
        name: weight.to(device, dtype)
        for name, weight in read_weights(folder).items()
        if name not in borrowed
    }
    with torch.device("meta"):
        drafter = Drafter(architecture)
    try:
        drafter.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder / MODEL} does not fit its config: {reason}") from error
    return drafter.eval()


def read_speculators_config(
    config: Mapping[str, Any], *, num_target_layers: int | None
) -> DrafterArchitecture:
    """Reads the `config.json` of a speculators folder.

    Raises:
        ValueError: another algorithm, a reduced vocabulary, or tokens drafted at the anchor.
    """
    kind = config["speculators_model_type"]
    if kind != "dflash":
        raise ValueError(f"speculators_model_type is {kind!r}; only dflash drafters are supported")
    if config.get("sample_from_anchor"):
        raise ValueError("sample_from_anchor is true; DFlash drafts after its anchor, not at it")
    # speculators leaves out what equals Qwen3's defaults.
    layers = Qwen3Config(**config["transformer_layer_config"]).to_dict()
    if config["draft_vocab_size"] != layers["vocab_size"]:
        raise ValueError(
            f"draft_vocab_size {config['draft_vocab_size']} is not the target's "
            f"{layers['vocab_size']}; drafters with a reduced vocabulary are not supported"
        )
    if num_target_layers is None:
        raise ValueError(
            "a speculators folder does not say how deep its target is; name the target"
        )
    layer_ids = [index - 1 for index in config["aux_hidden_state_layer_ids"]]
    has_sliding = SLIDING in (layers.get("layer_types") or ())
    return DrafterArchitecture.from_config(
        {
            **layers,
            "architectures": ["DFlashDraftModel"],
            "block_size": config["block_size"],
            "is_causal": False if has_sliding and config.get("sliding_window_non_causal") else None,
            "num_target_layers": num_target_layers,
            "dflash_config": {
                "mask_token_id": config["mask_token_id"],
                "target_layer_ids": layer_ids,
            },
        }
    )


def _record_of(dtype: torch.dtype) -> dict[str, Any]:
    name = str(dtype).removeprefix("torch.")
    return {"dtype": name, "transformers_version": transformers.__version__}


def _weights(drafter: Drafter, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: weight.detach().to("cpu", dtype).contiguous()
        for name, weight in drafter.state_dict().items()
    }


def _write_folder(
    out_dir: Path, *, config: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> Path:
    attempt = out_dir.with_name(f".{out_dir.name}.{uuid.uuid4().hex}.partial")
    with explain_os_errors("write", out_dir):
        attempt.mkdir(parents=True)
        try:
            text = json.dumps(config, indent=2, sort_keys=True) + "\n"
            (attempt / CONFIG).write_text(text, encoding="utf-8")
            save_file(dict(weights), attempt / MODEL, metadata={"format": "pt"})
            for path in attempt.iterdir():
                _flush_to_disk(path)
            if out_dir.exists():
                shutil.rmtree(out_dir)
            attempt.rename(out_dir)
        except BaseException:
            shutil.rmtree(attempt, ignore_errors=True)
            raise
    return out_dir


def _flush_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
