"""Many small drafters trained side by side on one GPU, their states kept in its memory.

A small drafter's step is a few hundred short kernels, so that launching them takes longer than
running them. Here a step (gather the states, decode, draft, loss, gradients) is recorded once for
each drafter as a CUDA graph and replayed on the drafter's own stream; the graphs of all drafters
run beside each other. What is computed is the product's: `batch_loss` and `MasterAdamW`. A batch
differs from `collate`'s in one thing, for a graph has one shape: rows that count for nothing fill
it up to one row for each place of each block.

Acceptance is judged at every position of every answer at once, by the same forward pass; the walk
over the answer then only looks the lengths up. It is that of `stage2_train.walk`, but for the
last blocks of an answer cut off at its length limit, which real decoding drafts shorter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from stage2_train.blocks import Supervision, make_blocks
from stage2_train.collate import EncodedLayer, PackedBatch, batch_of
from stage2_train.config import OptimizerConfig
from stage2_train.decode import LayerDecoder
from stage2_train.drafter import Drafter, DrafterArchitecture
from stage2_train.fast_path import FastPath
from stage2_train.optimizer import MasterAdamW
from stage2_train.step import batch_loss, draft_rows
from stage2_train.target_head import TargetHead

NO_LABEL = -1
NO_ROW = -1
_ARGMAX_ROWS = 4096


# --- batches of one shape -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Sizes of a batch, and where its numbers lie in one flat row."""

    batch_tokens: int
    num_anchors: int
    block_size: int

    @property
    def num_rows(self) -> int:
        """Places of all blocks but their anchors."""
        return self.num_anchors * (self.block_size - 1)

    @property
    def drafted_places(self) -> np.ndarray:
        """Places of all block tokens but anchors, in order."""
        every_place = np.arange(self.num_anchors * self.block_size)
        return every_place[every_place % self.block_size != 0]

    @property
    def sizes(self) -> dict[str, int]:
        """Length of each part of a flat row, in its order."""
        num_queries = self.num_anchors * self.block_size
        return {
            "state_rows": self.batch_tokens,
            "positions": self.batch_tokens,
            "context_start": self.num_anchors,
            "context_stop": self.num_anchors,
            "block_token_ids": num_queries,
            "block_positions": num_queries,
            "row_index": self.num_rows,
            "row_label": self.num_rows,
        }

    def parts(self, flat: Tensor) -> dict[str, Tensor]:
        """The parts of a flat row; views."""
        return dict(zip(self.sizes, flat.split(list(self.sizes.values())), strict=True))


@dataclass(frozen=True, kw_only=True)
class FlatBatches:
    """Many batches of one shape as two arrays."""

    numbers: np.ndarray
    """int32 [batches, numbers of `BatchShape.sizes`]."""
    weights: np.ndarray
    """float32 [batches, rows]: weight of each row's loss over the sum of the batch's weights."""


def flat_batch(
    batch: PackedBatch, state_rows: np.ndarray, shape: BatchShape
) -> tuple[np.ndarray, np.ndarray]:
    """A batch, filled up to its shape with rows that count for nothing, as (numbers, weights).

    Those rows stand at the places that have no label, and have no weight.
    """
    labelled = batch.row_index.numpy()
    # Neither at anchors nor twice at a place: compiled layers leave anchors out, and gradients of
    # rows are written to their places, not added up.
    unlabelled = np.setdiff1d(shape.drafted_places, labelled)
    missing = len(unlabelled)
    values = {
        "state_rows": state_rows,
        **{
            name: getattr(batch, name).numpy()
            for name in ("positions", "context_start", "context_stop")
        },
        "block_token_ids": batch.block_token_ids.numpy(),
        "block_positions": batch.block_positions.numpy(),
        "row_index": np.concatenate((labelled, unlabelled)),
        "row_label": np.pad(batch.row_label.numpy(), (0, missing)),
    }
    numbers = np.concatenate([values[name] for name in shape.sizes]).astype(np.int32)
    weights = batch.row_weight.numpy() / np.float32(max(batch.weight_sum, 1e-30))
    return numbers, np.pad(weights, (0, missing)).astype(np.float32)


