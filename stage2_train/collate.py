"""Makes one batch of fixed shape out of stored sequences: tensors, still encoded, on the host."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int64, Shaped
from torch import Tensor

from stage2_train.architecture import DrafterArchitecture
from stage2_train.batches import Window
from stage2_train.blocks import Blocks, Supervision, make_blocks
from stage2_train.masks import BatchMasks, batch_masks
from storage.encodings import EncodedStates
from storage.reader import SequenceStates


@dataclass(frozen=True, kw_only=True)
class EncodedLayer:
    """One layer's states of a batch, as stored; padding is zero."""

    data: Shaped[Tensor, "tokens width"]
    scales: Float32[Tensor, "tokens"] | None

    def to(self, device: torch.device) -> "EncodedLayer":
        """Copies to a device, without waiting where the source is pinned."""
        return EncodedLayer(
            data=self.data.to(device, non_blocking=True),
            scales=None if self.scales is None else self.scales.to(device, non_blocking=True),
        )


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Everything one step needs. Only the number of rows differs from batch to batch."""

    layers: tuple[EncodedLayer, ...]
    """States of each target layer, in the drafter's order."""
    positions: Int64[Tensor, "tokens"]
    """Place of each token in its sequence; 0 for padding."""
    context_start: Int64[Tensor, "blocks"]
    context_stop: Int64[Tensor, "blocks"]
    block_token_ids: Int64[Tensor, "queries"]
    """Anchor token at offset 0, mask token elsewhere."""
    block_positions: Int64[Tensor, "queries"]
    """Place of each block token in its sequence."""
    row_index: Int64[Tensor, "rows"]
    """Block tokens that have a label, as places among the queries."""
    row_label: Int64[Tensor, "rows"]
    row_weight: Float32[Tensor, "rows"]
    weight_sum: float
    """What the loss is divided by: the sum of `row_weight`, or the number of blocks."""
    num_real_tokens: int
    """Tokens that are not padding."""
    num_real_blocks: int
    """Blocks that are not padding."""
    num_seen_pairs: int
    """Pairs of a query and a key that it may see, in a layer without a window."""
    masks: BatchMasks | None = None
    """The layers' masks, where the loader has built them beside the copy to the device."""

    @property
    def num_state_bytes(self) -> int:
        """Stored bytes of the real tokens' states: what was read for them."""
        parts = [part for layer in self.layers for part in (layer.data, layer.scales)]
        num_bytes = sum(part.nbytes for part in parts if part is not None)
        return num_bytes * self.num_real_tokens // len(self.positions)

    def to(self, device: torch.device) -> "PackedBatch":
        """Copies to a device, without waiting where the source is pinned."""
        moved: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in moved.items():
            if isinstance(value, Tensor):
                moved[name] = value.to(device, non_blocking=True)
        moved["layers"] = tuple(layer.to(device) for layer in self.layers)
        return PackedBatch(**moved)

    def pinned(self) -> "PackedBatch":
        """The same in memory that a GPU copies from by itself; the layers are there already."""
        tensors: dict[str, Any] = {
            f.name: value.pin_memory()
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **tensors)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tells the allocator that a stream uses this batch, made on another one."""
        tensors = [getattr(self, f.name) for f in fields(self)]
        tensors += [part for layer in self.layers for part in (layer.data, layer.scales)]
        tensors += () if self.masks is None else self.masks.tensors
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                tensor.record_stream(stream)


def without_weights(batch: PackedBatch) -> PackedBatch:
    """Gives the batch with labels that do not count: work that nothing is learned from."""
    return replace(
        batch,
        row_weight=torch.zeros_like(batch.row_weight),
        weight_sum=0.0,
        num_real_tokens=0,
        num_real_blocks=0,
    )


def with_masks(
    batch: PackedBatch, *, architecture: DrafterArchitecture, is_flex_wanted: bool = False
) -> PackedBatch:
    """Gives the batch with the attention masks of a drafter's layers, built where the batch is."""
    masks = batch_masks(
        batch.context_start,
        batch.context_stop,
        num_context_tokens=len(batch.positions),
        architecture=architecture,
        is_flex_wanted=is_flex_wanted,
    )
    return replace(batch, masks=masks)


def supervision_of(sequence: SequenceStates, window: Window) -> Supervision:
    """Gives the tokens and loss mask of a window that was read."""
    return Supervision(
        sequence_id=sequence.sequence_id,
        token_ids=sequence.token_ids,
        loss_mask=sequence.loss_mask,
        first_position=window.start,
    )


