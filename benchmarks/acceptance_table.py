"""The table of acceptance by encoding, from the rows that `encoding_acceptance.py train` writes."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from encoding_round_trips import ROUND_TRIPS, bytes_per_token

CONTROL = "bf16_again"

Suites = Mapping[str, Mapping[str, float]]
"""By suite: `walk` and `all`, acceptance lengths of the walk and over all positions."""


@dataclass(frozen=True)
class Ratio:
    """A geometric mean of ratios of pairs, and the standard error of its logarithm."""

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:.4f} ± {self.error:.4f}"


def mean_ratio(ratios: Sequence[float]) -> Ratio:
    """Sums up the ratios of independent pairs; one pair alone has no error that is known."""
    logs = np.log(ratios)
    error = float(logs.std(ddof=1)) / len(logs) ** 0.5 if len(logs) > 1 else math.inf
    return Ratio(math.exp(float(logs.mean())), error)


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """What all drafters reached."""

    suites_of: Mapping[tuple[str, int], Suites]
    """By encoding and seed."""

    @classmethod
    def read(cls, paths: Sequence[Path]) -> "Outcomes":
        """Takes rows of several files together."""
        rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
        return cls(suites_of={(row["encoding"], row["seed"]): row["suites"] for row in rows})

    @property
    def encodings(self) -> list[str]:
        """In the order of their rows."""
        return list(dict.fromkeys(name for name, _ in self.suites_of))

    @property
    def suites(self) -> list[str]:
        """Names of what is judged."""
        return sorted(next(iter(self.suites_of.values())))

    def seeds(self, encoding: str) -> list[int]:
        """Seeds of which the encoding and bf16 are there."""
        found = (seed for name, seed in self.suites_of if name == encoding)
        return sorted(seed for seed in found if ("bf16", seed) in self.suites_of)

    def length(self, encoding: str, seed: int, suite: str | None, kind: str) -> float:
        """Acceptance length in a suite; of None the mean of all suites."""
        suites = self.suites_of[encoding, seed]
        return float(np.mean([suites[name][kind] for name in ([suite] if suite else suites)]))

    def ratio(self, encoding: str, suite: str | None = None, kind: str = "walk") -> Ratio:
        """Of the encoding to bf16: to both bf16 drafters of a seed, where there are two.

        The control is held against the first alone, which differs from it in nothing that matters.
        """
        bases = ["bf16"] if encoding in ("bf16", CONTROL) else ["bf16", CONTROL]
        ratios = []
        for seed in self.seeds(encoding):
            logs = [
                math.log(self.length(base, seed, suite, kind))
                for base in bases
                if (base, seed) in self.suites_of
            ]
            base = math.exp(sum(logs) / len(logs))
            ratios.append(self.length(encoding, seed, suite, kind) / base)
        return mean_ratio(ratios)


def print_table(
    outcomes: Outcomes, *, hidden_size: int, num_layers: int
) -> dict[str, tuple[float, str, str]]:
    """Prints the table and gives the figures to record."""
    suites = outcomes.suites
    head = ["encoding", "of bf16", "acceptance", "ratio", "seeds", *suites, "every position"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    figures: dict[str, tuple[float, str, str]] = {}
    for name in outcomes.encodings:
        seeds = outcomes.seeds(name)
        if not seeds:
            continue
        length = float(np.mean([outcomes.length(name, seed, None, "walk") for seed in seeds]))
        ratio, everywhere = outcomes.ratio(name), outcomes.ratio(name, kind="all")
        cells = [
            f"`{name}`",
            f"{num_bytes(name, hidden_size) / (2 * hidden_size):.3f}",
            f"{length:.3f}",
            f"{ratio}",
            f"{len(seeds)}",
            *(f"{outcomes.ratio(name, suite)}" for suite in suites),
            f"{everywhere}",
        ]
        print(f"| {' | '.join(cells)} |")
        note = f"{len(seeds)} seeds, mean of {', '.join(suites)}"
        figures[f"encoding_{name}_acceptance_length"] = (length, "tokens", note)
        if name != "bf16":
            note = (
                f"standard error {ratio.error:.4f}, {len(seeds)} paired seeds; "
                f"over every position {everywhere}; "
                f"{num_layers * num_bytes(name, hidden_size):,.0f} bytes a token"
            )
            figures[f"encoding_{name}_acceptance_ratio"] = (ratio.mean, "1", note)
    return figures


def num_bytes(encoding: str, hidden_size: int) -> float:
    """Bytes of one token and layer; the mean where each layer has an encoding of its own."""
    name = "bf16" if encoding == CONTROL else encoding
    parts = [name] if name in ROUND_TRIPS else name.split(".")
    return sum(bytes_per_token(part, hidden_size) for part in parts) / len(parts)
