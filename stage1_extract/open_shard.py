"""An open shard: one attempt at a unit, from its first batch to the seal, one step at a time.

What the CPU uses as it is, and what the pipeline of a GPU runs in its own threads.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType

from jaxtyping import Float
from torch import Tensor

from stage1_extract.encode import EncodedBatch, encode_on_host
from stage1_extract.loss_sample import measure_sample, take_sample
from stage1_extract.problems import UnusableConversationError
from stage1_extract.sequences import TokenSequence
from stage1_extract.worker_metrics import Counts, WorkerMetrics
from storage.losses import EncodingLoss
from storage.schema import LayerRecord
from storage.writer import ShardWriter

_SHOWN_OF_EACH_REASON = 3


class OpenShard:
    """Encodes and appends batches; leaving it without `finish` drops the attempt."""

    def __init__(
        self, writer: ShardWriter, layers: Mapping[str, LayerRecord], metrics: WorkerMetrics
    ):
        self._writer = writer
        self._layers = layers
        self._metrics = metrics
        self._counts = Counts()
        self._is_sealed = False

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Around the forward pass of the batch that is added next."""
        with self._metrics.timed("forward"):
            yield

    def add(
        self, sequences: Sequence[TokenSequence], states: Mapping[str, Float[Tensor, "tokens _"]]
    ) -> None:
        """Encodes a batch's states and appends its sequences.

        Args:
            sequences: The batch.
            states: By layer name, the sequences' tokens end to end.
        """
        with self._metrics.timed("encode"):
            batch = encode_on_host(states, self._layers)
        self.append(sequences, batch, sample=take_sample(states) if self.is_empty else None)

    @property
    def is_empty(self) -> bool:
        """Whether no batch was appended yet: the first one is sampled for what encoding loses."""
        return self._counts.num_tokens == 0

    def append(
        self,
        sequences: Sequence[TokenSequence],
        batch: EncodedBatch,
        *,
        sample: Mapping[str, Float[Tensor, "sampled _"]] | None = None,
    ) -> None:
        """Appends encoded sequences; those that are not finite are skipped with a reason.

        Args:
            sequences: The batch.
            batch: Its states, encoded.
            sample: What `take_sample` kept of the states; None measures nothing.
        """
        if sample is not None:
            self._writer.count_losses(measure_sample(sample, batch, self._layers))
        start = 0
        for sequence in sequences:
            tokens = slice(start, start + sequence.num_tokens)
            start = tokens.stop
            broken_layer = batch.broken_layer(tokens)
            if broken_layer is not None:
                self.skip({sequence.id: _not_finite(sequence, broken_layer)})
                continue
            num_bytes_before = self._writer.num_bytes
            with self._metrics.timed("write"):
                self._writer.append(
                    sequence_id=sequence.id,
                    token_ids=sequence.token_ids,
                    loss_mask=sequence.loss_mask,
                    greedy=sequence.greedy,
                    states=batch.of(tokens),
                )
            saturated = batch.saturated_by_layer(tokens)
            self._writer.count_losses(
                {name: EncodingLoss(num_saturated=count) for name, count in saturated.items()}
            )
            self._count(
                Counts(
                    num_sequences=1,
                    num_tokens=sequence.num_tokens,
                    num_truncated=int(sequence.is_truncated),
                    num_bytes=self._writer.num_bytes - num_bytes_before,
                    num_saturated=sum(saturated.values()),
                )
            )
        self._metrics.progress()

    def skip(self, unusable: Mapping[str, UnusableConversationError]) -> None:
        """Records sequences that hold no states, in the shard and in the counts."""
        for sequence_id, problem in unusable.items():
            self._writer.skip(sequence_id=sequence_id, reason=problem.reason)
            self._count(Counts.of_problem(problem))
            if self._metrics.counts.skipped[problem.reason] <= _SHOWN_OF_EACH_REASON:
                print(f"skipped {problem}", file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Seals the shard: everything on disk, then the commit, unless another worker was first."""
        with self._metrics.timed("write"):
            self._is_sealed = self._writer.seal()
        if self._is_sealed:
            self._count(Counts(num_units=1))
            self._metrics.progress(now=True)

    def drop(self) -> None:
        """Removes the attempt and takes its counts back, unless it is sealed."""
        if not self._is_sealed:
            self._writer.drop()
            self._metrics.take_back(self._counts)
            self._counts = Counts()

    def _count(self, counts: Counts) -> None:
        self._counts.add(counts)
        self._metrics.add(counts)

    def __enter__(self) -> "OpenShard":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.drop()


def _not_finite(sequence: TokenSequence, layer: str) -> UnusableConversationError:
    return UnusableConversationError(
        f"NaN or infinity in layer {layer}", source=f"sequence {sequence.id}"
    )
