"""Counting: how many tokens conversations make, one by one or by a sample with its error bar."""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stage1_extract.problems import UnusableConversationError
from stage1_extract.sequences import TokenSequence

_SAMPLE_SEED = 0
_NORMAL_95 = 1.96
"""Half width of a 95% interval, in standard errors."""


@dataclass(frozen=True, kw_only=True)
class TokenCount:
    """Tokens of some conversations; an estimate where only a sample of them was counted."""

    num_conversations: int
    num_counted: int
    """Conversations that were turned into tokens one by one."""
    num_sequences: int
    """Usable conversations."""
    num_tokens: int
    num_tokens_error: int
    """Half width of the 95% interval around `num_tokens`; 0 where all were counted."""
    mean_context_tokens: float
    """Mean over all tokens of how many tokens of its sequence each one sees, itself included."""
    longest_tokens: int
    """Of the counted ones."""
    num_truncated: int
    unusable: Mapping[str, int] = field(default_factory=dict)
    """Reason to count, among the counted conversations."""
    first_problem: str | None = None

    @property
    def is_exact(self) -> bool:
        """Whether every conversation was counted."""
        return self.num_counted == self.num_conversations

    @property
    def most_tokens(self) -> int:
        """Upper end of the interval."""
        return self.num_tokens + self.num_tokens_error

    @property
    def mean_tokens(self) -> float:
        """Tokens of a usable sequence on average."""
        return self.num_tokens / max(1, self.num_sequences)


def count_tokens(
    conversation_ids: Sequence[str],
    to_sequence: Callable[[str], TokenSequence],
    *,
    max_counted: int,
) -> TokenCount:
    """Counts the tokens of conversations, or of a random sample that stands for all of them.

    The sample depends on the list of ids only. Its error is that of a simple random sample drawn
    without replacement, unusable conversations counting as empty ones.

    Args:
        conversation_ids: All of them, each once.
        to_sequence: Gives a conversation's tokens by its id, or raises UnusableConversationError.
        max_counted: Conversations above which a sample of this many is taken.
    """
    chosen = sample(conversation_ids, max_counted)
    lengths: list[int] = []
    num_truncated = 0
    unusable: Counter[str] = Counter()
    first_problem = None
    for conversation_id in chosen:
        try:
            sequence = to_sequence(conversation_id)
        except UnusableConversationError as problem:
            unusable[problem.reason] += 1
            first_problem = first_problem or str(problem)
        else:
            lengths.append(sequence.num_tokens)
            num_truncated += sequence.is_truncated
    scale = len(conversation_ids) / max(1, len(chosen))
    return TokenCount(
        num_conversations=len(conversation_ids),
        num_counted=len(chosen),
        num_sequences=round(len(lengths) * scale),
        num_tokens=round(sum(lengths) * scale),
        num_tokens_error=round(_error_of_sum(lengths, len(chosen), len(conversation_ids))),
        mean_context_tokens=mean_context(lengths),
        longest_tokens=max(lengths, default=0),
        num_truncated=round(num_truncated * scale),
        unusable=dict(unusable),
        first_problem=first_problem,
    )


def sample(conversation_ids: Sequence[str], size: int) -> Sequence[str]:
    """All ids, or a random `size` of them: always the same ones."""
    if len(conversation_ids) <= size:
        return conversation_ids
    return random.Random(_SAMPLE_SEED).sample(conversation_ids, size)


def usable_sequences(
    conversation_ids: Sequence[str], to_sequence: Callable[[str], TokenSequence]
) -> Iterator[TokenSequence]:
    """The sequences of conversations, without the unusable ones."""
    for conversation_id in conversation_ids:
        try:
            yield to_sequence(conversation_id)
        except UnusableConversationError:
            continue


def mean_context(lengths: Sequence[int]) -> float:
    """Mean over all tokens of sequences of these lengths of a token's place, counted from 1."""
    return sum(n * (n + 1) for n in lengths) / 2 / max(1, sum(lengths))


def _error_of_sum(lengths: Sequence[int], num_chosen: int, num_all: int) -> float:
    """Half width of the 95% interval of the sum over all, from a sample drawn without replacement.

    Chosen conversations without a length count as 0. The last factor is the finite population
    correction (Cochran, Sampling Techniques, 2.5).
    """
    if num_chosen in (0, num_all):
        return 0.0
    mean = sum(lengths) / num_chosen
    squares = sum((n - mean) ** 2 for n in lengths) + (num_chosen - len(lengths)) * mean**2
    deviation = math.sqrt(squares / max(1, num_chosen - 1))
    error_of_mean = deviation / math.sqrt(num_chosen) * math.sqrt(1 - num_chosen / num_all)
    return _NORMAL_95 * error_of_mean * num_all
