"""The target's head: embedding, final norm and LM head, saved into the store for stage 2.

The facts beside the weights (scales, soft cap, kind of norm) are taken from the configuration and
then proved: with them the saved weights must give the target's own embeddings, final states and
logits for a few real tokens.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from jaxtyping import Float, Int32
from numpy import ndarray
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional

from stage1_extract.last_layers import last_layers_file
from stage1_extract.parity import relative_differences
from stage1_extract.target_files import stop_token_ids
from stage1_extract.target_transformers import TransformersTarget
from stage1_extract.target_weights import as_published, whole
from storage.head import FACTS_FILE, LAST_LAYERS_FILE, WEIGHTS_FILE

_TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class _Observed:
    """One forward pass over a few tokens, seen from outside."""

    embeddings: Float[Tensor, "tokens hidden"]
    before_norm: Float[Tensor, "tokens hidden"]
    lm_head_input: Float[Tensor, "tokens hidden"]
    logits: Float[Tensor, "tokens vocab"]


def head_files(
    target: TransformersTarget,
    *,
    folder: str | Path,
    token_ids: Int32[ndarray, "tokens"],
    num_last_layers: int = 0,
) -> dict[str, bytes]:
    """The files of the store's `head/` by name.

    Args:
        target: The loaded target.
        folder: Folder of its files (its generation settings name the stop tokens).
        token_ids: A real sequence; a few tokens of it prove the facts.
        num_last_layers: Decoder layers, counted from the last, whose weights are kept, too.

    Raises:
        ValueError: The target's embedding or logits follow no rule known here.
    """
    weights = head_weights(target)
    token_ids = token_ids[:64]
    observed = _observe(target, token_ids)
    facts = {
        "config": _plain_config(target),
        "tied": "lm_head.weight" not in weights,
        "embedding_scale": _embedding_scale(target, weights, token_ids, observed),
        **_norm_facts(target, weights, observed),
        **_logit_facts(target, weights, observed),
        "vocab_size": weights["embed_tokens.weight"].shape[0],
        "tokenizer_size": len(target.tokenizer),
        "mask_token_id": mask_token_id(target, num_rows=weights["embed_tokens.weight"].shape[0]),
        "eos_token_ids": stop_token_ids(folder, target.config),
        "transformers_version": transformers.__version__,
    }
    stored = {name: as_published(weight, target) for name, weight in weights.items()}
    files = {
        WEIGHTS_FILE: save(stored),
        FACTS_FILE: json.dumps(facts, indent=1, sort_keys=True).encode(),
        **_tokenizer_files(target),
    }
    if num_last_layers > 0:
        offset = 1.0 if facts["norm_kind"] == "rms_one_plus_weight" else 0.0
        files[LAST_LAYERS_FILE] = last_layers_file(
            target, num_layers=num_last_layers, norm_offset=offset
        )
    return files


def head_weights(target: TransformersTarget) -> dict[str, Tensor]:
    """Embedding, final norm and, where not tied, LM head, as the target computes with them."""
    embedding = target.model.get_input_embeddings().weight
    weights = {"embed_tokens.weight": embedding}
    norm: Any = target.decoder.norm
    for name in ("weight", "bias"):
        if getattr(norm, name, None) is not None:
            weights[f"norm.{name}"] = getattr(norm, name)
    lm_head: Any = target.model.get_output_embeddings()
    if lm_head is None:
        raise ValueError(f"target.model: {type(target.model).__name__} has no LM head")
    is_tied = lm_head.weight is embedding or _pointer(lm_head.weight) == _pointer(embedding)
    if not is_tied:
        weights["lm_head.weight"] = lm_head.weight
    if getattr(lm_head, "bias", None) is not None:
        weights["lm_head.bias"] = lm_head.bias
    return {name: whole(weight.detach()) for name, weight in weights.items()}


def _pointer(weight: Tensor) -> int:
    from torch.distributed.tensor import DTensor

    return (weight.to_local() if isinstance(weight, DTensor) else weight).data_ptr()


def mask_token_id(target: TransformersTarget, *, num_rows: int) -> int | None:
    """A token that no text holds: the first row past the tokenizer, else its mask token."""
    if len(target.tokenizer) < num_rows:
        return len(target.tokenizer)
    found: int | None = target.tokenizer.mask_token_id
    return found


@torch.inference_mode()
def _observe(target: TransformersTarget, token_ids: Int32[ndarray, "tokens"]) -> _Observed:
    seen: dict[str, Tensor] = {}

    def first_input(_: nn.Module, inputs: Any, keywords: Any) -> None:
        seen["embeddings"] = inputs[0] if inputs else keywords["hidden_states"]

    def around_norm(_: nn.Module, inputs: Any, output: Any) -> None:
        seen["before_norm"], seen["lm_head_input"] = inputs[0], output

    handles = [
        target.decoder.layers[0].register_forward_pre_hook(first_input, with_kwargs=True),
        target.decoder.norm.register_forward_hook(around_norm),
    ]
    batch = torch.as_tensor(token_ids, dtype=torch.long, device=target.device)[None]
    try:
        logits = target.model(input_ids=batch, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    return _Observed(logits=logits[0], **{name: states[0] for name, states in seen.items()})


def _embedding_scale(
    target: TransformersTarget,
    weights: dict[str, Tensor],
    token_ids: Int32[ndarray, "tokens"],
    observed: _Observed,
) -> float:
    rows = functional.embedding(
        torch.as_tensor(token_ids, dtype=torch.long, device=target.device),
        weights["embed_tokens.weight"],
    )
    candidates = [1.0, float(target.config.hidden_size**0.5)]
    multiplier = getattr(target.config, "embedding_multiplier", None)
    candidates += [float(multiplier)] if multiplier else []
    for scale in candidates:
        if _agree(rows.float() * scale, observed.embeddings, rows.dtype):
            return scale
    raise _unknown_rule(target, "its embeddings are not rows of the embedding times a known scale")


def _norm_facts(
    target: TransformersTarget, weights: dict[str, Tensor], observed: _Observed
) -> dict[str, Any]:
    norm: Any = target.decoder.norm
    eps = next(
        float(getattr(norm, name))
        for name in ("variance_epsilon", "eps", "epsilon")
        if getattr(norm, name, None) is not None
    )
    weight = weights.get("norm.weight")
    scale = torch.ones(()) if weight is None else weight.float()
    wide = observed.before_norm.float()
    rms = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    centred = wide - wide.mean(-1, keepdim=True)
    layer = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * scale
    bias = weights.get("norm.bias")
    kinds = {
        "rms": rms * scale,
        "rms_one_plus_weight": rms * (1.0 + scale),
        "layer": layer if bias is None else layer + bias.float(),
    }
    for kind, expected in kinds.items():
        if _agree(expected, observed.lm_head_input, observed.before_norm.dtype):
            return {"norm_kind": kind, "norm_eps": eps}
    # Stage 2 never applies the norm; only conversions of states taken before it are ruled out.
    return {"norm_kind": "other", "norm_eps": eps}


def _logit_facts(
    target: TransformersTarget, weights: dict[str, Tensor], observed: _Observed
) -> dict[str, Any]:
    config = target.config
    softcap = getattr(config, "final_logit_softcapping", None)
    candidates = [1.0]
    if getattr(config, "logits_scaling", None):
        candidates.append(1.0 / config.logits_scaling)
    if getattr(config, "logit_scale", None):
        candidates.append(float(config.logit_scale))
    weight = weights.get("lm_head.weight", weights["embed_tokens.weight"])
    raw = functional.linear(observed.lm_head_input, weight, weights.get("lm_head.bias")).float()
    for scale in candidates:
        logits = raw * scale if softcap is None else torch.tanh(raw * scale / softcap) * softcap
        if _agree(logits, observed.logits, observed.lm_head_input.dtype):
            return {"logit_scale": scale, "final_logit_softcapping": softcap}
    raise _unknown_rule(target, "its logits are not the LM head's output times a known scale")


def _agree(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    return float(relative_differences(found.cpu(), expected.cpu()).max()) <= _TOLERANCES[dtype]


def _unknown_rule(target: TransformersTarget, what: str) -> ValueError:
    return ValueError(f"target.model: {target.config.model_type} cannot be used yet: {what}")


def _tokenizer_files(target: TransformersTarget) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        target.tokenizer.save_pretrained(folder)
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {f"tokenizer/{path.relative_to(folder)}": path.read_bytes() for path in paths}


def _plain_config(target: TransformersTarget) -> dict[str, Any]:
    """The configuration as JSON takes it, without the path it was loaded from."""
    config: dict[str, Any] = json.loads(json.dumps(target.config.to_dict(), default=str))
    config.pop("_name_or_path", None)
    return config
