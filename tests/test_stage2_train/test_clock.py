"""Spans add up, each is counted once, and a process knows its age."""

import sys

import pytest
import torch

from stage2_train.clock import DeviceClock, Moment, process_age_s


def test_spans_of_the_host_add_up_and_are_taken_once(monkeypatch):
    times = iter([1.0, 3.0, 10.0, 10.5])
    monkeypatch.setattr("stage2_train.clock.time.perf_counter", lambda: next(times))
    clock = DeviceClock(torch.device("cpu"))
    for _ in range(2):
        with clock.span():
            pass
    assert clock.take_s() == 2.5
    assert clock.take_s() == 0.0


def test_spans_that_end_after_a_moment_are_left_for_later(monkeypatch):
    times = iter([1.0, 3.0, 5.0, 10.0, 10.5])
    monkeypatch.setattr("stage2_train.clock.time.perf_counter", lambda: next(times))
    device = torch.device("cpu")
    clock = DeviceClock(device)
    with clock.span():
        pass
    moment = Moment(device)
    with clock.span():
        pass
    assert clock.take_s(until=moment) == 2.0
    assert clock.take_s() == 0.5


@pytest.mark.gpu
def test_a_gpu_is_timed_by_its_own_clock():
    device = torch.device("cuda", 0)
    clock = DeviceClock(device)
    busy = torch.randn(4096, 4096, device=device)
    for _ in range(50):
        busy = busy @ busy
    with clock.span():
        pass  # The GPU still has work: it does not wait.
    assert clock.take_s() == 0.0, "nothing has ended yet"
    torch.cuda.synchronize(device)
    assert clock.take_s() < 0.01


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells")
def test_a_process_knows_its_age():
    age_s = process_age_s()
    assert age_s is not None
    assert 0.0 < age_s < 86_400.0
