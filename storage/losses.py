"""What encoding lost, counted per layer while a shard is written and kept in its commit record."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32

from storage.encodings import EncodedStates, decode
from storage.schema import LayerRecord


@dataclass(frozen=True, kw_only=True)
class EncodingLoss:
    """Losses of one layer; those of parts add up to that of the whole."""

    num_measured_tokens: int = 0
    """Tokens that were decoded again and compared: a sample."""
    sum_squared_errors: float = 0.0
    """Over those tokens, the squared relative error: |decoded - exact|^2 / |exact|^2."""
    num_saturated: int = 0
    """Values of all tokens that lay beyond what the encoding can hold and were cut."""

    def __add__(self, other: "EncodingLoss") -> "EncodingLoss":
        return EncodingLoss(
            num_measured_tokens=self.num_measured_tokens + other.num_measured_tokens,
            sum_squared_errors=self.sum_squared_errors + other.sum_squared_errors,
            num_saturated=self.num_saturated + other.num_saturated,
        )

    @property
    def relative_error(self) -> float:
        """Root mean square over tokens of their relative errors; NaN if none was measured.

        Each token counts alike: the first ones, thousands of times larger, decide nothing.
        """
        if not self.num_measured_tokens:
            return float("nan")
        return float(np.sqrt(self.sum_squared_errors / self.num_measured_tokens))

    def to_json(self) -> dict[str, Any]:
        """The loss as JSON values."""
        return asdict(self)


def measure_loss(
    record: LayerRecord, exact: Float32[np.ndarray, "tokens hidden"], encoded: EncodedStates
) -> EncodingLoss:
    """Decodes some tokens of a layer again and compares them with what they were."""
    decoded = decode(record.encoding, encoded, channel_scales=record.channel_scale_array)
    error = np.square(decoded.astype(np.float64) - exact).sum(axis=1)
    size = np.square(exact.astype(np.float64)).sum(axis=1)
    return EncodingLoss(
        num_measured_tokens=len(exact),
        sum_squared_errors=float((error / np.maximum(size, 1e-60)).sum()),
    )


def total_losses(parts: Iterable[Mapping[str, EncodingLoss]]) -> dict[str, EncodingLoss]:
    """Losses by layer, summed over shards."""
    total: dict[str, EncodingLoss] = {}
    for losses in parts:
        for name, loss in losses.items():
            total[name] = total.get(name, EncodingLoss()) + loss
    return total
