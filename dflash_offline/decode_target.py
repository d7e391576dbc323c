"""The target as decoding needs it: cached passes over rows of different length, with rollback."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from dflash_offline.caches import DecodingCache, attention_masks, unsupported_kinds
from stage1_extract.decoder import capture, find_decoder
from storage.schema import LM_HEAD_INPUT, layer_name

# Largest relative difference between a cached pass and a plain one that rounding explains.
_PARITY_TOLERANCE = 1e-3
_PARITY_TOLERANCE_HALF = 0.15
_MASKED_ATTENTION = ("sdpa", "eager")


@dataclass(frozen=True, kw_only=True)
class TargetPass:
    """What one pass of the target gives."""

    logits: Float[Tensor, "batch kept vocab"]
    states: Float[Tensor, "batch queries features"] | None
    """Hidden states of the asked layers side by side; None when no layer was asked for."""
    positions: Int[Tensor, "batch queries"]
    slots: Int[Tensor, "batch queries"]
    """Cache slot of each token: its position, or the last slot for padding."""


class TargetDecoder:
    """A target with the caches of one batch of requests.

    Attributes:
        must_replay: the target has linear-attention layers: one request at a time, and accepted
            tokens pass twice, because their state cannot be cut back to a shorter prefix.
    """

    def __init__(self, model: PreTrainedModel, *, layer_ids: Sequence[int] = ()) -> None:
        """Prepare a transformers model.

        Args:
            model: a causal language model.
            layer_ids: decoder layers whose output is the drafter's context, 0-based.

        Raises:
            ValueError: the target's caches cannot be rolled back after a rejection.
        """
        self.model = model.eval()
        self.layer_ids = tuple(layer_ids)
        self.layer_names = [layer_name(layer_id) for layer_id in layer_ids]
        self.decoder = find_decoder(model)
        self.config = model.config.get_text_config()
        unknown = unsupported_kinds(self.config)
        if unknown:
            raise ValueError(
                f"target {self.config.model_type}: no rule to decode through {', '.join(unknown)} "
                "layers; use the walk, which needs no target"
            )
        if self.config._attn_implementation not in _MASKED_ATTENTION:
            model.set_attn_implementation("sdpa")
        parameters = inspect.signature(model.forward).parameters
        # transformers 5.2x renames the argument; the old name warns, the new one is unknown before.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.cache: DecodingCache | None = None
        self.must_replay = DecodingCache(self.config, num_slots=1).must_replay

    @property
    def device(self) -> torch.device:
        """Where the target's first weight lies."""
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The target's arithmetic type."""
        dtype: torch.dtype = next(self.model.parameters()).dtype
        return dtype

    def prefill(self, prompts: Sequence[Sequence[int]], *, num_slots: int) -> TargetPass:
        """Take in the prompts with fresh caches; the logits are those after each last token.

        Prompts are padded on the left, so that they end together; padding goes into a slot of its
        own, past every position.
        """
        if self.must_replay and len(prompts) > 1:
            raise ValueError("a target with linear-attention layers decodes one prompt at a time")
        longest = max(map(len, prompts))
        token_ids = torch.zeros((len(prompts), longest), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            token_ids[row, longest - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
        padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=self.device)
        positions = torch.arange(longest, device=self.device) - padding[:, None]
        self.cache = DecodingCache(self.config, num_slots=num_slots + 1)
        return self._forward(
            token_ids.to(self.device),
            positions=positions.clamp(min=0),
            slots=torch.where(positions >= 0, positions, num_slots),
            num_visible=longest,
            last_logits_only=True,
        )

    def verify(
        self,
        token_ids: Int[Tensor, "batch queries"],
        positions: Int[Tensor, "batch queries"],
        *,
        num_visible: int,
    ) -> TargetPass:
        """Pass one block of every row through the target; no position reaches `num_visible`."""
        assert self.cache is not None
        if self.must_replay:
            self.cache.keep_states()
        return self._forward(
            token_ids, positions=positions, slots=positions, num_visible=num_visible
        )

    def keep_tokens(
        self,
        token_ids: Int[Tensor, "batch queries"],
        positions: Int[Tensor, "batch queries"],
        num_kept: int,
    ) -> None:
        """Roll the caches back to the first tokens of the block just verified.

        Attention layers need nothing: the slots of dropped tokens are hidden until overwritten.
        Linear-attention layers go back to their state before the block and take the kept tokens in
        again.
        """
        if not self.must_replay or num_kept == token_ids.shape[1]:
            return
        assert self.cache is not None
        self.cache.restore_states()
        kept = positions[:, :num_kept]
        self._forward(
            token_ids[:, :num_kept],
            positions=kept,
            slots=kept,
            # One row: what it sees ends with its own last token.
            num_visible=int(kept[0, -1]) + 1,
            last_logits_only=True,
        )

    def keep_rows(self, rows: Int[Tensor, "kept"]) -> None:
        """Drop all other rows of the batch."""
        assert self.cache is not None
        self.cache.keep_rows(rows)

    def _forward(
        self,
        token_ids: Int[Tensor, "batch queries"],
        *,
        positions: Int[Tensor, "batch queries"],
        slots: Int[Tensor, "batch queries"],
        num_visible: int,
        last_logits_only: bool = False,
    ) -> TargetPass:
        assert self.cache is not None
        self.cache.place(slots, num_visible=num_visible)
        masks = attention_masks(self.config, positions, num_visible=num_visible, dtype=self.dtype)
        # With the last norm among the captured, the pass goes on to the logits.
        with capture(self.decoder, [*self.layer_names, LM_HEAD_INPUT]) as captured:
            output = self.model(
                input_ids=token_ids,
                position_ids=positions,
                attention_mask=masks,
                use_cache=True,
                logits_to_keep=1 if last_logits_only else 0,
                **{self._cache_argument: self.cache},
            )
        states = [captured[name] for name in self.layer_names]
        return TargetPass(
            logits=output.logits,
            states=torch.cat(states, dim=-1) if states else None,
            positions=positions,
            slots=slots,
        )


@torch.inference_mode()
def check_cached_passes(
    target: TargetDecoder, *, num_tokens: int = 24, block_size: int = 6
) -> None:
    """Refuse a target whose cached, rolled-back passes differ from a plain pass.

    Reads a fixed row of tokens once plainly, once in pieces with a wrong block rolled back between
    them, and compares the logits. Models ignore caches or masks in ways that nothing else shows.

    Raises:
        ValueError: the two disagree by more than rounding.
    """
    vocab_size = target.config.vocab_size
    row = (torch.arange(1, num_tokens + 1, device=target.device) * 7919) % vocab_size
    plain = target.model(input_ids=row[None], use_cache=False).logits[0]

    first = num_tokens - 2 * block_size
    num_slots = num_tokens + block_size
    target.prefill([row[:first].tolist()], num_slots=num_slots)
    rejected = row[first : first + block_size].clone()
    rejected[2:] = (rejected[2:] + 1) % vocab_size
    pieces = []
    for start, tokens, num_kept in (
        (first, rejected, 2),
        (first + 2, row[first + 2 : first + 2 + block_size], block_size),
        (first + 2 + block_size, row[first + 2 + block_size :], block_size - 2),
    ):
        positions = torch.arange(start, start + len(tokens), device=target.device)[None]
        seen = target.verify(tokens[None], positions, num_visible=start + len(tokens))
        pieces.append(seen.logits[0, :num_kept])
        target.keep_tokens(tokens[None], positions, num_kept)
    target.cache = None
    difference = (torch.cat(pieces) - plain[first:]).float()
    relative = (difference.norm() / plain[first:].float().norm()).item()
    is_half = torch.finfo(target.dtype).bits < 32
    bound = _PARITY_TOLERANCE_HALF if is_half else _PARITY_TOLERANCE
    if not relative <= bound:
        raise ValueError(
            f"target {target.config.model_type}: passes through the cache differ from a plain pass "
            f"by {relative:.1e} (at most {bound:.0e} is rounding); decoding with it would not be "
            "lossless: use another transformers version or attention setting"
        )
