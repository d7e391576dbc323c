"""The evidence repeats what the steps said, and starts anew after each report."""

import pytest
import torch

from stage2_train import compile as module
from stage2_train.compile import Evidence


@pytest.fixture(autouse=True)
def _stance_of_other_tests():
    """Leave the process as it was, for other tests compile too."""
    with torch.compiler.set_stance("default"):
        yield


def test_eager_steps_say_so():
    evidence = Evidence(is_compiling_wanted=False)
    evidence.add_step(is_compiled=False)
    assert evidence.take() == {"execution": "eager", "num_compiled_steps": 0}


def test_one_eager_step_among_compiled_ones_shows():
    evidence = Evidence(is_compiling_wanted=False)
    for is_compiled in (True, False, True):
        evidence.add_step(is_compiled=is_compiled)
    assert evidence.take() == {"execution": "mixed", "num_compiled_steps": 2}
    evidence.add_step(is_compiled=True)
    assert evidence.take() == {"execution": "compiled", "num_compiled_steps": 1}


def test_compilations_are_those_since_the_last_report(monkeypatch):
    counts = {"num_compiles": 2, "num_compiles_cold": 2}
    monkeypatch.setattr(module, "compile_counts", lambda: dict(counts))
    evidence = Evidence(is_compiling_wanted=True)
    evidence.add_step(is_compiled=True)
    assert evidence.take()["num_compiles"] == 2
    evidence.add_step(is_compiled=True)
    assert evidence.take()["num_compiles"] == 0
    counts["num_compiles"] = 3
    evidence.add_step(is_compiled=True)
    assert evidence.take()["num_compiles"] == 1


def test_recompiling_is_forbidden_after_the_warm_up_only(monkeypatch):
    stances = []
    monkeypatch.setattr(module.torch.compiler, "set_stance", stances.append)
    evidence = Evidence(is_compiling_wanted=True)
    for _ in range(module.WARMUP_STEPS - 1):
        evidence.add_step(is_compiled=True)
    assert stances == []
    for _ in range(3):
        evidence.add_step(is_compiled=True)
    assert stances == ["fail_on_recompile"]


def test_counts_of_this_process():
    assert set(module.compile_counts()) == {
        "num_compiles",
        "num_compiles_cold",
        "num_compiles_cached",
        "num_graph_breaks",
    }


RECOMPILING = """
import torch
from stage2_train.compile import WARMUP_STEPS, Evidence

double = torch.compile(lambda x: 2 * x, backend="eager", fullgraph=True, dynamic=False)
evidence = Evidence(is_compiling_wanted=True)
for _ in range(WARMUP_STEPS + 5):
    double(torch.ones(3))
    evidence.add_step(is_compiled=True)
with evidence.compiling_allowed():
    double(torch.ones(4))  # A first time is allowed where it is said.
double(torch.ones(3))
try:
    double(torch.ones(5))
except RuntimeError as error:
    assert "fail_on_recompile" in str(error), error
else:
    raise AssertionError("it compiled again")
"""


def test_a_recompilation_after_the_warm_up_really_fails(run_script):
    run_script(RECOMPILING)
