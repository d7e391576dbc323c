"""What shape a drafter has: everything its `config.json` says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stage2_train.config import DrafterConfig

FULL, SLIDING = "full_attention", "sliding_attention"
# Scaling keys of the official package that only some targets need, with their neutral values.
_NEUTRAL_SCALES = {
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
}


@dataclass(frozen=True, kw_only=True)
class AttentionRule:
    """What one draft layer lets a block's query see beside the mask of the context."""

    is_causal: bool = False
    """A query sees only block tokens at its own offset or before."""
    sliding_window: int | None = None
    """A query sees only keys less than this many positions away; None sees all."""


@dataclass(frozen=True, kw_only=True)
class DrafterArchitecture:
    """Shape of a drafter, complete: with its weights nothing else is needed to draft."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    vocab_size: int
    rope_parameters: Mapping[str, Any]
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    is_causal: bool | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    def __post_init__(self) -> None:
        """Refuses shapes that cannot be a drafter."""
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}"
                " rows; name a row of the target's embedding"
            )
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers, num_hidden_layers is "
                f"{self.num_hidden_layers}; give one type for each layer"
            )
        unknown = sorted(set(self.layer_types) - {FULL, SLIDING})
        if unknown:
            raise ValueError(f"unknown layer types {unknown}; expected {FULL} or {SLIDING}")
        if SLIDING in self.layer_types and self.sliding_window is None:
            raise ValueError("a sliding_attention layer needs sliding_window, in tokens")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; RoPE rotates pairs of channels")
        if not self.target_layer_ids:
            raise ValueError("target_layer_ids is empty; a drafter reads at least one target layer")
        outside = [i for i in self.target_layer_ids if not 0 <= i < self.num_target_layers]
        if outside:
            raise ValueError(
                f"target_layer_ids {outside} lie outside 0..{self.num_target_layers - 1}, "
                "the target's decoder layers"
            )

    @property
    def attention_rules(self) -> tuple[AttentionRule, ...]:
        """Rule of each layer; sliding layers are causal unless `is_causal` says otherwise."""
        return tuple(
            AttentionRule(
                is_causal=(kind == SLIDING) if self.is_causal is None else self.is_causal,
                sliding_window=self.sliding_window if kind == SLIDING else None,
            )
            for kind in self.layer_types
        )

    def to_config(self) -> dict[str, Any]:
        """Gives the official `config.json`, readable by `dflash`, vLLM and SGLang."""
        rope = dict(self.rope_parameters)
        scaling = None if rope["rope_type"] == "default" else rope
        dflash_config: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
        }
        for key, neutral in _NEUTRAL_SCALES.items():
            if getattr(self, key) != neutral:
                dflash_config[key] = getattr(self, key)
        config = {
            "architectures": ["DFlashDraftModel"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "block_size": self.block_size,
            "dflash_config": dflash_config,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "layer_types": list(self.layer_types),
            "max_position_embeddings": self.max_position_embeddings,
            "max_window_layers": self.num_hidden_layers,
            "model_type": "qwen3",
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "num_target_layers": self.num_target_layers,
            "rms_norm_eps": self.rms_norm_eps,
            # Engines on transformers 4 read the two older keys, those on 5 the first.
            "rope_parameters": rope,
            "rope_scaling": scaling,
            "rope_theta": rope["rope_theta"],
            "sliding_window": self.sliding_window,
            "tie_word_embeddings": False,
            "use_cache": True,
            "use_sliding_window": SLIDING in self.layer_types,
            "vocab_size": self.vocab_size,
        }
        if self.is_causal is not None:
            config["is_causal"] = self.is_causal
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "DrafterArchitecture":
        """Reads an official `config.json`, ours or z-lab's.

        Raises:
            ValueError: a key is missing, or the drafter is of a kind we do not build.
        """
        if config.get("attention_bias"):
            raise ValueError("attention_bias is true; drafters with biases are not supported")
        if "DFlash2DraftModel" in (config.get("architectures") or ()):
            raise ValueError("this is a DFlash 2 drafter; only DFlash 1 drafters are supported")
        special = {**config, **(config.get("dflash_config") or {})}
        try:
            num_layers = config["num_hidden_layers"]
            num_heads = config["num_attention_heads"]
            return cls(
                hidden_size=config["hidden_size"],
                num_hidden_layers=num_layers,
                num_attention_heads=num_heads,
                num_key_value_heads=config.get("num_key_value_heads") or num_heads,
                head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
                intermediate_size=config["intermediate_size"],
                rms_norm_eps=config["rms_norm_eps"],
                vocab_size=config["vocab_size"],
                rope_parameters=read_rope_parameters(config),
                max_position_embeddings=config["max_position_embeddings"],
                block_size=special.get("block_size", 16),
                mask_token_id=special["mask_token_id"],
                target_layer_ids=tuple(
                    special.get("target_layer_ids")
                    or default_target_layer_ids(num_layers, config["num_target_layers"])
                ),
                num_target_layers=config["num_target_layers"],
                layer_types=tuple(config.get("layer_types") or (FULL,) * num_layers),
                sliding_window=config.get("sliding_window"),
                is_causal=config.get("is_causal"),
                input_embedding_scale=special.get("input_embedding_scale", 1.0),
                output_multiplier=special.get("output_multiplier", 1.0),
                final_logit_softcapping=special.get("final_logit_softcapping"),
            )
        except KeyError as error:
            raise ValueError(f"the drafter's config has no {error.args[0]!r}") from error


def default_target_layer_ids(num_draft_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """Spreads as many layer ids as draft layers over the target, as the official package does."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return tuple(round(1 + index * step) for index in range(num_draft_layers))