def collate(
    sequences: Sequence[SequenceStates],
    windows: Sequence[Window],
    *,
    layer_names: Sequence[str],
    batch_tokens: int,
    num_anchors: int,
    weight_of_offset: Float32[np.ndarray, "block_size"],
    mask_token_id: int,
    seed: int,
    epoch: int,
    stop_at_unsupervised: bool = False,
    is_divided_by_blocks: bool = False,
    pin_memory: bool = False,
) -> PackedBatch:
    """Packs the windows of one batch end to end, pads the end, and makes its blocks.

    Args:
        sequences: what was read for each window.
        windows: the windows of the batch.
        layer_names: layers in the drafter's order.
        batch_tokens: token budget; the batch has exactly so many.
        num_anchors: blocks; the batch has exactly so many.
        weight_of_offset: what `blocks.offset_weights` gave.
        mask_token_id: token of a position to draft.
        seed: seed of the run.
        epoch: pass over the data.
        stop_at_unsupervised: see `blocks.label_blocks`.
        is_divided_by_blocks: whether the loss is divided by the number of blocks.
        pin_memory: whether the states lie in memory that a GPU copies from by itself.
    """
    blocks = make_blocks(
        [supervision_of(s, w) for s, w in zip(sequences, windows, strict=True)],
        num_anchors=num_anchors,
        weight_of_offset=weight_of_offset,
        seed=seed,
        epoch=epoch,
        stop_at_unsupervised=stop_at_unsupervised,
    )
    positions = np.zeros(batch_tokens, np.int64)
    num_real_tokens = sum(window.num_tokens for window in windows)
    positions[:num_real_tokens] = np.concatenate([np.arange(w.start, w.stop) for w in windows])
    batch = batch_of(
        blocks,
        layers=tuple(
            pack_layer(
                [sequence.states[name] for sequence in sequences],
                num_tokens=batch_tokens,
                pin_memory=pin_memory,
            )
            for name in layer_names
        ),
        positions=positions,
        num_real_tokens=num_real_tokens,
        mask_token_id=mask_token_id,
    )
    if is_divided_by_blocks:
        batch = replace(batch, weight_sum=float(batch.num_real_blocks))
    return batch.pinned() if pin_memory else batch


def batch_of(
    blocks: Blocks,
    *,
    layers: tuple[EncodedLayer, ...],
    positions: Int64[np.ndarray, "tokens"],
    num_real_tokens: int,
    mask_token_id: int,
) -> PackedBatch:
    """Turns blocks and packed layers into the tensors of a step."""
    block_size = blocks.weight.shape[1]
    offset = np.arange(block_size)
    block_token_ids = np.where(offset == 0, blocks.anchor_token_id[:, None], mask_token_id)
    row_index = np.flatnonzero(blocks.weight)
    return PackedBatch(
        layers=layers,
        positions=torch.from_numpy(positions),
        context_start=torch.from_numpy(blocks.context_start),
        context_stop=torch.from_numpy(blocks.context_stop),
        block_token_ids=torch.from_numpy(block_token_ids.reshape(-1)),
        block_positions=torch.from_numpy((blocks.position[:, None] + offset).reshape(-1)),
        row_index=torch.from_numpy(row_index),
        row_label=torch.from_numpy(blocks.label.reshape(-1)[row_index]),
        row_weight=torch.from_numpy(blocks.weight.reshape(-1)[row_index]),
        weight_sum=float(blocks.weight.sum(dtype=np.float64)),
        num_real_tokens=num_real_tokens,
        num_real_blocks=blocks.num_valid,
        num_seen_pairs=int(
            (blocks.context_stop - blocks.context_start + block_size).sum() * block_size
        ),
    )


def pack_layer(
    parts: Sequence[EncodedStates], *, num_tokens: int, pin_memory: bool = False
) -> EncodedLayer:
    """Lays one layer's sequences end to end in a buffer of `num_tokens`; the rest is zero."""
    return EncodedLayer(
        data=_laid_end_to_end([part.data for part in parts], num_tokens, pin_memory=pin_memory),
        scales=None
        if parts[0].scales is None
        else _laid_end_to_end(
            [part.scales for part in parts if part.scales is not None],
            num_tokens,
            pin_memory=pin_memory,
        ),
    )


def _laid_end_to_end(arrays: Sequence[np.ndarray], num_tokens: int, *, pin_memory: bool) -> Tensor:
    dtype = torch.from_numpy(arrays[0][:0]).dtype
    packed = torch.empty((num_tokens, *arrays[0].shape[1:]), dtype=dtype, pin_memory=pin_memory)
    view = packed.numpy()
    start = 0
    for array in arrays:
        view[start : start + len(array)] = array
        start += len(array)
    view[start:] = 0
    return packed
