"""Reports: one JSON line each, forgotten where a resumed run will say it again."""

import json
from unittest.mock import Mock

import pytest
import torch

from stage2_train.collate import PackedBatch
from stage2_train.metrics import BlockSums
from stage2_train.monitor import Monitor, forget_after, scalars


def test_scalars_spread_lists_over_offsets():
    flat = scalars(
        {"kind": "train", "step": 120, "accuracy_by_offset": [1.0, 0.5], "execution": "eager"}
    )
    assert flat["accuracy_by_offset/2"] == 0.5
    assert "execution" not in flat
    assert "step" not in flat


def test_records_after_the_checkpoint_and_torn_lines_are_forgotten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = "".join(json.dumps({"step": s}) + "\n" for s in (1, 2, 3)).encode()
    path.write_bytes(b'\xff\n[]\n7\n{"step": "x"}\n' + lines + b'{"step": 2, "lo')
    forget_after(path, step=2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
    forget_after(tmp_path / "none.jsonl", step=2)


@pytest.fixture
def monitor(tmp_path, architecture):
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    monitor = Monitor(tmp_path, device=device, architecture=architecture)
    monitor.start(first_step=0)
    yield monitor
    monitor.close()


def batch() -> Mock:
    return Mock(
        spec=PackedBatch,
        num_real_tokens=100,
        num_real_blocks=10,
        num_seen_pairs=1000,
        num_state_bytes=0,
        row_index=torch.zeros(40),
        positions=torch.zeros(100),
        context_start=torch.zeros(10),
    )


def take_step(monitor, step, *, loss=1.0, gradient_norm=0.5, is_reported=True, is_damaged=False):
    """An update of one batch, as training makes it."""
    number = torch.ones((), device=monitor.device)  # Made there: a copy would wait.
    counts = torch.ones(5, dtype=torch.long, device=monitor.device)
    sums = BlockSums(
        weighted_loss=loss * number,
        weight=number,
        num_rows=counts,
        num_correct=counts,
        num_reached=counts,
        num_accepted=counts,
    )
    if not is_damaged:
        monitor.add(batch(), sums)
    monitor.end_step()
    if is_reported:
        monitor.report(
            step=step,
            total_steps=100,
            epoch=0,
            num_tokens_seen=100 * step,
            learning_rate=step / 100,
            gradient_norm=gradient_norm * number,
            evidence={"execution": "eager"},
        )


def written(monitor) -> list[dict]:
    if not monitor.metrics_path.exists():
        return []
    return [json.loads(line) for line in monitor.metrics_path.read_text().splitlines()]


def test_a_line_is_written_behind_the_next_step_and_tells_of_its_own(monitor):
    take_step(monitor, 1, loss=1.0)
    assert [each["step"] for each in written(monitor)] == [1], "the first one comes at once"
    take_step(monitor, 2, loss=2.0, gradient_norm=0.2)
    assert len(written(monitor)) == 1
    take_step(monitor, 3, loss=30.0, is_reported=False)
    second = written(monitor)[1]
    assert (second["step"], second["loss"], second["learning_rate"]) == (2, 2.0, 0.02)
    assert second["gradient_norm"] == pytest.approx(0.2)
    take_step(monitor, 4, loss=10.0)
    monitor.flush()
    third = written(monitor)[2]
    assert (third["step"], third["loss"]) == (4, 20.0), "the mean of steps 3 and 4"


def test_nothing_is_charged_to_steps_after_it(tmp_path, monkeypatch, architecture):
    now = [0.0]
    monkeypatch.setattr("stage2_train.clock.time.perf_counter", lambda: now[0])
    monitor = Monitor(tmp_path, device=torch.device("cpu"), architecture=architecture)
    monitor.start(first_step=0)
    for step, wait_s in ((1, 0.5), (2, 1.0), (3, 4.0)):
        with monitor.waits.span():
            now[0] += wait_s
        now[0] += 1.0
        take_step(monitor, step)
    monitor.flush()
    monitor.close()
    assert [each["step_s"] for each in written(monitor)] == [1.5, 2.0, 5.0]
    assert [each["wait_fraction"] for each in written(monitor)] == [1 / 3, 0.5, 0.8]
    assert written(monitor)[2]["tokens_per_s"] == 20.0


def test_steps_of_damaged_batches_alone_have_no_line(monitor):
    for step in (1, 2):
        take_step(monitor, step, is_damaged=True)
    take_step(monitor, 3)
    take_step(monitor, 4)
    monitor.flush()
    assert [each["step"] for each in written(monitor)] == [3, 4]


def test_no_line_is_lost_before_a_pause_or_at_the_end(monitor):
    take_step(monitor, 1)
    take_step(monitor, 2)
    with monitor.pause():
        assert [each["step"] for each in written(monitor)] == [1, 2]
    with monitor:
        take_step(monitor, 3)
        take_step(monitor, 4)
    assert [each["step"] for each in written(monitor)] == [1, 2, 3, 4]


@pytest.mark.parametrize("loss", [1.0, float("nan")])
def test_a_line_is_written_when_the_next_step_fails_and_its_error_is_what_is_seen(monitor, loss):
    def two_steps_and_an_error():
        with monitor:
            take_step(monitor, 1)
            take_step(monitor, 2, loss=loss)
            raise KeyError("the next step")

    with pytest.raises(KeyError, match="the next step"):
        two_steps_and_an_error()
    assert [each["step"] for each in written(monitor)] == ([1] if loss != loss else [1, 2])


@pytest.mark.parametrize(
    ("bad", "words"),
    [({"loss": float("nan")}, "loss is nan"), ({"gradient_norm": float("inf")}, "norm is inf")],
)
def test_a_training_gone_astray_is_refused_before_a_pause(monitor, bad, words):
    take_step(monitor, 1)
    take_step(monitor, 2, **bad)
    with pytest.raises(ValueError, match=f"{words} at step 2; .*learning_rate"), monitor.pause():
        raise AssertionError("a checkpoint would be written")


@pytest.mark.gpu
def test_a_report_does_not_wait_for_the_device(monitor):
    take_step(monitor, 1)
    torch.cuda._sleep(1_000_000_000)
    take_step(monitor, 2)
    behind = torch.cuda.Event()
    behind.record()
    assert not behind.query(), "the device has half a second of work left"
    torch.cuda._sleep(1_000_000_000)
    working = torch.cuda.Event()
    working.record()
    take_step(monitor, 3, is_reported=False)
    assert written(monitor)[-1]["step"] == 2
    assert not working.query(), "the line was written while the device worked"


def test_time_of_a_pause_is_charged_to_no_step(tmp_path, monkeypatch, architecture):
    now = [0.0]
    monkeypatch.setattr("stage2_train.clock.time.perf_counter", lambda: now[0])
    monitor = Monitor(tmp_path, device=torch.device("cpu"), architecture=architecture)
    monitor.start(first_step=0)
    now[0] = 1.0
    with monitor.pause():
        now[0] = 101.0
    now[0] = 102.0
    take_step(monitor, 1)
    monitor.close()
    assert written(monitor)[0]["step_s"] == 2.0
