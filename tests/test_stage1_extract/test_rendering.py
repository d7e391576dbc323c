"""Loss masks: golden cases of template families, tool calls, and what is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from stage1_extract.conversations import Conversation
from stage1_extract.problems import UnusableConversationError
from stage1_extract.rendering import render
from stage1_extract.sequences import TokenSequence, to_sequence

MakeTokenizer = Callable[[str | None], PreTrainedTokenizerFast]


def conversation(*turns: str, **other: Any) -> Conversation:
    """Turns that alternate between user and assistant, the first one the user's."""
    messages = tuple(
        {"role": "assistant" if index % 2 else "user", "content": turn}
        for index, turn in enumerate(turns)
    )
    return Conversation(id="c", source="data.jsonl:1", messages=messages, **other)


def marked(sequence: TokenSequence, tokenizer: PreTrainedTokenizerFast) -> str:
    """The text of a sequence with what is supervised in brackets."""
    text, was_supervised = "", False
    for token_id, is_supervised in zip(sequence.token_ids, sequence.loss_mask, strict=True):
        if is_supervised != was_supervised:
            text += "[" if is_supervised else "]"
        text += tokenizer.decode([int(token_id)])
        was_supervised = bool(is_supervised)
    return text + ("]" if was_supervised else "")


GOLDEN = [
    (
        "chatml",
        ("hello", "hi", "and?", "bye"),
        {},
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n[hi<|im_end|>]\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n[bye<|im_end|>]",
    ),
    (
        "chatml_with_markers",
        ("hello", "hi", "and?", "bye"),
        {},
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n[hi<|im_end|>]\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n[bye<|im_end|>]",
    ),
    (
        "llama3",
        ("hello", " hi ", "and?", "bye"),
        {},
        "<bos><|start_header_id|>user<|end_header_id|>\n\nhello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[hi<|eot_id|>]"
        "<|start_header_id|>user<|end_header_id|>\n\nand?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[bye<|eot_id|>]",
    ),
    (
        "gemma",
        ("hello", "hi", "and?", "bye"),
        {},
        "<bos><start_of_turn>user\nhello<end_of_turn>\n<start_of_turn>model\n[hi<end_of_turn>]\n"
        "<start_of_turn>user\nand?<end_of_turn>\n<start_of_turn>model\n[bye<end_of_turn>]",
    ),
    # A thought is the target's own writing; with thinking off its empty frame is the prompt's.
    (
        "thinking",
        ("hello", "<think>\nwell\n</think>\n\nhi"),
        {},
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        "[<think>\nwell\n</think>\n\nhi<|im_end|>]",
    ),
    (
        "thinking",
        ("hello", "hi"),
        {"enable_thinking": False},
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n[hi<|im_end|>]",
    ),
    # The template takes the frame out of an earlier answer: it is not what the target wrote.
    (
        "thinking",
        ("hello", "hi", "and?", "bye"),
        {"enable_thinking": False},
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n[bye<|im_end|>]",
    ),
    (
        "instructions",
        ("hello", "hi", "and?", "bye"),
        {},
        "<bos>(INST) hello (/INST)[ hi<|im_end|>](INST) and? (/INST)[ bye<|im_end|>]",
    ),
    # Earlier answers end with another token than the target wrote: only the last one proves itself.
    (
        "channels",
        ("hello", "hi", "and?", "bye"),
        {},
        "<|im_start|>user<|end_header_id|>hello<|im_end|>"
        "<|im_start|>assistant<|start_header_id|>final<|end_header_id|>hi<|im_end|>"
        "<|im_start|>user<|end_header_id|>and?<|im_end|>"
        "<|im_start|>assistant[<|start_header_id|>final<|end_header_id|>bye<|eot_id|>]",
    ),
]


@pytest.mark.parametrize(("template", "turns", "arguments", "expected"), GOLDEN)
def test_golden_masks(
    make_tokenizer: MakeTokenizer,
    template: str,
    turns: tuple[str, ...],
    arguments: dict[str, Any],
    expected: str,
) -> None:
    tokenizer = make_tokenizer(template)
    sequence = to_sequence(conversation(*turns), tokenizer, template_arguments=arguments)
    assert marked(sequence, tokenizer) == expected


def call(arguments: Any, *, content: str | None = None) -> dict[str, Any]:
    function = {"name": "clock", "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"type": "function", "function": function}],
    }


ZONE = {"zone": "UTC"}
CALLED = "<|im_start|>user\nwhen?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("arguments", [ZONE, '{"zone": "UTC"}'], ids=["object", "text"])
@pytest.mark.parametrize("template", ["tools", "tools_as_text"])
def test_a_tool_call_is_supervised_as_the_template_writes_it(
    make_tokenizer: MakeTokenizer, template: str, arguments: Any, content: str | None
) -> None:
    """However the call came, each template gets the spelling that it can write."""
    tokenizer = make_tokenizer(template)
    messages = ({"role": "user", "content": "when?"}, call(arguments, content=content))
    sequence = to_sequence(Conversation(id="c", source="x:1", messages=messages), tokenizer)
    expected = CALLED + '[<call>clock {"zone": "UTC"}</call><|im_end|>]'
    assert marked(sequence, tokenizer) == expected


