"""Sequences: a conversation as token ids and the mask of what the target answers for.

The mask covers the assistant's tokens and the token that ends its turn. It comes from the chat
template's own `{% generation %}` markers where it has them, else from a prefix method: the
conversation rendered up to an assistant turn, with the generation prompt, must be a prefix of the
whole rendering, in text and in tokens; so must the rendering that ends with the turn. What cannot
prove itself this way is never supervised. A tool call is supervised as the template writes it.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Int32
from numpy import ndarray
from transformers import PreTrainedTokenizerBase

from stage1_extract.conversations import Conversation
from stage1_extract.problems import TOO_LONG, UnusableConversationError
from stage1_extract.tool_calls import names_called, spellings

MASK_RULE_VERSION = 2
"""Part of a store's identity: raise it whenever the same conversation would give another mask."""

_GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


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
        token_ids, loss_mask = list(conversation.token_ids), list(conversation.loss_mask)
    else:
        token_ids, loss_mask = render_with_mask(conversation, tokenizer, template_arguments or {})
    num_written = recorded_length(conversation.generation, token_ids)
    if num_written is not None:
        token_ids, loss_mask = token_ids[:num_written], loss_mask[:num_written]
    if vocab_size is not None and token_ids and max(token_ids) >= vocab_size:
        detail = f"{max(token_ids)}, the target's vocabulary has {vocab_size}"
        raise _unusable(conversation, "token id outside the vocabulary", detail)
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
        raise _unusable(conversation, "no supervised pair of tokens", f"{len(token_ids)} tokens")
    return TokenSequence(
        id=conversation.id,
        token_ids=np.array(token_ids[:num_kept], dtype=np.int32),
        loss_mask=mask,
        greedy=num_written is not None and is_greedy(conversation.generation, target_weights),
        is_truncated=is_truncated,
    )


def render_with_mask(
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    template_arguments: Mapping[str, Any],
) -> tuple[list[int], list[bool]]:
    """Token ids and loss mask of a conversation's messages by the chat template.

    Tool calls are handed to the template in the first spelling that it writes down whole.

    Raises:
        UnusableConversationError: The template refuses the conversation, leaves a tool call out, or
            no assistant turn proves where it stands.
        ValueError: There is no template.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template, so messages cannot"
            " be rendered; give token_ids with loss_mask, or a target with a template"
        )
    has_markers = _GENERATION_MARKER.search(_chosen_template(tokenizer))
    mask_by = _mask_by_markers if has_markers else _mask_by_prefixes
    first_problem: UnusableConversationError | None = None
    for messages in spellings(conversation.messages or ()):
        try:
            return mask_by(conversation, messages, tokenizer, template_arguments)
        except UnusableConversationError as problem:
            first_problem = first_problem or problem
    assert first_problem is not None
    raise first_problem


def render(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    template_arguments: Mapping[str, Any],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
) -> list[int]:
    """Token ids of messages in the chat template; the template alone places special tokens.

    Tool calls are written as `render_with_mask` would write them.

    Raises:
        Exception: What the template raises.
    """
    first_error: Exception | None = None
    for spelled in spellings(messages):
        try:
            token_ids = _tokens(
                spelled,
                tokenizer,
                template_arguments,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # A template raises whatever it likes.
            first_error = first_error or error
        else:
            if not _missing_calls(messages, token_ids, tokenizer):
                return token_ids
    raise first_error or ValueError("the template leaves a tool call out")


def _tokens(
    messages: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    template_arguments: Mapping[str, Any],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool = False,
) -> list[int]:
    text = tokenizer.apply_chat_template(
        list(messages),
        tools=[dict(tool) for tool in tools] if tools else None,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        **template_arguments,
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _missing_calls(
    messages: Sequence[Mapping[str, Any]],
    token_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
) -> list[str]:
    """Functions that messages call and that the text of some tokens does not name."""
    names = names_called(messages)
    text = tokenizer.decode(list(token_ids)) if names else ""
    return [name for name in names if name not in text]


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


def chat_template_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the chat template that renders conversations; of nothing where there is none."""
    template = _chosen_template(tokenizer) if tokenizer.chat_template else ""
    return hashlib.sha256(template.encode()).hexdigest()


