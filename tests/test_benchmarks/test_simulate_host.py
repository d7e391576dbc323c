"""The simulated host: nobody gets more than there is, and who waits for nothing keeps its rate."""

import importlib
import json
from argparse import Namespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture
def simulation():
    return importlib.import_module("simulate_host")


@pytest.fixture
def host(simulation):
    return simulation.Host(disk_bytes_s=1000.0, page_cache_bytes=1e6)


def process(simulation, name: str, tok_s: float, *, is_writer: bool):
    return simulation.Process(name=name, tok_s=tok_s, bytes_per_token=10.0, is_writer=is_writer)


@settings(max_examples=50, deadline=None)
@given(
    wanted=st.lists(st.floats(0.0, 1e3), min_size=1, max_size=8),
    capacity=st.floats(0.0, 2e3),
)
def test_the_disk_is_shared_out_and_no_more(wanted, capacity):
    given_out = importlib.import_module("simulate_host").share_out(wanted, capacity)
    assert sum(given_out) <= capacity + 1e-6
    assert all(part <= wish + 1e-9 for part, wish in zip(given_out, wanted, strict=True))
    # Whoever gets less than wanted gets no less than anybody else.
    for part, wish in zip(given_out, wanted, strict=True):
        assert part >= wish - 1e-9 or part >= max(given_out) - 1e-6


def test_processes_that_the_disk_can_serve_keep_their_rates(simulation, host):
    alone = [process(simulation, "worker 0", 50.0, is_writer=True)]
    (found,) = simulation.simulate(host, alone, stored_bytes=0.0, seconds=10)
    assert found.tok_s == pytest.approx(50.0)
    assert found.waiting == pytest.approx(0.0)


def test_writers_beyond_the_disk_wait_alike(simulation, host):
    workers = [process(simulation, f"worker {n}", 80.0, is_writer=True) for n in range(2)]
    found = simulation.simulate(host, workers, stored_bytes=0.0, seconds=10)
    assert [each.tok_s for each in found] == pytest.approx([50.0, 50.0])
    assert found[0].waiting == pytest.approx(1 - 50 / 80)


def test_a_store_in_the_page_cache_costs_the_disk_nothing(simulation, host):
    reader = [process(simulation, "deep", 1e6, is_writer=False)]
    (found,) = simulation.simulate(host, reader, stored_bytes=1e5, seconds=10)
    assert found.tok_s == pytest.approx(1e6)
    assert found.disk_gb_s == 0.0


def test_a_shallow_drafter_costs_less_than_a_deep_one(simulation):
    shape = importlib.import_module("shapes").SHAPES["wide"]
    costs = [simulation.drafter_flops_per_token(shape, num_layers=n) for n in (3, 4, 5)]
    assert costs == sorted(costs)
    # The frozen head is the same for all.
    assert costs[2] < 5 / 3 * costs[0]


@pytest.mark.parametrize(("is_scaled", "expected"), [(False, 5.0), (True, None)])
def test_a_rate_that_was_measured_at_the_shape_is_not_scaled(
    simulation, monkeypatch, tmp_path, is_scaled, expected
):
    rows = {
        "stage1_store_tok_s": 100.0,
        "stage1_forward_packed_eager_4": 1.0,
        "stage1_forward_packed_compiled_4": 2.0,
        "stage2_step_fp8_all_tok_s": 100.0,
        "host_2_2_alone_deep_train_tok_s": 4.0,
        "host_2_2_alone_shallow_train_tok_s": 0.1,
        "host_1_1_alone_deep_train_tok_s": 5.0,
        "host_1_1_alone_medium_train_tok_s": 5.5,
    }
    results = tmp_path / "results.jsonl"
    results.write_text("".join(json.dumps({"name": n, "value": v}) + "\n" for n, v in rows.items()))
    monkeypatch.setattr(simulation, "RESULTS", results)
    given = {"extract_tok_s": None, "train_tok_s": None, "bf16": False}
    arguments = Namespace(shape="wide", scaled=is_scaled, **given)
    shape = importlib.import_module("shapes").SHAPES["wide"]
    drafters = simulation.rates(arguments, shape).drafters
    if expected is not None:
        assert (drafters["deep"], drafters["medium"]) == (expected, 5.5)
    # What that run did not measure is scaled: fewer layers, more tokens.
    assert drafters["deep"] < drafters["medium"] < drafters["shallow"] < 100.0
