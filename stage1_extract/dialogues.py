"""Dialogues: conversations that the target is answering, and how an answered one is recorded."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from stage1_extract.conversations import Conversation
from stage1_extract.problems import UnusableConversationError
from stage1_extract.rendering import is_prefix, render
from stage1_extract.sequences import tokens_id
from stage1_extract.tool_calls import calls_of


@dataclass(kw_only=True)
class Dialogue:
    """A conversation that the target is answering turn by turn."""

    id: str
    source: str
    turns: list[list[dict[str, Any]]]
    """Given messages before each answer to come."""
    tools: list[dict[str, Any]] | None = None
    has_given_answers: bool = False
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation so far, answers included."""
    prompt_ids: list[int] = field(default_factory=list)
    """What the target answers next."""
    num_answers: int = 0
    """Answers written so far."""
    written: list[list[int]] = field(default_factory=list)
    """Prompt and answer tokens of each answer, as the target saw and wrote them; fewer than the
    answers where a server does not tell."""
    num_new_tokens: int = 0
    """Tokens of all answers together."""
    was_cut: bool = False
    """Whether an answer ended at the length limit; later turns are then not asked."""
    calls_a_tool: bool = False
    """Whether the last answer calls a tool: nobody answers the call, so it ends the dialogue."""

    @property
    def is_finished(self) -> bool:
        """Whether there is nothing more to ask."""
        return self.was_cut or self.calls_a_tool or self.num_answers == len(self.turns)

    def add_answer(self, message: dict[str, Any], *, num_tokens: int, was_cut: bool) -> None:
        """Adds the target's answer to the turn that was open."""
        self.messages.append(message)
        self.num_new_tokens += num_tokens
        self.num_answers += 1
        self.was_cut = was_cut
        self.calls_a_tool = bool(calls_of(message))


def start_dialogue(conversation: Conversation, *, turns: str) -> Dialogue:
    """The given messages of a conversation, parted where the target is to answer.

    Raises:
        UnusableConversationError: Nothing in it asks for an answer.
    """

    def unusable(reason: str, detail: str = "") -> UnusableConversationError:
        return UnusableConversationError(reason, source=conversation.source, detail=detail)

    if conversation.messages is None:
        raise unusable("no messages", "pre-tokenised conversations cannot be answered")
    messages = [dict(message) for message in conversation.messages]
    if turns == "last":
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        parts = [messages[: answers[-1]] if answers else messages]
    else:
        if any(message["role"] == "tool" for message in messages):
            raise unusable(
                "tool messages", "they need their answers: set regenerate.turns = 'last'"
            )
        parts = _parts_ending_with_user(messages)
    if not parts or not parts[0] or parts[-1][-1]["role"] == "assistant":
        raise unusable("nothing to answer", "no user message stands before an answer")
    return Dialogue(
        id=conversation.id,
        source=conversation.source,
        turns=parts,
        tools=[dict(tool) for tool in conversation.tools] if conversation.tools else None,
        has_given_answers=any(each["role"] == "assistant" for part in parts for each in part),
    )


def render_prompt(
    dialogue: Dialogue,
    tokenizer: PreTrainedTokenizerBase,
    template_arguments: Mapping[str, Any],
) -> None:
    """Adds the next given messages and sets the tokens that the target is to go on from.

    Raises:
        UnusableConversationError: The chat template refuses the messages.
    """
    dialogue.messages += dialogue.turns[dialogue.num_answers]
    try:
        dialogue.prompt_ids = render(
            dialogue.messages,
            tokenizer,
            template_arguments,
            tools=dialogue.tools,
            add_generation_prompt=True,
        )
    except Exception as error:  # A template raises whatever it likes.
        raise UnusableConversationError(
            "chat template refuses it", source=dialogue.source, detail=str(error)
        ) from error


def record(
    dialogue: Dialogue,
    tokenizer: PreTrainedTokenizerBase,
    template_arguments: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """The JSON line of an answered dialogue.

    `num_tokens` and `tokens` (a hash) are recorded when the conversation, rendered anew, begins
    with exactly the tokens that the target saw and wrote, for every answer. `extract` then ends the
    sequence there: an answer broken off at the limit gets no end of turn that nobody produced.
    `greedy` holds only then, with greedy decoding, and when no given answer stands in between.

    Some templates of reasoning targets drop or move what the target wrote, so that no rendering
    holds it. Such a line also has `token_ids` and `loss_mask`, of the last answer and its prompt as
    they were; `extract` takes these.

    Raises:
        UnusableConversationError: An answer is empty, or the chat template refuses it.
    """
    for message in _answers(dialogue):
        if not (message["content"] or "").strip() and not calls_of(message):
            raise UnusableConversationError("empty answer", source=dialogue.source)
    try:
        rendered = render(dialogue.messages, tokenizer, template_arguments, tools=dialogue.tools)
    except Exception as error:  # A template raises whatever it likes.
        raise UnusableConversationError(
            "chat template refuses it", source=dialogue.source, detail=str(error)
        ) from error
    is_exact = len(dialogue.written) == dialogue.num_answers and all(
        is_prefix(written, rendered) for written in dialogue.written
    )
    generation = dict(settings)
    generation["finish"] = "length" if dialogue.was_cut else "stop"
    generation["greedy"] = (
        is_exact and settings["temperature"] == 0.0 and not dialogue.has_given_answers
    )
    line: dict[str, Any] = {"id": dialogue.id, "messages": dialogue.messages}
    if dialogue.tools:
        line["tools"] = dialogue.tools
    is_known = len(dialogue.written) == dialogue.num_answers > 0
    is_rewritten = is_known and not is_prefix(dialogue.prompt_ids, rendered)
    if is_rewritten:
        written = dialogue.written[-1]
        num_given = len(dialogue.prompt_ids)
        mask = [0] * num_given + [1] * (len(written) - num_given)
        line |= {"token_ids": written, "loss_mask": mask}
        generation["greedy"] = settings["temperature"] == 0.0
        generation["tokenizer_size"] = len(tokenizer)
    if is_exact or is_rewritten:
        written = dialogue.written[-1]
        generation |= {"num_tokens": len(written), "tokens": tokens_id(written)}
    return line | {"generation": generation}


def _parts_ending_with_user(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Given messages without answers, a new part after each user message; a tail is dropped."""
    parts: list[list[dict[str, Any]]] = []
    part: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            continue
        part.append(message)
        if message["role"] == "user":
            parts.append(part)
            part = []
    return parts


def _answers(dialogue: Dialogue) -> list[dict[str, Any]]:
    """The answers just written, without those that were given."""
    answers = [message for message in dialogue.messages if message["role"] == "assistant"]
    return answers[-dialogue.num_answers :]
