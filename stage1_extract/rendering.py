"""Rendering: messages by the chat template, and which of its tokens are the assistant's.

The mask comes from the template's own `{% generation %}` markers where it has them, else from a
prefix method: the conversation rendered up to an assistant turn, with the generation prompt, must
be a prefix of the whole rendering, in text and in tokens; so must the rendering that ends with the
turn. What cannot prove itself this way is never supervised. A tool call is supervised as the
template writes it.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from stage1_extract.conversations import Conversation
from stage1_extract.problems import UnusableConversationError
from stage1_extract.tool_calls import names_called, spellings, without_calls

_GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


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

    def tokens(spelled: list[dict[str, Any]]) -> list[int]:
        return _tokens(
            spelled,
            tokenizer,
            template_arguments,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
        )

    first_error: Exception | None = None
    for spelled in spellings(messages):
        try:
            token_ids = tokens(spelled)
            if _names_every_call(messages, token_ids, tokenizer, tokens):
                return token_ids
        except Exception as error:  # A template raises whatever it likes.
            first_error = first_error or error
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


def _names_every_call(
    messages: Sequence[Mapping[str, Any]],
    token_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    tokens: Callable[[list[dict[str, Any]]], list[int]],
) -> bool:
    """Whether some tokens name each called function more often than without the calls.

    A description of the tools, or the user, may name it, too.
    """
    names = names_called(messages)
    if not names:
        return True
    text = tokenizer.decode(list(token_ids))
    try:
        silent = tokenizer.decode(tokens(without_calls(messages)))
    except Exception:  # A template may refuse a tool's answer without its call.
        silent = ""
    return all(text.count(name) > silent.count(name) for name in names)


def _missing_calls(
    messages: Sequence[Mapping[str, Any]],
    token_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
) -> list[str]:
    """Functions that messages call and that the text of some tokens does not name."""
    names = names_called(messages)
    text = tokenizer.decode(list(token_ids)) if names else ""
    return [name for name in names if name not in text]


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
                raise unusable_conversation(
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
        raise unusable_conversation(
            conversation, "template leaves a tool call out", f"of {missing[0]!r}"
        )


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


def unusable_conversation(
    conversation: Conversation, reason: str, detail: str = ""
) -> UnusableConversationError:
    """The error of a conversation that cannot be used, with its file, line and id."""
    return UnusableConversationError(
        reason, source=f"{conversation.source} (id {conversation.id})", detail=detail
    )


def _template_problem(conversation: Conversation, error: Exception) -> UnusableConversationError:
    message = " ".join(str(error).split()) or type(error).__name__
    return unusable_conversation(conversation, "chat template refuses it", message)
