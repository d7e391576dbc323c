"""Answers from an OpenAI-compatible server: exact where it tells tokens, patient, resumable."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from stage1_extract import server as module
from stage1_extract.config import DataConfig, RegenerateConfig, TargetConfig
from stage1_extract.regenerate import regenerate
from stage1_extract.target_files import load_tokenizer

Answers = Callable[..., list[dict[str, Any]]]
PROMPTS = [{"id": f"p{index}", "prompt": f"hello {index}"} for index in range(6)]


@dataclass
class FakeServer:
    """An OpenAI-compatible server that says what it is told to."""

    url: str = ""
    models: list[str] = field(default_factory=lambda: ["the-target"])
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    """Status codes of the next replies."""
    text: str = "hi all"
    finish_reason: str = "stop"
    tokens: Callable[[list[dict[str, Any]]], tuple[list[int], list[int]]] | None = None
    """Prompt and answer tokens for given messages."""

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        choice: dict[str, Any] = {"message": message, "finish_reason": self.finish_reason}
        reply = {"choices": [choice], "usage": {"completion_tokens": 3}}
        if self.tokens is not None and body.get("return_token_ids"):
            reply["prompt_token_ids"], choice["token_ids"] = self.tokens(body["messages"])
        return reply


@pytest.fixture
def fake_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    """Runs a fake server on a free port; pauses between tries take no time."""
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    fake = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send({"data": [{"id": name} for name in fake.models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.requests.append(body)
            fake.keys.append(self.headers.get("Authorization"))
            if fake.failures:
                self.send({"error": "no\nnot now"}, fake.failures.pop(0))
            else:
                self.send(fake.reply(body))

        def send(self, content: dict[str, Any], status: int = 200) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    fake.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    yield fake
    http.shutdown()
    thread.join()
    http.server_close()


@pytest.fixture
def answers(
    fake_server: FakeServer,
    tmp_path: Path,
    target_folder: Callable[..., Path],
    write_jsonl: Callable[..., Path],
) -> Answers:
    """Runs `regenerate` against the fake server and gives the lines of its output."""

    def run(
        *records: Any, server: dict[str, Any] | None = None, **settings: Any
    ) -> list[dict[str, Any]]:
        prompts = write_jsonl(*(records or PROMPTS), name="prompts.jsonl")
        output = tmp_path / "answers.jsonl"
        arguments = settings.pop("template_arguments", {})
        template = settings.pop("template", "chatml")
        config = RegenerateConfig.model_validate(
            {
                "prompts": (str(prompts),),
                "max_new_tokens": 6,
                "server": {"url": fake_server.url, "num_requests": 3, **(server or {})},
                **settings,
            }
        )
        regenerate(
            TargetConfig(model=str(target_folder("llama", template))),
            DataConfig(conversations=(), template_arguments=arguments),
            config,
            output_path=output,
        )
        return [json.loads(line) for line in output.read_text().splitlines()]

    return run


def test_every_prompt_is_answered_once(fake_server: FakeServer, answers: Answers) -> None:
    lines = answers()
    assert sorted(line["id"] for line in lines) == [prompt["id"] for prompt in PROMPTS]
    assert all(line["messages"][-1]["content"] == "hi all" for line in lines)
    assert len(fake_server.requests) == len(PROMPTS)
    assert answers() == lines
    assert len(fake_server.requests) == len(PROMPTS)


def test_the_request_says_how_to_answer(fake_server: FakeServer, answers: Answers) -> None:
    (line,) = answers(
        PROMPTS[0], temperature=0.7, top_p=0.9, seed=5, template_arguments={"enable_thinking": True}
    )
    (request,) = fake_server.requests
    assert request == {
        "model": "the-target",
        "messages": [{"role": "user", "content": "hello 0"}],
        "max_tokens": 6,
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 5,
        "chat_template_kwargs": {"enable_thinking": True},
        "return_token_ids": True,
    }
    generation = line["generation"]
    assert (generation["temperature"], generation["top_p"], generation["seed"]) == (0.7, 0.9, 5)
    assert generation["template_arguments"] == {"enable_thinking": True}


def test_without_token_ids_an_answer_is_not_exact(answers: Answers) -> None:
    (line,) = answers(PROMPTS[0])
    assert not line["generation"]["greedy"]
    assert "num_tokens" not in line["generation"]


def test_token_ids_that_come_back_make_it_exact(
    fake_server: FakeServer, answers: Answers, target_folder: Callable[..., Path]
) -> None:
    tokenizer = load_tokenizer(TargetConfig(model=str(target_folder("llama"))))

    def tokens(messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        return prompt, [*tokenizer("hi all").input_ids, 261]

    fake_server.tokens = tokens
    (line,) = answers(PROMPTS[0])
    assert line["generation"]["greedy"]
    prompt_ids, answer_ids = tokens(line["messages"][:1])
    assert line["generation"]["num_tokens"] == len(prompt_ids) + len(answer_ids)


def test_all_turns_are_answered(fake_server: FakeServer, answers: Answers) -> None:
    talk = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    (line,) = answers({"id": "t", "messages": talk})
    assert [each["content"] for each in line["messages"]] == ["one", "hi all", "two", "hi all"]
    assert len(fake_server.requests) == 2


def test_an_answer_cut_at_the_limit_ends_the_dialogue(
    fake_server: FakeServer, answers: Answers
) -> None:
    fake_server.finish_reason = "length"
    talk = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    (line,) = answers({"id": "t", "messages": talk})
    assert len(line["messages"]) == 2
    assert line["generation"]["finish"] == "length"


def test_a_busy_server_is_asked_again(fake_server: FakeServer, answers: Answers) -> None:
    fake_server.failures = [503, 429, 500]
    assert len(answers()) == len(PROMPTS)
    assert len(fake_server.requests) == len(PROMPTS) + 3


def test_what_the_server_refuses_is_skipped(
    fake_server: FakeServer, answers: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_server.failures = [400]
    assert len(answers()) == len(PROMPTS) - 1
    assert "1 x refused by the server" in capsys.readouterr().err


def test_a_server_that_refuses_everything_is_a_failure(
    fake_server: FakeServer, answers: Answers
) -> None:
    fake_server.failures = [400] * len(PROMPTS)
    with pytest.raises(ValueError, match=r"none of 6 prompts could be answered; .* refused"):
        answers()


def test_so_many_requests_are_in_flight_and_never_more(
    fake_server: FakeServer, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests wait for each other: fewer at once would wait for ever."""
    together, right, counts = threading.Barrier(3, timeout=60), fake_server.reply, []
    running, lock = [0], threading.Lock()

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        with lock:
            running[0] += 1
            counts.append(running[0])
        together.wait()
        with lock:
            running[0] -= 1
        return right(body)

    monkeypatch.setattr(fake_server, "reply", reply)
    assert len(answers(server={"num_requests": 3})) == len(PROMPTS)
    assert max(counts) == 3


