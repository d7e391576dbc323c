"""Prompts that a target writes itself: their beginnings, how they are drawn, what is kept."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import own_prompts

    return own_prompts


def test_beginnings_are_of_three_kinds_and_a_function_of_the_seed(bench: Any) -> None:
    found = list(itertools.islice(bench.beginnings(0), 600))
    assert {kind for kind, _ in found} == {"words", "chat", "code"}
    assert sum(kind == "chat" for kind, _ in found) == 300
    assert found == list(itertools.islice(bench.beginnings(0), 600))
    assert found != list(itertools.islice(bench.beginnings(1), 600))


def test_only_tokens_likely_beside_the_likeliest_are_drawn(bench: Any) -> None:
    torch.manual_seed(0)
    logits = torch.tensor([0.0, -1.0, math.log(0.04), -20.0]).repeat(4000, 1)
    drawn = bench.likely_tokens(logits, temperature=1.0, top_p=1.0, uniforms=None)
    assert set(drawn.tolist()) == {0, 1}
    share = float((drawn == 0).float().mean())
    assert share == pytest.approx(1 / (1 + math.exp(-1)), abs=0.03)


def test_prompts_that_share_words_with_an_evaluated_one_are_left_out(bench: Any) -> None:
    evaluated = "A baker sells 12 loaves on Monday and twice as many on Tuesday."
    copied = "Tell me: " + evaluated[5:50]
    assert bench.kept([copied, "What is a loaf?"], evaluated, limit=9) == ["What is a loaf?"]