def test_a_tools_answer_is_not_supervised(make_tokenizer: MakeTokenizer) -> None:
    messages = (
        {"role": "user", "content": "when?"},
        call(ZONE, content="wait"),
        {"role": "tool", "content": "noon"},
        {"role": "assistant", "content": "noon it is"},
    )
    tools = ({"name": "clock"},)
    tokenizer = make_tokenizer("tools")
    sequence = to_sequence(
        Conversation(id="c", source="x:1", messages=messages, tools=tools), tokenizer
    )
    assert marked(sequence, tokenizer) == (
        "tool clock\n"
        + CALLED
        + '[wait\n<call>clock {"zone": "UTC"}</call><|im_end|>]\n'
        + "<|im_start|>tool\nnoon<|im_end|>\n<|im_start|>assistant\n[noon it is<|im_end|>]"
    )


def test_a_prompt_holds_its_calls_although_the_tools_are_named_before(
    make_tokenizer: MakeTokenizer,
) -> None:
    """The first spelling leaves the call out, and yet its function's name is in the text."""
    tokenizer = make_tokenizer("tools_as_text")
    listed = "{%- for tool in tools -%}{{ 'tool ' + tool['name'] }}{%- endfor -%}"
    tokenizer.chat_template = listed + str(tokenizer.chat_template)
    messages = [{"role": "user", "content": "clock?"}, call(ZONE)]
    token_ids = render(messages, tokenizer, {}, tools=[{"name": "clock"}])
    assert '<call>clock {"zone": "UTC"}</call>' in tokenizer.decode(token_ids)


def test_a_template_that_refuses_silence_still_writes_calls(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer("tools")
    refusal = "{%- if not messages[1].get('tool_calls') -%}{{ raise_exception('no') }}{%- endif -%}"
    tokenizer.chat_template = refusal + str(tokenizer.chat_template)
    messages = [{"role": "user", "content": "when?"}, call(ZONE)]
    assert "<call>clock" in tokenizer.decode(render(messages, tokenizer, {}))


@pytest.mark.parametrize("template", ["chatml", "chatml_with_markers"])
def test_a_template_that_knows_no_tools_is_found_out(
    make_tokenizer: MakeTokenizer, template: str
) -> None:
    """Else the target would be taught to say nothing."""
    messages = ({"role": "user", "content": "when?"}, call(ZONE))
    with pytest.raises(UnusableConversationError) as raised:
        to_sequence(Conversation(id="c", source="x:1", messages=messages), make_tokenizer(template))
    assert raised.value.reason == "template leaves a tool call out"
    assert "'clock'" in str(raised.value)


def test_markers_and_prefixes_give_the_same_mask(make_tokenizer: MakeTokenizer) -> None:
    turns = ("hello\n", "hi all\n\n", "[x]", "bye")
    by_markers = to_sequence(conversation(*turns), make_tokenizer("chatml_with_markers"))
    by_prefixes = to_sequence(conversation(*turns), make_tokenizer("chatml"))
    assert by_markers.token_ids.tolist() == by_prefixes.token_ids.tolist()
    assert by_markers.loss_mask.tolist() == by_prefixes.loss_mask.tolist()


def test_the_supervised_tokens_follow_the_generation_prompt(make_tokenizer: MakeTokenizer) -> None:
    """What is supervised begins where the target begins to write, token for token."""
    tokenizer = make_tokenizer("chatml")
    sequence = to_sequence(conversation("hello", "hi"), tokenizer)
    prompt = render(
        [{"role": "user", "content": "hello"}], tokenizer, {}, add_generation_prompt=True
    )
    first = int(np.argmax(sequence.loss_mask))
    assert sequence.token_ids[:first].tolist() == prompt


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_shifted_mask_would_be_noticed(make_tokenizer: MakeTokenizer, shift: int) -> None:
    tokenizer = make_tokenizer("chatml")
    sequence = to_sequence(conversation("hello", "hi", "and?", "bye"), tokenizer)
    shifted = TokenSequence(
        id="c",
        token_ids=sequence.token_ids,
        loss_mask=np.roll(sequence.loss_mask, shift),
        greedy=False,
    )
    assert marked(shifted, tokenizer) != GOLDEN[0][3]


def test_an_answer_that_merges_with_the_prompt_is_refused(make_tokenizer: MakeTokenizer) -> None:
    """The answer's line break would form one token with the header's: the target never saw that."""
    with pytest.raises(UnusableConversationError, match="template rewrites the answer"):
        to_sequence(conversation("hello", "\nhi"), make_tokenizer("chatml"))


@pytest.mark.parametrize("answer", ["hi", "well\n</think>\n\nhi"])
def test_an_answer_without_its_thought_is_refused(
    make_tokenizer: MakeTokenizer, answer: str
) -> None:
    """The target was asked to think, and nothing of that is left: it never wrote this."""
    with pytest.raises(UnusableConversationError, match="template rewrites the answer"):
        to_sequence(conversation("hello", answer), make_tokenizer("dropped_thoughts"))


def test_what_the_template_refuses_is_named(make_tokenizer: MakeTokenizer) -> None:
    messages = ({"role": "assistant", "content": "x"}, {"role": "user", "content": "y"})
    refused = Conversation(id="7", source="data.jsonl:3", messages=messages)
    with pytest.raises(UnusableConversationError) as raised:
        to_sequence(refused, make_tokenizer("gemma"))
    assert str(raised.value).startswith("data.jsonl:3 (id 7): chat template refuses it")


def test_messages_need_a_chat_template(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        to_sequence(conversation("hello", "hi"), make_tokenizer(None))
