"""Sequences: a conversation as token ids and the mask of what the target answers for.

The mask covers the assistant's tokens and the token that ends its turn; `rendering` finds them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Int32
from numpy import ndarray
from transformers import PreTrainedTokenizerBase

from stage1_extract.conversations import Conversation
from stage1_extract.problems import TOO_LONG, UnusableConversationError
from stage1_extract.rendering import render_with_mask, unusable_conversation

MASK_RULE_VERSION = 2
"""Part of a store's identity: raise it whenever the same conversation would give another mask."""


@dataclass(frozen=True, kw_only=True)
class TokenSequence:
    """One conversation as tokens."""

    id: str
    token_ids: Int32[ndarray, "tokens"]
    loss_mask: Bool[ndarray, "tokens"]
    """True where the token is the assistant's: content and the end of its turn."""
    greedy: bool
    """Whether every supervised token is this target's own greedy choice."""
    is_truncated: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence."""
        return len(self.token_ids)


def to_sequence(
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    *,
    template_arguments: Mapping[str, Any] | None = None,
    max_sequence_tokens: int | None = None,
    long_conversations: Literal["truncate", "skip"] = "truncate",
    vocab_size: int | None = None,
    target_weights: str | None = None,
) -> TokenSequence:
    """Turns a conversation into tokens and their loss mask.

    Tokens after the last supervised one are dropped: nothing can learn from them or look back at
    them. An answer that `regenerate` recorded is cut where the target stopped writing, so that an
    answer broken off at the length limit does not teach an end that was never produced.

    Args:
        conversation: Messages or tokens.
        tokenizer: The target's tokenizer, with its chat template.
        template_arguments: Extra arguments of the chat template.
        max_sequence_tokens: Longest sequence, in tokens; None is no limit.
        long_conversations: Whether a longer one is cut or refused.
        vocab_size: Token ids must lie below; None checks nothing.
        target_weights: Short id of the target's weights (`weights_id`); recorded answers count as
            greedy only when the same weights wrote them.

    Raises:
        UnusableConversationError: No part of it can be supervised, or it is too long to keep.
    """
    if conversation.token_ids is not None and conversation.loss_mask is not None:
        _refuse_tokens_of_another(conversation, tokenizer, template_arguments or {})
        token_ids, loss_mask = list(conversation.token_ids), list(conversation.loss_mask)
    else:
        token_ids, loss_mask = render_with_mask(conversation, tokenizer, template_arguments or {})
    num_written = recorded_length(conversation.generation, token_ids)
    if num_written is not None:
        token_ids, loss_mask = token_ids[:num_written], loss_mask[:num_written]
    if vocab_size is not None and token_ids and max(token_ids) >= vocab_size:
        detail = f"{max(token_ids)}, the target's vocabulary has {vocab_size}"
        raise unusable_conversation(conversation, "token id outside the vocabulary", detail)
    is_truncated = max_sequence_tokens is not None and len(token_ids) > max_sequence_tokens
    if is_truncated and long_conversations == "skip":
        detail = f"{len(token_ids)} tokens, the limit is {max_sequence_tokens}"
        raise UnusableConversationError(
            TOO_LONG,
            source=f"{conversation.source} (id {conversation.id})",
            detail=detail,
        )
    num_kept = _end_of_last_true(loss_mask[:max_sequence_tokens])
    mask = np.array(loss_mask[:num_kept], dtype=np.bool_)
    if not (mask[:-1] & mask[1:]).any():
        raise unusable_conversation(
            conversation, "no supervised pair of tokens", f"{len(token_ids)} tokens"
        )
    return TokenSequence(
        id=conversation.id,
        token_ids=np.array(token_ids[:num_kept], dtype=np.int32),
        loss_mask=mask,
        greedy=num_written is not None and is_greedy(conversation.generation, target_weights),
        is_truncated=is_truncated,
    )


def _refuse_tokens_of_another(
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    template_arguments: Mapping[str, Any],
) -> None:
    """Raises UnusableConversationError for tokens that `regenerate` recorded of something else.

    Messages are rendered anew for any target; tokens are what one target saw in one template.
    """
    generation = conversation.generation or {}
    if "tokenizer_size" not in generation:
        return
    if generation["tokenizer_size"] != len(tokenizer):
        detail = f"of {generation['tokenizer_size']} tokens, the target's has {len(tokenizer)}"
        raise unusable_conversation(conversation, "tokens of another tokenizer", detail)
    given = generation.get("template_arguments", {})
    if given != template_arguments:
        detail = f"{given}, this run has {dict(template_arguments)}"
        raise unusable_conversation(
            conversation, "tokens written with other template arguments", detail
        )


def recorded_length(generation: Mapping[str, Any] | None, token_ids: Sequence[int]) -> int | None:
    """Tokens up to where the target stopped writing, if these are the tokens it wrote.

    `regenerate` records their number and hash; with another template, tokenizer or thinking mode
    the tokens differ and nothing is known (None).
    """
    if generation is None or not isinstance(generation.get("num_tokens"), int):
        return None
    num_tokens: int = generation["num_tokens"]
    if len(token_ids) < num_tokens:
        return None
    return num_tokens if tokens_id(token_ids[:num_tokens]) == generation.get("tokens") else None


def is_greedy(generation: Mapping[str, Any] | None, target_weights: str | None) -> bool:
    """Whether recorded answers are the greedy choice of the target with these weights."""
    if generation is None or target_weights is None:
        return False
    return generation.get("greedy") is True and generation.get("target_weights") == target_weights


def tokens_id(token_ids: Sequence[int]) -> str:
    """A short hash that stands for a run of tokens."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<i4").tobytes()).hexdigest()[:16]


def _end_of_last_true(mask: Sequence[bool]) -> int:
    return next((end for end in range(len(mask), 0, -1) if mask[end - 1]), 0)
