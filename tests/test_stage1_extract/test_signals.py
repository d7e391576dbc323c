"""Signals: a first one is noted, a second Ctrl-C stops, handlers are put back."""

import os
import signal

import pytest

from stage1_extract.signals import STOP_SIGNALS, StopRequest, stop_requests


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_noted(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    with stop_requests() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop
    assert f"{number.name}: stopping soon" in capsys.readouterr().err


def test_ctrl_c_twice_stops_at_once() -> None:
    with stop_requests() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_second_term_changes_nothing() -> None:
    with stop_requests() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with stop_requests():
        pass
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_the_grace_time_runs_from_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("stage1_extract.signals.time.monotonic", lambda: now_s[0])
    stop = StopRequest()
    assert stop.seconds_left(20.0) == 20.0
    stop.note()
    now_s[0] = 105.0
    stop.note()
    assert stop.seconds_left(20.0) == 15.0
