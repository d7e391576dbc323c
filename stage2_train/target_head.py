"""The target's frozen embedding, final norm and LM head, as the store keeps them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from stage2_train.fp8 import FrozenFp8
from storage.head import FACTS_FILE, WEIGHTS_FILE


@runtime_checkable
class HasHeadFiles(Protocol):
    """A store, as far as the head goes."""

    def head_path(self, name: str) -> Path:
        """Gives the local path of a file under `head/`."""
        ...


@dataclass(frozen=True, kw_only=True)
class TargetHead:
    """What a drafter borrows from its target; nothing of it is trained."""

    config: Mapping[str, Any]
    """The target's text configuration."""
    embed_weight: Float[Tensor, "vocab hidden"]
    lm_head_weight: Float[Tensor, "vocab hidden"]
    """The same tensor as `embed_weight` where the target ties them."""
    lm_head_bias: Float[Tensor, "vocab"] | None
    embedding_scale: float
    logit_scale: float
    final_logit_softcapping: float | None
    tokenizer_size: int
    mask_token_id: int | None
    eos_token_ids: tuple[int, ...]
    fp8: FrozenFp8 | None = None
    """The LM head for fp8 products; None multiplies in its own type."""

    @property
    def hidden_size(self) -> int:
        """Width of the target's hidden states."""
        return self.embed_weight.shape[1]

    @property
    def vocab_size(self) -> int:
        """Rows of the target's embedding."""
        return self.embed_weight.shape[0]

    def embed(self, token_ids: Int[Tensor, "*tokens"]) -> Float[Tensor, "*tokens hidden"]:
        """Gives the tokens' embeddings, scaled as the target scales them."""
        embeddings = functional.embedding(token_ids, self.embed_weight)
        return embeddings if self.embedding_scale == 1.0 else embeddings * self.embedding_scale

    def logits(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        """Gives the whole logits of normed hidden states; for few rows only."""
        raw = functional.linear(hidden, self.lm_head_weight, self.lm_head_bias)
        return cap_logits(raw * self.logit_scale, self.final_logit_softcapping)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "TargetHead":
        """Gives the same head in another place or type; tied weights stay one tensor."""
        embed_weight = self.embed_weight.to(device, dtype)
        tied = self.lm_head_weight is self.embed_weight
        return TargetHead(
            config=self.config,
            embed_weight=embed_weight,
            lm_head_weight=embed_weight if tied else self.lm_head_weight.to(device, dtype),
            lm_head_bias=None if self.lm_head_bias is None else self.lm_head_bias.to(device, dtype),
            embedding_scale=self.embedding_scale,
            logit_scale=self.logit_scale,
            final_logit_softcapping=self.final_logit_softcapping,
            tokenizer_size=self.tokenizer_size,
            mask_token_id=self.mask_token_id,
            eos_token_ids=self.eos_token_ids,
        )


def cap_logits(logits: Tensor, softcap: float | None) -> Tensor:
    """Squashes logits smoothly into (-softcap, softcap), as Gemma does; None changes nothing."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def load_target_head(store: HasHeadFiles) -> TargetHead:
    """Reads the head from a store, in its original type, on the CPU.

    Raises:
        ValueError: a file of the head lacks a part.
    """
    facts = json.loads(store.head_path(FACTS_FILE).read_text(encoding="utf-8"))
    weights_path = store.head_path(WEIGHTS_FILE)
    weights = load_file(weights_path)
    names = ["embed_tokens.weight"] + ([] if facts["tied"] else ["lm_head.weight"])
    missing = [name for name in names if name not in weights]
    if missing:
        raise ValueError(f"{weights_path} lacks {', '.join(missing)}; extract the head again")
    embed_weight = weights["embed_tokens.weight"]
    return TargetHead(
        config=facts["config"],
        embed_weight=embed_weight,
        lm_head_weight=embed_weight if facts["tied"] else weights["lm_head.weight"],
        lm_head_bias=weights.get("lm_head.bias"),
        embedding_scale=facts["embedding_scale"],
        logit_scale=facts["logit_scale"],
        final_logit_softcapping=facts["final_logit_softcapping"],
        tokenizer_size=facts["tokenizer_size"],
        mask_token_id=facts["mask_token_id"],
        eos_token_ids=tuple(facts["eos_token_ids"]),
    )
