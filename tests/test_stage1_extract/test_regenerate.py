"""Regenerate: answers are the target's own, recorded truly, resumable at any point."""

import copy
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stage1_extract import answering
from stage1_extract import regenerate as module
from stage1_extract.config import DataConfig, RegenerateConfig, TargetConfig
from stage1_extract.conversations import parse_conversation, read_conversations
from stage1_extract.decode_attention import DecodeUnsupportedError
from stage1_extract.dialogues import start_dialogue
from stage1_extract.problems import UnusableConversationError
from stage1_extract.regenerate import answered_ids, append_lines, regenerate
from stage1_extract.sequences import to_sequence
from stage1_extract.target import load_target
from stage1_extract.target_identity import weights_id

Regenerate = Callable[..., list[dict[str, Any]]]
PROMPTS = [{"id": f"p{index}", "prompt": "hello " * (1 + index)} for index in range(5)]


@pytest.fixture
def answers(
    tmp_path: Path, target_folder: Callable[..., Path], write_jsonl: Callable[..., Path]
) -> Regenerate:
    """Runs `regenerate` and gives the lines of its output."""

    def run(*records: Any, template: str = "chatml", **settings: Any) -> list[dict[str, Any]]:
        prompts = write_jsonl(*(records or PROMPTS), name="prompts.jsonl")
        output = tmp_path / "out" / "answers.jsonl"
        target = TargetConfig(model=str(target_folder("llama", template)), dtype="float32")
        data = DataConfig(
            conversations=(), template_arguments=settings.pop("template_arguments", {})
        )
        config = {"prompts": (str(prompts),), "max_new_tokens": 6, "batch_size": 2} | settings
        assert regenerate(target, data, RegenerateConfig(**config), output_path=output)
        return [json.loads(line) for line in output.read_text().splitlines()]

    return run


@torch.inference_mode()
def greedy_answer(target: Any, prompt_ids: list[int], num_tokens: int) -> list[int]:
    """Plain greedy decoding of one prompt, without a cache."""
    token_ids = list(prompt_ids)
    for _ in range(num_tokens):
        logits = target.model(torch.tensor([token_ids])).logits[0, -1]
        token_ids.append(int(logits.argmax()))
        if token_ids[-1] == 261:
            break
    return token_ids[len(prompt_ids) :]


@pytest.mark.parametrize("shares_slots", [True, False])
def test_batched_answers_are_plain_greedy_decoding(
    answers: Regenerate,
    target_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    shares_slots: bool,
) -> None:
    monkeypatch.setattr(answering, "can_share_slots", lambda _: shares_slots)
    lines = answers()
    target: Any = load_target(
        TargetConfig(model=str(target_folder("llama", "chatml")), dtype="float32")
    )
    assert {line["id"] for line in lines} == {prompt["id"] for prompt in PROMPTS}
    for line in lines:
        prompt_ids = target.tokenizer.apply_chat_template(
            line["messages"][:1], add_generation_prompt=True, return_dict=False
        )
        expected = greedy_answer(target, prompt_ids, 6)
        text_ids = expected[:-1] if expected[-1] == 261 else expected
        assert line["messages"][1]["content"] == target.tokenizer.decode(text_ids)


def test_greedy_lines_become_sequences_that_end_with_the_answer(
    answers: Regenerate, tmp_path: Path, target_folder: Callable[..., Path]
) -> None:
    """Sequence = prompt + what was generated, token for token, also when the limit cut it."""
    folder = target_folder("llama", "chatml")
    lines = answers(max_new_tokens=3)
    target: Any = load_target(TargetConfig(model=str(folder), dtype="float32"))
    greedy = [line for line in lines if line["generation"]["greedy"]]
    assert greedy, "a tiny random model writes broken UTF-8 now and then, but not always"
    for line in greedy:
        conversation = parse_conversation(json.dumps(line).encode(), source="x")
        sequence = to_sequence(conversation, target.tokenizer, target_weights=weights_id(folder))
        prompt_ids = target.tokenizer.apply_chat_template(
            line["messages"][:1], add_generation_prompt=True, return_dict=False
        )
        written = greedy_answer(target, prompt_ids, 3)
        assert sequence.greedy
        assert sequence.token_ids.tolist() == prompt_ids + written
        assert sequence.loss_mask.tolist() == [False] * len(prompt_ids) + [True] * len(written)
        assert line["generation"]["num_tokens"] == sequence.num_tokens


