"""Sequences: tokens and masks as they were given, what is cut, and what is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from stage1_extract.conversations import Conversation
from stage1_extract.problems import UnusableConversationError
from stage1_extract.sequences import TokenSequence, to_sequence, tokens_id

MakeTokenizer = Callable[[str | None], PreTrainedTokenizerFast]


def tokens(token_ids: list[int], loss_mask: list[int], **other: Any) -> Conversation:
    return Conversation(
        id="c",
        source="data.jsonl:1",
        token_ids=tuple(token_ids),
        loss_mask=tuple(map(bool, loss_mask)),
        **other,
    )


def test_tokens_pass_as_they_are(make_tokenizer: MakeTokenizer) -> None:
    given = tokens([5, 6, 7, 8], [0, 1, 1, 1])
    sequence = to_sequence(given, make_tokenizer(None))
    assert sequence.token_ids.tolist() == [5, 6, 7, 8]
    assert sequence.loss_mask.tolist() == [False, True, True, True]
    assert sequence.token_ids.dtype == np.int32


def test_an_unsupervised_tail_is_dropped(make_tokenizer: MakeTokenizer) -> None:
    sequence = to_sequence(tokens([5, 6, 7, 8], [0, 1, 1, 0]), make_tokenizer(None))
    assert sequence.token_ids.tolist() == [5, 6, 7]


@pytest.mark.parametrize("loss_mask", [[0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 0, 1]])
def test_without_a_supervised_pair_there_is_nothing_to_learn(
    make_tokenizer: MakeTokenizer, loss_mask: list[int]
) -> None:
    with pytest.raises(UnusableConversationError, match="no supervised pair of tokens"):
        to_sequence(tokens([5, 6, 7, 8], loss_mask), make_tokenizer(None))


def test_too_long_is_truncated_and_said_so(make_tokenizer: MakeTokenizer) -> None:
    given = tokens([5, 6, 7, 8], [0, 1, 1, 1])
    cut = to_sequence(given, make_tokenizer(None), max_sequence_tokens=3)
    assert (cut.token_ids.tolist(), cut.is_truncated) == ([5, 6, 7], True)
    whole = to_sequence(given, make_tokenizer(None), max_sequence_tokens=4)
    assert (whole.num_tokens, whole.is_truncated) == (4, False)


def test_too_long_is_skipped_as_wanted(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(UnusableConversationError, match="4 tokens, the limit is 3") as raised:
        to_sequence(
            tokens([5, 6, 7, 8], [0, 1, 1, 1]),
            make_tokenizer(None),
            max_sequence_tokens=3,
            long_conversations="skip",
        )
    assert raised.value.is_wanted


def test_a_token_outside_the_vocabulary_is_refused(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(UnusableConversationError, match=r"outside the vocabulary: 8, .* has 8"):
        to_sequence(tokens([5, 6, 7, 8], [0, 1, 1, 1]), make_tokenizer(None), vocab_size=8)


class TestRecordedAnswers:
    """Answers that `regenerate` recorded: what counts as greedy, and where they end."""

    token_ids = (5, 6, 7, 8)

    def sequence(
        self, make_tokenizer: MakeTokenizer, *, target_weights: str = "w", **changes: Any
    ) -> TokenSequence:
        generation = {
            "greedy": True,
            "target_weights": "w",
            "num_tokens": 3,
            "tokens": tokens_id(self.token_ids[:3]),
        } | changes
        given = tokens(list(self.token_ids), [0, 1, 1, 1], generation=generation)
        return to_sequence(given, make_tokenizer(None), target_weights=target_weights)

    def test_the_sequence_ends_where_the_target_stopped(
        self, make_tokenizer: MakeTokenizer
    ) -> None:
        sequence = self.sequence(make_tokenizer)
        assert sequence.greedy
        assert sequence.token_ids.tolist() == [5, 6, 7]
        assert not sequence.is_truncated

    @pytest.mark.parametrize(
        "changes",
        [{"greedy": False}, {"target_weights": "other"}, {"greedy": None}],
    )
    def test_only_this_targets_own_greedy_answers_are_greedy(
        self, make_tokenizer: MakeTokenizer, changes: dict[str, Any]
    ) -> None:
        sequence = self.sequence(make_tokenizer, **changes)
        assert not sequence.greedy
        assert sequence.num_tokens == 3

    @pytest.mark.parametrize("changes", [{"tokens": "other"}, {"num_tokens": 9}])
    def test_other_tokens_are_not_what_was_written(
        self, make_tokenizer: MakeTokenizer, changes: dict[str, Any]
    ) -> None:
        sequence = self.sequence(make_tokenizer, **changes)
        assert not sequence.greedy
        assert sequence.num_tokens == 4

    def test_truncation_keeps_it_greedy(self, make_tokenizer: MakeTokenizer) -> None:
        """A prefix of a greedy answer is greedy."""
        generation = {
            "greedy": True,
            "target_weights": "w",
            "num_tokens": 4,
            "tokens": tokens_id(self.token_ids),
        }
        given = tokens(list(self.token_ids), [0, 1, 1, 1], generation=generation)
        cut = to_sequence(given, make_tokenizer(None), target_weights="w", max_sequence_tokens=3)
        assert cut.greedy
        assert cut.num_tokens == 3