def answer_batch(
    sequences: Sequence[Supervision],
    state_rows: Sequence[np.ndarray],
    shape: BatchShape,
    *,
    mask_token_id: int,
) -> np.ndarray:
    """The numbers of a batch with a block at every position of some answers.

    Its rows are all places of all blocks in their order; those without a label have `NO_LABEL`.

    Args:
        sequences: answers with their prompts; the shape must have room for all their blocks.
        state_rows: where each one's states lie.
        shape: of the batch.
        mask_token_id: token of a position to draft.
    """
    every_offset = np.ones(shape.block_size, np.float32)
    every_offset[0] = 0.0
    num_tokens = [len(sequence.token_ids) for sequence in sequences]
    positions = np.zeros(shape.batch_tokens, np.int64)
    positions[: sum(num_tokens)] = np.concatenate([np.arange(count) for count in num_tokens])
    blocks = make_blocks(
        sequences, num_anchors=shape.num_anchors, weight_of_offset=every_offset, seed=0, epoch=0
    )
    batch = batch_of(
        blocks,
        layers=(),
        positions=positions,
        num_real_tokens=sum(num_tokens),
        mask_token_id=mask_token_id,
    )
    labels = np.where(blocks.weight > 0, blocks.label, NO_LABEL)
    whole = replace(
        batch,
        row_index=torch.from_numpy(shape.drafted_places),
        row_label=torch.from_numpy(labels[:, 1:].reshape(-1).copy()),
        row_weight=torch.zeros(shape.num_rows),
    )
    return flat_batch(whole, filled_up(state_rows, shape.batch_tokens), shape)[0]


def filled_up(state_rows: Sequence[np.ndarray], batch_tokens: int) -> np.ndarray:
    """Rows of a batch's states, padding included: `NO_ROW` there."""
    rows = np.full(batch_tokens, NO_ROW, np.int64)
    joined = np.concatenate(state_rows)
    rows[: len(joined)] = joined
    return rows


# --- states -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ResidentStates:
    """All states of a store in one encoding, on the device; the last row of each part is zero."""

    layers: Sequence[EncodedLayer]
    decoders: Sequence[LayerDecoder]

    def with_layer(self, number: int, *, of: "ResidentStates") -> "ResidentStates":
        """The same with one layer taken from another encoding."""
        layers, decoders = list(self.layers), list(self.decoders)
        layers[number], decoders[number] = of.layers[number], of.decoders[number]
        return ResidentStates(layers=layers, decoders=decoders)

    def at(self, rows: Tensor) -> tuple[EncodedLayer, ...]:
        """The stored states of some tokens, `NO_ROW` being the zero one."""
        last = len(self.layers[0].data) - 1
        rows = torch.where(rows == NO_ROW, last, rows)
        return tuple(
            EncodedLayer(
                data=layer.data.index_select(0, rows),
                scales=None if layer.scales is None else layer.scales.index_select(0, rows),
            )
            for layer in self.layers
        )


# --- one drafter --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LaneSettings:
    """What all drafters side by side share."""

    architecture: DrafterArchitecture
    head: TargetHead
    shape: BatchShape
    optimizer: OptimizerConfig
    chunk_rows: int
    device: torch.device
    dtype: torch.dtype
    fast_path: FastPath | None