def test_an_answer_that_does_not_come_back_is_not_greedy(
    answers: Regenerate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two line breaks written as two tokens come back as one: the walk must not trust them."""
    line_break = 198
    monkeypatch.setattr(answering, "can_share_slots", lambda _: False)
    monkeypatch.setattr(
        answering.Generator,
        "answer",
        lambda self, prompts: [[65, line_break, line_break]] * len(prompts),
    )
    for line in answers():
        assert not line["generation"]["greedy"]
        assert "num_tokens" not in line["generation"]


def test_what_a_template_cannot_render_is_kept_as_the_tokens_it_was(
    answers: Regenerate, target_folder: Callable[..., Path]
) -> None:
    """A template that drops thoughts: the sequence is prompt and answer all the same."""
    folder = target_folder("llama", "dropped_thoughts")
    target: Any = load_target(TargetConfig(model=str(folder), dtype="float32"))
    other = copy.deepcopy(target.tokenizer)
    other.add_tokens(["one more"])
    for line in answers(template="dropped_thoughts"):
        conversation = parse_conversation(json.dumps(line).encode(), source="x")
        sequence = to_sequence(conversation, target.tokenizer, target_weights=weights_id(folder))
        prompt_ids = target.tokenizer.apply_chat_template(
            line["messages"][:1], add_generation_prompt=True, return_dict=False
        )
        written = greedy_answer(target, prompt_ids, 6)
        assert sequence.token_ids.tolist() == prompt_ids + written
        assert sequence.loss_mask.tolist() == [False] * len(prompt_ids) + [True] * len(written)
        assert sequence.greedy
        with pytest.raises(UnusableConversationError, match="tokens of another tokenizer: of 271"):
            to_sequence(conversation, other)
        with pytest.raises(UnusableConversationError, match="with other template arguments"):
            to_sequence(conversation, target.tokenizer, template_arguments={"think": False})


def test_an_answer_that_merges_with_its_prompt_is_kept_as_the_tokens_it_was(
    answers: Regenerate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its line break would form one token with the header's, which the target never saw."""
    line_break = 198
    monkeypatch.setattr(answering, "can_share_slots", lambda _: False)
    answer = [line_break, 65]
    monkeypatch.setattr(
        answering.Generator, "answer", lambda self, prompts: [answer] * len(prompts)
    )
    for line in answers():
        assert line["token_ids"][-2:] == answer
        assert sum(line["loss_mask"]) == 2
        assert line["generation"]["greedy"]


def test_of_several_turns_that_cannot_be_rendered_the_last_is_kept(
    answers: Regenerate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "can_share_slots", lambda _: False)
    answer = [65, 66, 261]
    monkeypatch.setattr(
        answering.Generator, "answer", lambda self, prompts: [answer] * len(prompts)
    )
    turns = [{"role": "user", "content": "hello"}, {"role": "user", "content": "and?"}]
    (line,) = answers({"id": "two", "messages": turns}, template="dropped_thoughts")
    assert [message["role"] for message in line["messages"]] == ["user", "assistant"] * 2
    num_given = len(line["token_ids"]) - len(answer)
    assert line["token_ids"][num_given:] == answer
    assert line["loss_mask"] == [0] * num_given + [1] * len(answer)


def test_sampled_answers_are_not_greedy_and_say_how_they_were_made(answers: Regenerate) -> None:
    for line in answers(temperature=1.0, top_p=0.9, seed=3):
        generation = line["generation"]
        assert not generation["greedy"]
        assert (generation["temperature"], generation["top_p"], generation["seed"]) == (1.0, 0.9, 3)


def test_sampling_is_reproducible(answers: Regenerate, tmp_path: Path) -> None:
    first = answers(temperature=1.0, seed=3)
    (tmp_path / "out" / "answers.jsonl").unlink()
    assert answers(temperature=1.0, seed=3) == first
    (tmp_path / "out" / "answers.jsonl").unlink()
    assert answers(temperature=1.0, seed=4) != first


def test_sampled_answers_do_not_depend_on_what_is_answered_beside_them(
    answers: Regenerate, tmp_path: Path
) -> None:
    output = tmp_path / "out" / "answers.jsonl"
    lines = answers(temperature=1.0, top_p=0.9, batch_size=4)
    output.unlink()
    alone = answers(temperature=1.0, top_p=0.9, batch_size=1)
    assert sorted(alone, key=str) == sorted(lines, key=str)
    content = output.read_bytes()
    output.write_bytes(content[: len(content) // 2])
    assert sorted(answers(temperature=1.0, top_p=0.9, batch_size=4), key=str) == sorted(
        lines, key=str
    )


@pytest.mark.parametrize("shares_slots", [True, False])
def test_too_little_memory_halves_what_runs_at_once(
    answers: Regenerate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    shares_slots: bool,
) -> None:
    monkeypatch.setattr(answering, "can_share_slots", lambda _: shares_slots)
    expected = answers(batch_size=1)
    (tmp_path / "out" / "answers.jsonl").unlink()
    kind = answering.Slots if shares_slots else answering.BatchedAnswers
    right = kind.step

    def small_memory(self: Any) -> Any:
        if self.num_running > 2:
            raise torch.cuda.OutOfMemoryError
        return right(self)

    monkeypatch.setattr(kind, "step", small_memory)
    assert sorted(answers(batch_size=5), key=str) == sorted(expected, key=str)
    assert "out of memory: 2 answers at once" in capsys.readouterr().err
    monkeypatch.setattr(kind, "step", lambda self: _raise(torch.cuda.OutOfMemoryError()))
    (tmp_path / "out" / "answers.jsonl").unlink()
    with pytest.raises(torch.cuda.OutOfMemoryError):
        answers(batch_size=2)


def test_a_target_that_the_first_prompts_show_unfit_for_replay_is_answered_step_by_step(
    answers: Regenerate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = answers()
    (tmp_path / "out" / "answers.jsonl").unlink()
    right = answering.answers_of
    asked = []

    def replayed_first(*arguments: Any, may_replay: bool, **others: Any) -> Any:
        asked.append(may_replay)
        found = right(*arguments, may_replay=may_replay, **others)
        if may_replay:
            error = DecodeUnsupportedError("logits differ")
            monkeypatch.setattr(found, "start", lambda _: _raise(error))
        return found

    monkeypatch.setattr(answering, "answers_of", replayed_first)
    assert sorted(answers(), key=str) == sorted(expected, key=str)
    assert asked == [True, False]
    assert "answers are written step by step: logits differ" in capsys.readouterr().err


@pytest.mark.parametrize("batch_size", [None, 64])
def test_there_are_no_more_slots_than_prompts(
    answers: Regenerate, monkeypatch: pytest.MonkeyPatch, batch_size: int | None
) -> None:
    right = answering.answers_of
    sizes = []

    def noted(*arguments: Any, **settings: Any) -> Any:
        found = right(*arguments, **settings)
        sizes.append(found.num_slots)
        return found

    monkeypatch.setattr(answering, "answers_of", noted)
    answers(batch_size=batch_size)
    assert sizes == [len(PROMPTS)]


def _raise(error: BaseException) -> None:
    raise error


def test_a_stop_writes_what_is_finished_and_says_how_to_go_on(
    tmp_path: Path,
    target_folder: Callable[..., Path],
    write_jsonl: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "answers.jsonl"
    right, asked = module._lines, []

    def stopped(*arguments: Any) -> Any:
        if not asked:
            asked.append(None)
            os.kill(os.getpid(), signal.SIGINT)
        return right(*arguments)

    def run() -> bool:
        return regenerate(
            TargetConfig(model=str(target_folder("llama")), dtype="float32"),
            DataConfig(conversations=()),
            RegenerateConfig(
                prompts=(str(write_jsonl(*PROMPTS, name="p.jsonl")),),
                max_new_tokens=6,
                batch_size=2,
            ),
            output_path=output,
        )

    with monkeypatch.context() as patch:
        patch.setattr(module, "_lines", stopped)
        assert not run()
    num_lines = len(output.read_text().splitlines())
    assert 0 < num_lines < len(PROMPTS)
    assert f"stopped with {len(PROMPTS) - num_lines} prompts left; run the same" in (
        capsys.readouterr().err
    )
    assert run()
    assert len(output.read_text().splitlines()) == len(PROMPTS)


def test_a_finished_output_is_left_alone(
    answers: Regenerate, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = answers()

    def must_not_load(*_: Any, **__: Any) -> None:
        raise AssertionError("loaded for nothing")

    monkeypatch.setattr(answering, "load_target", must_not_load)
    assert answers() == lines
    assert "holds all 5 conversations" in capsys.readouterr().out


@pytest.mark.parametrize("cut", [1, 40, 10_000])
def test_resumed_equals_uninterrupted(answers: Regenerate, tmp_path: Path, cut: int) -> None:
    """The output is cut anywhere, as a crash may leave it; greedy answers are the same again."""
    output = tmp_path / "out" / "answers.jsonl"
    lines = answers()
    content = output.read_bytes()
    output.write_bytes(content[: max(0, len(content) - cut)])
    resumed = answers()
    assert sorted(resumed, key=str) == sorted(lines, key=str)


def test_another_run_s_output_is_refused(answers: Regenerate) -> None:
    answers()
    with pytest.raises(ValueError, match=r"answers.jsonl:1 was made with another max_new_tokens"):
        answers(max_new_tokens=7)


def test_a_file_of_something_else_is_refused(answers: Regenerate, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "answers.jsonl").write_text('{"prompt": "mine"}\n')
    with pytest.raises(ValueError, match="was not written by regenerate"):
        answers()
    assert (tmp_path / "out" / "answers.jsonl").read_text() == '{"prompt": "mine"}\n'


def talk(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {
        "id": "t",
        "messages": [
            {"role": roles[index % 2], "content": turn} for index, turn in enumerate(turns)
        ],
    }


def test_every_turn_is_answered_anew(answers: Regenerate, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [[65, 66, 261], [67, 261]])
    (line,) = answers(talk("one", "old", "two", "old"))
    assert [each["content"] for each in line["messages"]] == ["one", "bc", "two", "d"]
    assert line["generation"]["greedy"]


def test_only_the_last_answer_if_asked(
    answers: Regenerate, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [[65, 66, 261]])
    (line,) = answers(talk("one", "old", "two", "old"), turns="last")
    assert [each["content"] for each in line["messages"]] == ["one", "old", "two", "bc"]
    # The first answer is supervised too, and not this target's.
    assert not line["generation"]["greedy"]


def test_a_dialogue_ends_with_an_answer_that_was_cut(
    answers: Regenerate, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [[65, 66]])
    (line,) = answers(talk("one", "old", "two", "old"))
    assert [each["content"] for each in line["messages"]] == ["one", "bc"]
    assert line["generation"]["finish"] == "length"


def test_an_empty_answer_is_skipped(
    answers: Regenerate, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(monkeypatch, [[261], [65, 261]])
    (line,) = answers({"id": "e", "prompt": "a"}, {"id": "f", "prompt": "a"})
    assert line["id"] == "f"
    assert "1 x empty answer" in capsys.readouterr().err


def test_when_no_prompt_can_be_answered_the_run_fails(
    answers: Regenerate, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [[261]])
    with pytest.raises(ValueError, match=r"none of 1 prompts could be answered; the first is .*e"):
        answers({"id": "e", "prompt": "a"})


def scripted(monkeypatch: pytest.MonkeyPatch, script: list[list[int]]) -> None:
    """Lets the target write what a test says, answer by answer."""
    rest = iter(script)
    monkeypatch.setattr(answering, "can_share_slots", lambda _: False)
    monkeypatch.setattr(
        answering.Generator, "answer", lambda self, prompts: [list(next(rest)) for _ in prompts]
    )


def test_a_prompt_too_long_is_skipped(
    answers: Regenerate, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = answers({"id": "long", "prompt": "x" * 600}, *PROMPTS)
    assert len(lines) == len(PROMPTS)
    assert "1 x prompt too long for the target" in capsys.readouterr().err


def test_template_arguments_shape_prompt_and_record(answers: Regenerate) -> None:
    lines = answers(template="thinking", template_arguments={"enable_thinking": False})
    assert lines[0]["generation"]["template_arguments"] == {"enable_thinking": False}


def test_the_output_is_read_as_conversations(answers: Regenerate, tmp_path: Path) -> None:
    lines = answers()
    conversations = read_conversations([tmp_path / "out" / "answers.jsonl"])
    assert conversations.ids == [line["id"] for line in lines]


def test_no_prompts_is_an_error(answers: Regenerate) -> None:
    with pytest.raises(ValueError, match=r"regenerate\.prompts is empty"):
        answers(prompts=())


@pytest.mark.parametrize(
    ("record", "turns", "reason"),
    [
        ({"token_ids": [1], "loss_mask": [1]}, "every", "no messages"),
        ({"messages": [{"role": "system", "content": "a"}]}, "every", "nothing to answer"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "last", "nothing to answer"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "every", "tool messages"),
    ],
)
def test_what_asks_for_no_answer_is_named(record: dict[str, Any], turns: str, reason: str) -> None:
    text = json.dumps(record).encode()
    conversation = parse_conversation(text, source="x:1", needs_answer=False)
    with pytest.raises(UnusableConversationError, match=reason):
        start_dialogue(conversation, turns=turns)


def test_lines_survive_odd_text(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lines.jsonl"
    append_lines(path, [{"a": "line\u2028break \U0001f600"}])
    append_lines(path, [{"a": "\n"}])
    assert [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] == [
        {"a": "line\u2028break \U0001f600"},
        {"a": "\n"},
    ]


def test_a_foreign_file_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    for number, content in enumerate((b'{"a": 1}', b'{"id": "x"}\n{"b"', b"text\nmore")):
        path = tmp_path / f"foreign-{number}.jsonl"
        path.write_bytes(content)
        with pytest.raises(ValueError, match="was not written by regenerate"):
            answered_ids(path, {"temperature": 0.0})
        assert path.read_bytes() == content
