"""What drafters are decoded against: requests, and when an answer counts as the target's own."""

import json

import pytest

from dflash_offline.evaluation_bench import compare, open_bench
from dflash_offline.speculate import Generation


def test_several_turns_are_several_requests(tiny_run, tmp_path):
    path = tmp_path / "turns.jsonl"
    turns = [{"role": "user", "content": text} for text in ("Hi", "And?")]
    path.write_text(json.dumps({"messages": turns}))
    settings = tiny_run.eval.model_copy(update={"suites": (str(path),)})
    bench = open_bench(tiny_run.model_copy(update={"eval": settings}))
    reference = bench.references[0]
    first, second = reference.prompts
    assert second[: len(first)] == first
    tokenizer = bench.target.tokenizer
    answer = tokenizer.decode(reference.plain.generations[0].token_ids, skip_special_tokens=True)
    assert answer in tokenizer.decode(second)


@pytest.mark.parametrize(
    ("token_ids", "margins", "verdict"),
    [
        ([1, 2, 3], [1.0, 1.0, 1.0], "equals"),
        ([1, 9, 3], [1.0, 0.01, 1.0], "tie"),
        ([1, 9, 3], [1.0, 0.05, 0.01], "differs"),
        ([1, 2], [1.0, 0.0, 0.0], "differs"),
        ([1, 2, 3, 4], [0.0, 0.0, 0.0], "differs"),
    ],
)
def test_only_a_small_margin_makes_a_tie(token_ids, margins, verdict):
    alone = Generation(token_ids=[1, 2, 3], acceptance_lengths=[1, 1], top2_margins=margins)
    other = Generation(token_ids=token_ids, acceptance_lengths=[], top2_margins=[])
    assert compare(alone, other, tie_margin=0.02) == verdict