def _chosen_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The template text; of several named ones the default, as transformers chooses."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        return str(template.get("default", next(iter(template.values()))))
    return str(template)


def _mask_by_markers(
    conversation: Conversation,
    messages: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    template_arguments: Mapping[str, Any],
) -> tuple[list[int], list[bool]]:
    try:
        encoded = tokenizer.apply_chat_template(
            list(messages),
            tools=_tools(conversation),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **template_arguments,
        )
    except Exception as error:  # A template raises whatever it likes.
        raise _template_problem(conversation, error) from error
    token_ids = list(encoded["input_ids"])
    loss_mask = [bool(each) for each in encoded["assistant_masks"]]
    supervised = [token for token, is_kept in zip(token_ids, loss_mask, strict=True) if is_kept]
    _refuse_missing_calls(conversation, messages, supervised, tokenizer)
    return token_ids, loss_mask


def _mask_by_prefixes(
    conversation: Conversation,
    messages: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    template_arguments: Mapping[str, Any],
) -> tuple[list[int], list[bool]]:
    special_ids = special_token_ids(tokenizer)

    def tokens(num_messages: int, *, add_generation_prompt: bool = False) -> list[int]:
        return _tokens(
            messages[:num_messages],
            tokenizer,
            template_arguments,
            tools=conversation.tools,
            add_generation_prompt=add_generation_prompt,
        )

    try:
        token_ids = tokens(len(messages))
        loss_mask = [False] * len(token_ids)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for index in turns:
            prompt = tokens(index, add_generation_prompt=True)
            answered = _without_template_tail(
                tokens(index + 1), len(prompt), special_ids, tokenizer
            )
            if is_prefix(prompt, answered) and is_prefix(answered, token_ids):
                answer = answered[len(prompt) :]
                _refuse_missing_calls(conversation, [messages[index]], answer, tokenizer)
                loss_mask[len(prompt) : len(answered)] = [True] * len(answer)
            elif index == turns[-1]:
                raise _unusable(
                    conversation,
                    "template rewrites the answer",
                    "rendered without it, the conversation is no prefix of the whole",
                )
    except UnusableConversationError:
        raise
    except Exception as error:  # A template raises whatever it likes.
        raise _template_problem(conversation, error) from error
    return token_ids, loss_mask


def _refuse_missing_calls(
    conversation: Conversation,
    messages: Sequence[Mapping[str, Any]],
    supervised: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Raises UnusableConversationError when a tool call is not among the supervised tokens."""
    missing = _missing_calls(messages, supervised, tokenizer)
    if missing:
        raise _unusable(conversation, "template leaves a tool call out", f"of {missing[0]!r}")


def is_prefix(start: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether a run of tokens begins with another."""
    return len(start) <= len(whole) and list(whole[: len(start)]) == list(start)


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of all control tokens, among them every end of a turn."""
    added = tokenizer.added_tokens_decoder.items()
    special = (token_id for token_id, token in added if token.special)
    return frozenset(special) | frozenset(tokenizer.all_special_ids)


def _without_template_tail(
    token_ids: list[int],
    start: int,
    special_ids: frozenset[int],
    tokenizer: PreTrainedTokenizerBase,
) -> list[int]:
    """Cuts the white space that the template sets after the token that ends the turn."""
    for end in range(len(token_ids), start, -1):
        if token_ids[end - 1] in special_ids:
            is_white_space = not tokenizer.decode(token_ids[end:]).strip()
            return token_ids[:end] if is_white_space else token_ids
    return token_ids


def _tools(conversation: Conversation) -> list[dict[str, Any]] | None:
    return [dict(tool) for tool in conversation.tools] if conversation.tools else None


def _end_of_last_true(mask: Sequence[bool]) -> int:
    return next((end for end in range(len(mask), 0, -1) if mask[end - 1]), 0)


def _unusable(
    conversation: Conversation, reason: str, detail: str = ""
) -> UnusableConversationError:
    return UnusableConversationError(
        reason, source=f"{conversation.source} (id {conversation.id})", detail=detail
    )


def _template_problem(conversation: Conversation, error: Exception) -> UnusableConversationError:
    message = " ".join(str(error).split()) or type(error).__name__
    return _unusable(conversation, "chat template refuses it", message)