def read_rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Gives a model's RoPE settings in the form a drafter uses.

    A target with one RoPE for each layer type (Gemma 3) lends the one of its full-attention
    layers. Partial and multi-axis rotary keys are dropped: the official drafter rotates whole
    heads along one axis.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if FULL in rope:
        rope = rope[FULL]
    kept = {
        key: value
        for key, value in rope.items()
        if key != "partial_rotary_factor" and not key.startswith("mrope") and key != "type"
    }
    kept.setdefault("rope_type", rope.get("type", "default"))
    if kept["rope_type"] == "mrope":
        kept["rope_type"] = "default"
    kept.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    return kept


def layer_types(num_layers: int, sliding_layers: Sequence[int]) -> tuple[str, ...]:
    """Names the attention type of each draft layer.

    Raises:
        ValueError: a sliding layer is not one of the drafter's.
    """
    outside = [i for i in sliding_layers if not 0 <= i < num_layers]
    if outside:
        raise ValueError(f"sliding_layers {outside} lie outside the {num_layers} draft layers")
    return tuple(SLIDING if i in sliding_layers else FULL for i in range(num_layers))


def resolve_architecture(
    drafter: DrafterConfig,
    *,
    target_config: Mapping[str, Any],
    vocab_size: int,
    num_target_layers: int,
    stored_layer_ids: Sequence[int],
    mask_token_id: int | None,
    scales: Mapping[str, float | None],
) -> DrafterArchitecture:
    """Fills what the run file leaves open with the target's own shape.

    Args:
        drafter: the drafter's table of the run file.
        target_config: the target's text configuration.
        vocab_size: rows of the target's embedding.
        num_target_layers: decoder layers of the target.
        stored_layer_ids: layers that the store holds.
        mask_token_id: token the target can spare for masked positions, if it has one.
        scales: `input_embedding_scale`, `output_multiplier` and `final_logit_softcapping`.

    Raises:
        ValueError: a setting does not fit the target or the store.
    """
    layer_ids = drafter.target_layer_ids
    if layer_ids is None:
        layer_ids = tuple(sorted(stored_layer_ids))
    if len(set(layer_ids)) < len(layer_ids):
        raise ValueError(
            f"drafter {drafter.name}: target_layer_ids names a layer twice: {list(layer_ids)}"
        )
    missing = [i for i in layer_ids if i not in stored_layer_ids]
    if missing:
        raise ValueError(
            f"drafter {drafter.name}: target_layer_ids {missing} are not in the store, which holds "
            f"{sorted(stored_layer_ids)}; name stored layers or add these to the store"
        )
    mask_token_id = mask_token_id if drafter.mask_token_id is None else drafter.mask_token_id
    if mask_token_id is None:
        raise ValueError(
            f"drafter {drafter.name}: the target has neither an unused embedding row nor a mask "
            "token; set mask_token_id to a token that never occurs in answers"
        )
    hidden_size = target_config["hidden_size"]
    num_heads = drafter.num_attention_heads or target_config["num_attention_heads"]
    num_kv_heads = drafter.num_key_value_heads or min(
        num_heads, target_config.get("num_key_value_heads") or num_heads
    )
    target_head_dim = target_config.get("head_dim") or (
        hidden_size // target_config["num_attention_heads"]
    )
    try:
        return DrafterArchitecture(
            hidden_size=hidden_size,
            num_hidden_layers=drafter.num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=drafter.head_dim or target_head_dim,
            intermediate_size=(
                drafter.intermediate_size
                or target_config.get("intermediate_size")
                or 4 * hidden_size
            ),
            rms_norm_eps=target_config.get("rms_norm_eps") or 1e-6,
            vocab_size=vocab_size,
            rope_parameters=read_rope_parameters(target_config),
            max_position_embeddings=target_config["max_position_embeddings"],
            block_size=drafter.block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=layer_ids,
            num_target_layers=num_target_layers,
            layer_types=layer_types(drafter.num_layers, drafter.sliding_layers),
            sliding_window=drafter.sliding_window if drafter.sliding_layers else None,
            **scales,  # type: ignore[arg-type]
        )
    except ValueError as error:
        raise ValueError(f"drafter {drafter.name}: {error}") from error
