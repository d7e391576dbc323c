"""The line a person reads says what matters, and what is wrong in words."""

import numpy as np
import pytest

from stage2_train.live_line import (
    count_words,
    epoch_words,
    live_line,
    thousands,
    time_words,
    validation_line,
    warning_words,
)

RECORD = {
    "kind": "train",
    "step": 120,
    "step_s": 0.25,
    "loss": 3.21,
    "accuracy_by_offset": [1.0, 0.5, 0.25],
    "simulated_acceptance_length": 1.45,
    "tokens_per_s": 12_345.0,
    "block_tokens_per_s": 900.0,
    "num_tokens_seen": 4_560_000,
    "execution": "eager",
    "wait_fraction": 0.003,
    "copy_fraction": 0.04,
    "compute_fraction": 0.997,
    "read_bytes_per_s": 0.41e9,
    "read_bytes_per_s_needed": 0.9e9,
    "token_fill_fraction": 0.98,
    "block_fill_fraction": 1.0,
}


def test_live_line_says_what_matters():
    line = live_line(RECORD, total_steps=800)
    assert line == (
        "step 120/800 250ms 3 min left loss 3.210 acc 1.00 .50 .25 sim 1.45 | "
        "12.3k tok/s 900 block tok/s, 4.6 M tokens seen | eager | "
        "wait 0.3% copy 4.0% compute 99.7% read 0.41 GB/s"
    )


def test_time_left_is_said_where_it_is_known():
    first = live_line(RECORD | {"first_report_s": 41.3}, total_steps=800)
    last = live_line(RECORD, total_steps=120)
    assert "left" not in first + last


def test_an_epoch_says_what_it_trains_and_what_is_cut():
    lengths = np.array([100, 200, 300], np.int32)
    plain = epoch_words(lengths, num_batches=2, batch_tokens=300)
    assert plain == "3 sequences, 600 tokens in 2 batches"
    cut = epoch_words(lengths, num_batches=4, batch_tokens=150)
    assert cut.startswith("3 sequences, 400 tokens in 4 batches; 2 sequences are longer than ")
    assert "train.batch_tokens = 150" in cut


def test_waiting_for_data_is_said_in_words():
    slow = live_line(RECORD | {"wait_fraction": 0.31}, total_steps=800)
    assert (
        "waiting for data 31%: the store gives 0.41 GB/s, this drafter needs 0.9 GB/s: a faster"
        in slow
    )
    first = live_line(RECORD | {"wait_fraction": 0.31, "first_report_s": 41.3}, total_steps=800)
    assert first.endswith("| 41 s after start")


def test_padding_is_said_in_words():
    assert "only 60% of the blocks are real" in warning_words(RECORD | {"block_fill_fraction": 0.6})
    assert "only 60% of a batch are tokens" in warning_words(RECORD | {"token_fill_fraction": 0.6})
    assert warning_words(RECORD) == ""


def test_memory_is_shown_on_a_gpu():
    memory = {"memory_peak_bytes": 2**30, "memory_total_bytes": 2**32, "memory_retries": 0}
    roomy = RECORD | memory | {"memory_free_bytes": 2**31}
    assert live_line(roomy, total_steps=800).endswith("| mem 1/4 GiB free 2 retries 0")
    full = RECORD | memory | {"memory_free_bytes": 2**25}
    assert "nearly full: 0.0 GiB are left by all" in warning_words(full)
    assert "allocations were tried again" in warning_words(roomy | {"memory_retries": 2})


def test_uncompiled_steps_are_said_in_words_where_they_should_be_compiled():
    counted = RECORD | {"num_compiles": 0, "num_compiled_steps": 7}
    assert "only 7 of these steps ran compiled code" in warning_words(
        counted | {"execution": "mixed"}
    )
    assert warning_words(counted | {"execution": "compiled"}) == ""
    assert warning_words(RECORD | {"execution": "eager"}) == ""


def test_validation_line():
    found = {"loss": 2.0, "accuracy": 0.5, "simulated_acceptance_length": 1.5}
    assert "nothing is held out" in validation_line(3, {})
    assert "acceptance length" not in validation_line(3, found)
    walked = found | {"acceptance_length": 1.75, "num_walked": 4}
    assert "acceptance length 1.750 on 4 greedy answers" in validation_line(3, walked)


@pytest.mark.parametrize(
    ("count", "text"),
    [(950, "950"), (12_300, "12.3 K"), (4_560_000, "4.6 M"), (1_234_000_000, "1.2 B")],
)
def test_counts_are_short(count, text):
    assert count_words(count) == text


@pytest.mark.parametrize(("value", "text"), [(12.4, "12"), (999.0, "999"), (1500.0, "1.5k")])
def test_rates_are_short(value, text):
    assert thousands(value) == text


def test_compilations_and_use_of_the_gpu_are_shown():
    found = {
        "execution": "compiled",
        "num_compiles": 0,
        "num_compiles_cold": 1,
        "num_compiles_cached": 2,
        "num_graph_breaks": 0,
        "mfu_fraction": 0.784,
    }
    line = live_line(RECORD | found, total_steps=800)
    assert "| compiled, compiles 0 (cold 1 disk 2) breaks 0 | MFU 0.78 | wait" in line


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(40.0, "40 s"), (720.0, "12 min"), (12_600.0, "3.5 h"), (181_440.0, "2.1 days")],
)
def test_times_are_short(seconds: float, words: str) -> None:
    assert time_words(seconds) == words
