"""The walk: exact greedy acceptance from the store alone, without the target.

On an answer that the target itself wrote greedily, speculative decoding can be replayed: draft at
the answer's first token, count the drafted tokens that equal the answer's own, jump behind the
token after them, repeat. Decoding is lossless, so these are the positions and acceptance lengths
of real decoding, up to floating-point ties.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from stage2_train.acceptance import accept_greedy, accepted_by_offset, mean_acceptance_length
from stage2_train.decode import LayerDecoder, decode_layer, layer_decoders
from stage2_train.draft import ContextCache, draft_logits, head_of
from stage2_train.drafter import Drafter
from stage2_train.target_head import TargetHead
from storage.encodings import EncodedStates
from storage.reader import SequenceStates, Snapshot

_NO_TOKEN = -1


@dataclass(frozen=True, kw_only=True)
class WalkSequence:
    """One greedy answer with what stands before it."""

    token_ids: Sequence[int]
    """Prompt and answer; the answer ends the sequence."""
    answer_start: int
    """Position of the answer's first token."""
    states: Float[Tensor, "tokens features"]
    """Hidden states of the drafter's target layers at every position, side by side."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Where decoding would have stopped to look."""

    acceptance_lengths: list[list[int]]
    """Tokens gained by each pass, by sequence; empty for an answer of one token."""
    block_size: int

    @property
    def acceptance_length(self) -> float:
        """Mean over sequences of each one's mean."""
        return mean_acceptance_length(self.acceptance_lengths)

    @property
    def accepted_by_offset(self) -> list[float]:
        """Share of blocks whose acceptance length is above offset 1, 2, ..."""
        return accepted_by_offset(self.acceptance_lengths, block_size=self.block_size)


def walk_store(
    drafter: Drafter,
    head: TargetHead,
    snapshot: Snapshot,
    indices: Iterable[int],
    *,
    batch_tokens: int = 32_768,
) -> Walk:
    """Walks every greedy answer of some stored sequences; other sequences are passed over.

    Memory is bounded by `batch_tokens` tokens of states and the drafter's context of as many.

    Args:
        drafter: the drafter; its weights' type and device are used.
        head: the target's embedding and LM head.
        snapshot: what the store holds.
        indices: sequences of the snapshot, usually held-out ones.
        batch_tokens: tokens of sequences read and walked together.
    """
    records = snapshot.store.layers
    names = [str(layer_id) for layer_id in drafter.architecture.target_layer_ids]
    decoders = layer_decoders(records, names, drafter.fc.weight.device)
    lengths: list[list[int]] = []
    group: list[WalkSequence] = []
    for index in indices:
        if not snapshot.greedy[index]:
            continue
        stored = snapshot.read(int(index), layers=names)
        states = decode_states(
            [stored.states[name] for name in names], decoders, like=drafter.fc.weight
        )
        group += stored_answers(stored, states)
        if sum(sequence.num_tokens for sequence in group) >= batch_tokens:
            lengths += walk(drafter, head, group, batch_tokens=batch_tokens).acceptance_lengths
            group = []
    lengths += walk(drafter, head, group, batch_tokens=batch_tokens).acceptance_lengths
    return Walk(acceptance_lengths=lengths, block_size=drafter.architecture.block_size)


def stored_answers(
    stored: SequenceStates, states: Float[Tensor, "tokens features"]
) -> list[WalkSequence]:
    """Gives each answer of a stored conversation, with everything before it as its prompt."""
    return [
        WalkSequence(
            token_ids=stored.token_ids[:stop].tolist(), answer_start=start, states=states[:stop]
        )
        for start, stop in supervised_runs(stored.loss_mask)
        if start > 0
    ]


def supervised_runs(loss_mask: Bool[np.ndarray, "tokens"]) -> list[tuple[int, int]]:
    """Gives first position and end of each unbroken run of supervised tokens."""
    edges = np.flatnonzero(np.diff(loss_mask, prepend=False, append=False))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def decode_states(
    layers: Sequence[EncodedStates], decoders: Sequence[LayerDecoder], *, like: Tensor
) -> Float[Tensor, "tokens features"]:
    """Gives one sequence's stored layers side by side, in the type and place of `like`."""
    num_tokens = len(layers[0].data)
    width = like.shape[0]
    states = like.new_empty((num_tokens, width * len(layers)))
    for number, (layer, decoder) in enumerate(zip(layers, decoders, strict=True)):
        scales = None if layer.scales is None else torch.from_numpy(layer.scales).to(like.device)
        decode_layer(
            decoder,
            torch.from_numpy(layer.data).to(like.device),
            scales,
            out=states[:, number * width : (number + 1) * width],
        )
    return states


