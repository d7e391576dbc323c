"""Server: answers from an OpenAI-compatible chat server that runs the target.

Any server does. One that returns token ids when asked to (vLLM: `return_token_ids`) also lets its
answers be recorded as exact, as the walk needs them; of others only the text is known.
"""

import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from stage1_extract.config import RegenerateConfig, ServerConfig
from stage1_extract.dialogues import Dialogue
from stage1_extract.problems import Problems, UnusableConversationError
from stage1_extract.signals import StopRequest

_LONGEST_PAUSE_S = 60.0
_TRY_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


def answer_by_server(
    dialogues: Sequence[Dialogue],
    config: RegenerateConfig,
    template_arguments: Mapping[str, Any],
    problems: Problems,
    stop: StopRequest,
) -> Iterator[list[Dialogue]]:
    """Answers dialogues through the server of the settings, in the order in which they finish.

    After a stop was asked for, the requests in flight are waited for and no others are sent.

    Raises:
        ValueError: The server cannot be reached, or does not say which model is the target.
    """
    assert config.server is not None
    client = ChatClient(config.server)
    request = request_settings(config, template_arguments)
    request["model"] = config.server.model or client.only_model()
    rest = iter(dialogues)
    running: set[Future[Dialogue]] = set()
    while True:
        # Never more than are in flight: a stop then loses no answer that was paid for.
        while not stop and len(running) < config.server.num_requests:
            dialogue = next(rest, None)
            if dialogue is None:
                break
            running.add(_in_thread(dialogue, client, request))
        if not running:
            return
        done, running = wait(running, return_when=FIRST_COMPLETED)
        yield list(_usable(done, problems))


def _in_thread(
    dialogue: Dialogue, client: "ChatClient", request: Mapping[str, Any]
) -> "Future[Dialogue]":
    """Answers a dialogue in a thread of its own, which does not keep the process alive."""
    future: Future[Dialogue] = Future()

    def run() -> None:
        try:
            future.set_result(answer_dialogue(dialogue, client, request))
        except BaseException as error:  # Raised again where the result is asked for.
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def request_settings(
    config: RegenerateConfig, template_arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """What all requests have in common; sampling settings only where they count."""
    settings: dict[str, Any] = {
        "max_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "return_token_ids": True,
    }
    if config.temperature > 0:
        settings |= {"top_p": config.top_p, "seed": config.seed}
    if template_arguments:
        settings["chat_template_kwargs"] = dict(template_arguments)
    return settings


def answer_dialogue(
    dialogue: Dialogue, client: "ChatClient", request: Mapping[str, Any]
) -> Dialogue:
    """Answers all turns of one dialogue.

    Raises:
        UnusableConversationError: The server refuses it, for example as too long.
        ValueError: The server is gone.
    """
    while not dialogue.is_finished:
        dialogue.messages += dialogue.turns[dialogue.num_answers]
        body = {**request, "messages": dialogue.messages}
        if dialogue.tools:
            body["tools"] = dialogue.tools
        add_reply(dialogue, client.complete(body, source=dialogue.source))
    return dialogue


def add_reply(dialogue: Dialogue, reply: Mapping[str, Any]) -> None:
    """Adds a server's reply to a dialogue, and its token ids where it tells them."""
    choice = reply["choices"][0]
    message = {"role": "assistant", "content": choice["message"].get("content") or ""}
    for name in ("reasoning_content", "tool_calls"):
        if choice["message"].get(name):
            message[name] = choice["message"][name]
    prompt_ids = reply.get("prompt_token_ids") or choice.get("prompt_token_ids")
    answer_ids = choice.get("token_ids")
    if prompt_ids and answer_ids:
        dialogue.written.append([*prompt_ids, *answer_ids])
    dialogue.add_answer(
        message,
        num_tokens=int((reply.get("usage") or {}).get("completion_tokens") or 0),
        was_cut=choice.get("finish_reason") == "length",
    )


class ChatClient:
    """Sends requests to one server, patiently."""

    def __init__(self, server: ServerConfig):
        self._server = server
        self._headers = {"Content-Type": "application/json"}
        key = os.environ.get(server.api_key_variable)
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def only_model(self) -> str:
        """Name of the one model that the server serves.

        Raises:
            ValueError: It serves another number of models, or cannot be reached.
        """
        try:
            names = [str(model["id"]) for model in self._send("models")["data"]]
        except urllib.error.HTTPError as error:
            raise ValueError(
                f"regenerate.server.url: {error.url} answers {error.code} {error.reason}; check the"
                f" address, the key in {self._server.api_key_variable}, or name the model"
            ) from error
        if len(names) != 1:
            raise ValueError(
                f"regenerate.server.model: {self._server.url} serves {', '.join(names) or 'none'};"
                " name the target"
            )
        return names[0]

    def complete(self, body: Mapping[str, Any], *, source: str) -> dict[str, Any]:
        """The reply to a chat request.

        Raises:
            UnusableConversationError: The server refuses this request.
            ValueError: The server is gone.
        """
        try:
            return self._send("chat/completions", body)
        except urllib.error.HTTPError as error:
            detail = f"{error.code} {error.read(300).decode('utf-8', 'replace')}"
            raise UnusableConversationError(
                "refused by the server", source=source, detail=" ".join(detail.split())
            ) from error

    def _send(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One request, tried again with growing pauses while the server is busy or away."""
        url = f"{self._server.url.rstrip('/')}/{path}"
        data = None if body is None else json.dumps(body).encode()
        for attempt in range(self._server.num_retries + 1):
            request = urllib.request.Request(url, data=data, headers=self._headers)
            try:
                with urllib.request.urlopen(request, timeout=self._server.timeout_s) as response:
                    reply: dict[str, Any] = json.load(response)
                    return reply
            except urllib.error.HTTPError as error:
                if error.code not in _TRY_AGAIN:
                    raise
                problem: Exception = error
            except (OSError, ValueError) as error:
                problem = error
            if attempt < self._server.num_retries:
                time.sleep(pause_s(attempt, asked_s=_retry_after_s(problem)))
        raise ValueError(
            f"regenerate.server.url: no answer from {url} in {self._server.num_retries + 1} tries"
            f" ({problem}); start the server and run the same command again"
        ) from problem


def pause_s(attempt: int, *, asked_s: float) -> float:
    """Seconds before the next try: doubled each time, spread so that not all come back at once.

    Args:
        attempt: Tries that failed before this one.
        asked_s: What the server asked for.
    """
    growing_s = min(2.0**attempt, _LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
    return max(growing_s, min(asked_s, _LONGEST_PAUSE_S))


def _retry_after_s(problem: Exception) -> float:
    """Seconds that a busy server asks to wait; 0 where it says nothing, or a date."""
    if not isinstance(problem, urllib.error.HTTPError):
        return 0.0
    text = problem.headers.get("Retry-After", "")
    return float(text) if text.isdigit() else 0.0


def _usable(done: set[Future[Dialogue]], problems: Problems) -> Iterator[Dialogue]:
    for future in done:
        try:
            yield future.result()
        except UnusableConversationError as problem:
            problems.add(problem)
