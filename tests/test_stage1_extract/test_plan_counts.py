"""Token counts: exact when all are counted, else a sample whose error bar tells the truth."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from stage1_extract.plan_counts import count_tokens, mean_context
from stage1_extract.problems import UnusableConversationError
from stage1_extract.sequences import TokenSequence


def sequence(conversation_id: str, num_tokens: int) -> TokenSequence:
    ids = np.zeros(num_tokens, dtype=np.int32)
    mask = np.ones(num_tokens, dtype=np.bool_)
    return TokenSequence(id=conversation_id, token_ids=ids, loss_mask=mask, greedy=False)


def data_of(lengths: list[int]) -> tuple[list[str], Callable[[str], TokenSequence]]:
    """Ids of conversations of these lengths; a length of 0 is unusable."""

    def to_sequence(conversation_id: str) -> TokenSequence:
        length = lengths[int(conversation_id)]
        if length == 0:
            raise UnusableConversationError("empty", source=conversation_id)
        return sequence(conversation_id, length)

    return [str(index) for index in range(len(lengths))], to_sequence


def test_all_counted_is_exact() -> None:
    ids, to_sequence = data_of([3, 0, 5])
    count = count_tokens(ids, to_sequence, max_counted=3)
    assert count.is_exact
    assert (count.num_tokens, count.num_tokens_error, count.num_sequences) == (8, 0, 2)
    assert (count.longest_tokens, count.unusable) == (5, {"empty": 1})
    assert count.first_problem == "1: empty"


def test_the_error_bar_holds_the_truth_nineteen_times_of_twenty() -> None:
    numbers = random.Random(0)
    num_right = 0
    for _ in range(200):
        lengths = [round(numbers.lognormvariate(5, 0.7)) for _ in range(1_000)]
        for index in numbers.sample(range(1_000), 50):
            lengths[index] = 0
        ids, to_sequence = data_of(lengths)
        numbers.shuffle(ids)
        count = count_tokens(ids, to_sequence, max_counted=100)
        num_right += abs(count.num_tokens - sum(lengths)) <= count.num_tokens_error
    assert 180 <= num_right <= 200


def test_a_sample_is_the_same_each_time_and_smaller_with_more_counted() -> None:
    ids, to_sequence = data_of([index % 50 + 1 for index in range(500)])
    few, more = (count_tokens(ids, to_sequence, max_counted=n) for n in (20, 200))
    assert few == count_tokens(ids, to_sequence, max_counted=20)
    assert 0 < more.num_tokens_error < few.num_tokens_error


def test_no_conversations_make_no_tokens() -> None:
    assert count_tokens([], lambda name: sequence("x", 1), max_counted=5).num_tokens == 0


@pytest.mark.parametrize("lengths", [[1], [4, 9, 2]])
def test_mean_context_is_the_mean_place_of_a_token(lengths: list[int]) -> None:
    places = [place for n in lengths for place in range(1, n + 1)]
    assert mean_context(lengths) == pytest.approx(sum(places) / len(places))