@torch.inference_mode()
def walk(
    drafter: Drafter,
    head: TargetHead,
    sequences: Sequence[WalkSequence],
    *,
    batch_tokens: int = 32_768,
) -> Walk:
    """Walks many sequences at once.

    Args:
        drafter: the drafter; its weights' type and device are used.
        head: the target's embedding and LM head.
        sequences: greedy answers.
        batch_tokens: tokens of sequences walked together, padding included; bounds the memory.
    """
    head = head_of(drafter, head)
    lengths: list[list[int]] = [[] for _ in sequences]
    for indices in _batches(sequences, batch_tokens=batch_tokens):
        walked = _walk_batch(drafter, head, [sequences[index] for index in indices])
        for index, acceptance_lengths in zip(indices, walked, strict=True):
            lengths[index] = acceptance_lengths
    return Walk(acceptance_lengths=lengths, block_size=drafter.architecture.block_size)


def _batches(sequences: Sequence[WalkSequence], *, batch_tokens: int) -> Iterator[list[int]]:
    """Groups sequences of like length so that each group fits the budget once padded."""
    batch: list[int] = []
    for index in sorted(range(len(sequences)), key=lambda index: sequences[index].num_tokens):
        if batch and (len(batch) + 1) * sequences[index].num_tokens > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _walk_batch(
    drafter: Drafter, head: TargetHead, sequences: Sequence[WalkSequence]
) -> list[list[int]]:
    device, block_size = drafter.fc.weight.device, drafter.architecture.block_size
    longest = max(sequence.num_tokens for sequence in sequences)
    # Places past the end of an answer hold no token: nothing drafted there can match.
    token_ids = torch.full((len(sequences), longest + block_size), _NO_TOKEN)
    for row, sequence in enumerate(sequences):
        token_ids[row, : sequence.num_tokens] = torch.as_tensor(sequence.token_ids)
    token_ids = token_ids.to(device)
    context = _context(drafter, sequences, longest=longest)
    lengths: list[list[int]] = [[] for _ in sequences]
    starts = torch.tensor([sequence.answer_start for sequence in sequences], device=device)
    ends = torch.tensor([sequence.num_tokens for sequence in sequences], device=device)
    limits = _length_limits(sequences, head.eos_token_ids, block_size=block_size).to(device)
    offsets = torch.arange(block_size, device=device)
    while bool((is_active := starts + 1 < ends).any()):
        # Walked answers draft once more at their last token, in vain.
        block = token_ids.gather(1, starts[:, None] + offsets)
        block_lengths = (limits - starts).clamp(1, block_size)
        drafted = draft_logits(
            drafter,
            head,
            context,
            anchor_ids=block[:, 0],
            anchors=starts,
            block_lengths=block_lengths,
            num_visible=longest,
        ).argmax(dim=-1)
        num_accepted = accept_greedy(drafted, block[:, 1:], block_lengths - 1)
        gained = torch.minimum(num_accepted + 1, ends - starts - 1) * is_active
        for row, num_gained in enumerate(gained.tolist()):
            if num_gained > 0:
                lengths[row].append(num_gained)
        starts = starts + gained
    return lengths


def _context(drafter: Drafter, sequences: Sequence[WalkSequence], *, longest: int) -> ContextCache:
    weight = drafter.fc.weight
    states = weight.new_zeros((len(sequences), longest, weight.shape[1]))
    for row, sequence in enumerate(sequences):
        states[row, : sequence.num_tokens] = sequence.states
    context = ContextCache(drafter, batch_size=len(sequences), num_slots=longest)
    positions = torch.arange(longest, device=weight.device).expand(len(sequences), -1)
    context.write(states, positions, positions)
    return context


def _length_limits(
    sequences: Sequence[WalkSequence], stop_token_ids: Iterable[int], *, block_size: int
) -> Tensor:
    """Gives the length at which decoding would have stopped drafting further.

    An answer that ends with a stop token ended before its limit, so its last blocks were whole;
    any other answer ended at its limit, where decoding drafts shorter blocks.
    """
    stops = set(stop_token_ids)
    return torch.tensor(
        [
            sequence.num_tokens + (block_size if sequence.token_ids[-1] in stops else 0)
            for sequence in sequences
        ]
    )
