"""Problems: conversations that cannot be used, counted by reason, and the limit to them."""

from collections import Counter

TOO_LONG = "longer than data.max_sequence_tokens"
"""Reason of a sequence that `data.long_conversations = "skip"` leaves out."""

WANTED_REASONS = frozenset({TOO_LONG})
"""Reasons that a setting asked for: they are no failures."""


class UnusableConversationError(ValueError):
    """One conversation cannot be used; the run may go on without it."""

    def __init__(self, reason: str, *, source: str, detail: str = ""):
        self.reason = reason
        """Short and constant, to be counted."""
        super().__init__(f"{source}: {reason}{f': {detail}' if detail else ''}")

    @property
    def is_wanted(self) -> bool:
        """Whether a setting asked for it to be left out, so that it is no failure."""
        return self.reason in WANTED_REASONS


class Problems:
    """What was skipped and why; stops the run at the first one (strict) or past a limit."""

    def __init__(self, *, strict: bool = False, limit: int | None = None):
        self.counts: Counter[str] = Counter()
        self.messages: list[str] = []
        self._strict = strict
        self._limit = limit

    def __len__(self) -> int:
        return sum(self.counts.values())

    def add(self, problem: UnusableConversationError) -> None:
        """Counts a problem.

        Raises:
            ValueError: In strict mode at once; else when there are more than the limit.
        """
        if self._strict:
            raise ValueError(f"{problem} (data.strict stops at the first one)") from problem
        self.counts[problem.reason] += 1
        if len(self.messages) < 5:
            self.messages.append(str(problem))
        if self._limit is not None and len(self) > self._limit:
            raise ValueError(
                f"more than {self._limit} unusable lines (data.bad_line_limit);"
                f" {self.summary()}{self.first()}"
            ) from problem

    def summary(self) -> str:
        """The counts by reason, most frequent first; empty when there is none."""
        return ", ".join(f"{count} x {reason}" for reason, count in self.counts.most_common())

    def first(self) -> str:
        """The first problem as the end of a message; empty when there is none."""
        return f"; the first is {self.messages[0]}" if self.messages else ""