def test_a_stop_waits_for_what_is_in_flight_and_asks_for_no_more(
    fake_server: FakeServer,
    answers: Answers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right, asked = fake_server.reply, []

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        if not asked:
            asked.append(None)
            os.kill(os.getpid(), signal.SIGTERM)
        return right(body)

    monkeypatch.setattr(fake_server, "reply", reply)
    first = answers(server={"num_requests": 2})
    assert 1 <= len(first) <= 3
    assert len(fake_server.requests) == len(first)
    assert "run the same command again" in capsys.readouterr().err
    assert len(answers()) == len(PROMPTS)
    assert len(fake_server.requests) == len(PROMPTS)


def test_pauses_grow_are_spread_and_follow_the_server() -> None:
    for attempt in range(12):
        longest = min(2.0**attempt, 60.0)
        pauses = [module.pause_s(attempt, asked_s=0.0) for _ in range(50)]
        assert longest / 2 <= min(pauses) < max(pauses) <= longest
    assert module.pause_s(0, asked_s=30.0) == 30.0
    assert module.pause_s(0, asked_s=10_000.0) == 60.0


def test_a_server_that_is_gone_is_one_clear_line_and_nothing_is_lost(
    fake_server: FakeServer, answers: Answers
) -> None:
    done = answers(*PROMPTS[:2])
    fake_server.failures = [503] * 100
    with pytest.raises(ValueError, match=r"regenerate\.server\.url: no answer from .* 3 tries"):
        answers(server={"num_retries": 2})
    fake_server.failures = []
    lines = answers()
    assert len(lines) == len(PROMPTS)
    assert lines[:2] == done


def test_no_server_at_all_is_one_clear_line(answers: Answers) -> None:
    with pytest.raises(ValueError, match=r"no answer from http://127\.0\.0\.1:9/v1/models"):
        answers(server={"url": "http://127.0.0.1:9/v1", "num_retries": 0})


@pytest.mark.parametrize("models", [[], ["a", "b"]])
def test_which_model_is_the_target_must_be_clear(
    fake_server: FakeServer, answers: Answers, models: list[str]
) -> None:
    fake_server.models = models
    with pytest.raises(ValueError, match=r"regenerate\.server\.model: .* name the target"):
        answers()
    assert len(answers(server={"model": "b"})) == len(PROMPTS)


def test_a_key_is_sent_where_there_is_one(
    fake_server: FakeServer, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(PROMPTS[0])
    monkeypatch.setenv("MY_KEY", "secret")
    answers(PROMPTS[1], server={"api_key_variable": "MY_KEY"})
    assert fake_server.keys == [None, "Bearer secret"]


def test_a_thought_is_kept_beside_the_answer() -> None:
    dialogue = module.Dialogue(id="d", source="x", turns=[[]])
    message = {"content": "hi", "reasoning_content": "well"}
    module.add_reply(dialogue, {"choices": [{"message": message, "finish_reason": "stop"}]})
    assert dialogue.messages == [{"role": "assistant", **message}]


def test_a_call_of_a_tool_is_an_answer_and_ends_the_dialogue(
    fake_server: FakeServer, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the tool's answer there is nothing to go on from."""
    function = {"name": "clock", "arguments": '{"zone": "UTC"}'}
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    reply = {"choices": [{"message": message, "finish_reason": "tool_calls"}]}
    monkeypatch.setattr(fake_server, "reply", lambda body: reply)
    asked = {"role": "user", "content": "when?"}
    prompt = {"id": "t", "messages": [asked, asked], "tools": [{"name": "clock"}]}
    line = answers(prompt, template="tools")[0]
    assert len(fake_server.requests) == 1
    assert line["messages"] == [asked, {**message, "content": ""}]
    assert line["generation"]["greedy"] is False
