"""What an evaluation says, and its exit code."""

import pytest

from dflash_offline.evaluation_report import lossless_exit_code, print_table

FOUND = {
    "num_prompts": 8,
    "acceptance_length": 2.5,
    "acceptance_length_interval": [2.25, 2.75],
    "lossless_fraction": 1.0,
    "num_ties": 0,
    "num_differing": 0,
    "target_tokens_per_s": 10.0,
    "drafted_tokens_per_s": 20.0,
}


def results(**changes):
    return {"small": {"step": 4, "suites": {"gsm8k": FOUND | changes}}}


def test_the_table_names_drafter_suite_and_figures(capsys):
    print_table(results(untrained=FOUND | {"acceptance_length": 1.0}))
    told = capsys.readouterr().out
    for part in ("small", "gsm8k", "2.500 [2.250, 2.750]", "1.000 [2.250, 2.750]", "100.0%"):
        assert part in told


def test_sampled_answers_have_no_verdict(capsys):
    print_table(results(lossless_fraction=None, untrained=None))
    assert "sampled" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["trained", "untrained"])
def test_one_differing_answer_of_any_drafter_fails(key, capsys):
    differing = FOUND | {"num_differing": 1}
    found = results(**(differing if key == "trained" else {"untrained": differing}))
    assert lossless_exit_code(results(untrained=FOUND), tie_margin=0.02) == 0
    assert lossless_exit_code(found, tie_margin=0.02) == 1
    told = capsys.readouterr().err
    assert told == (
        f"{'' if key == 'trained' else 'untrained '}small, gsm8k: 1 of 8 answers differ from the "
        "target's own where its top-2 margin is above 0.02\n"
    )