@dataclass
class Lane:
    """One drafter: its weights, its states, its stream, its recorded steps."""

    settings: LaneSettings
    states: ResidentStates
    drafter: Drafter = field(init=False)
    optimizer: MasterAdamW = field(init=False)

    def __post_init__(self) -> None:
        """Makes the drafter and the memory that its batches are copied into."""
        shape, device = self.settings.shape, self.settings.device
        self.drafter = Drafter(self.settings.architecture)
        self.optimizer = MasterAdamW(
            self.drafter, self.settings.optimizer, device=device, dtype=self.settings.dtype
        )
        self._numbers = torch.zeros(sum(shape.sizes.values()), dtype=torch.int64, device=device)
        # As in a batch.
        row_index = shape.parts(self._numbers)["row_index"]
        row_index.copy_(torch.from_numpy(shape.drafted_places))
        self._weights = torch.zeros(shape.num_rows, device=device)
        self._accepted = torch.zeros(shape.num_anchors, dtype=torch.int64, device=device)
        self._loss = torch.zeros((), device=device)
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._gradients: list[Tensor | None] = []
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None

    def start(self, weights: Mapping[str, Tensor]) -> None:
        """Begins anew with these weights."""
        self.optimizer.load(weights, {})

    def batch(self) -> PackedBatch:
        """The batch that lies in the lane's memory, its states gathered now."""
        parts = self.settings.shape.parts(self._numbers)
        return PackedBatch(
            layers=self.states.at(parts.pop("state_rows")),
            row_weight=self._weights,
            weight_sum=1.0,
            num_real_tokens=0,
            num_real_blocks=0,
            num_seen_pairs=0,
            **parts,
        )

    def gradients(self) -> None:
        """Leaves the gradient of the lane's batch in the drafter, its loss in the lane."""
        result = batch_loss(
            self.drafter,
            self.batch(),
            head=self.settings.head,
            decoders=self.states.decoders,
            chunk_rows=self.settings.chunk_rows,
            fast_path=self.settings.fast_path,
        )
        result.loss.backward()  # type: ignore[no-untyped-call]
        self._loss.copy_(result.loss.detach())

    def acceptance(self) -> None:
        """Leaves in the lane how many drafted tokens of each block of its batch are right."""
        batch, head = self.batch(), self.settings.head
        # With gradients, though none is wanted: so it is the function that training compiled.
        rows, _ = draft_rows(
            self.drafter,
            batch,
            head=head,
            decoders=self.states.decoders,
            fast_path=self.settings.fast_path,
        )
        parts = rows.detach().split(_ARGMAX_ROWS)
        drafted = torch.cat([head.logits(part).argmax(dim=1) for part in parts])
        is_right = (drafted == batch.row_label).view(self.settings.shape.num_anchors, -1)
        self._accepted.copy_(is_right.long().cumprod(dim=1).sum(dim=1))

    def record(self) -> None:
        """Runs both functions once as they are, then records them as graphs."""
        if self._stream is None:
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        for name in ("gradients", "acceptance"):
            with torch.cuda.stream(self._stream):
                for _ in range(2):
                    self._clear_gradients()
                    getattr(self, name)()
                self._clear_gradients()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self._stream):
                getattr(self, name)()
            self._graphs[name] = graph
            if name == "gradients":
                self._gradients = [each.grad for each in self.optimizer.parameters]
                self._clear_gradients()
        torch.cuda.synchronize()

    def _clear_gradients(self) -> None:
        for parameter in self.optimizer.parameters:
            parameter.grad = None

    def _run(self, name: str) -> None:
        graph = self._graphs.get(name)
        if graph is None:
            getattr(self, name)()
            return
        graph.replay()
        if name == "gradients":
            for parameter, gradient in zip(self.optimizer.parameters, self._gradients, strict=True):
                parameter.grad = gradient

    def step(self, numbers: Tensor, weights: Tensor, rate: float) -> None:
        """One update on a batch that lies on the device; does not wait."""
        with torch.cuda.stream(self._stream):
            self._numbers.copy_(numbers)
            self._weights.copy_(weights)
            self._run("gradients")
            self.optimizer.step(rate)

    def judge(self, numbers: Tensor, out: Tensor, *, is_recorded: bool = True) -> None:
        """Fills `out` with the accepted tokens of each block of an answer batch; does not wait.

        Other states than those at its recording are seen without it only.
        """
        with torch.cuda.stream(self._stream):
            self._numbers.copy_(numbers)
            if is_recorded:
                self._run("acceptance")
            else:
                self.acceptance()
            out.copy_(self._accepted)

    def loss(self) -> float:
        """Loss of the last step; waits for it."""
        if self._stream is not None:
            self._stream.synchronize()
        return float(self._loss)


def walked_lengths(num_accepted: np.ndarray) -> list[int]:
    """Acceptance lengths of a walk over one answer.

    Args:
        num_accepted: accepted tokens of the block at each position of the answer but its last.
    """
    lengths, position = [], 0
    while position < len(num_accepted):
        gained = min(int(num_accepted[position]) + 1, len(num_accepted) - position)
        lengths.append(gained)
        position += gained
    return lengths
