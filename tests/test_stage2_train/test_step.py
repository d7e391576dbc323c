"""What a block may see, what it is asked, and that neighbours in a batch change nothing.

Each law is also run on a version shifted by one, which it must notice.
"""

import dataclasses

import numpy as np
import pytest
import torch

import stage2_train.attention
import stage2_train.blocks
import stage2_train.data
from stage2_train.attention import make_decoding_attend, visible
from stage2_train.batches import Window
from stage2_train.blocks import (
    Supervision,
    blocks_at,
    concatenate,
    eligible_anchors,
    label_blocks,
    offset_weights,
)
from stage2_train.collate import PackedBatch, batch_of, collate, pack_layer
from stage2_train.config import TrainConfig
from stage2_train.data import make_batch_maker
from stage2_train.decode import LayerDecoder
from stage2_train.drafter import Drafter, initialize
from stage2_train.step import (
    batch_loss,
    decode_features,
    draft_blocks,
    reference_attend,
    training_attend,
)
from stage2_train.target_head import TargetHead
from storage.encodings import EncodedStates, encode
from storage.reader import SequenceStates, open_store
from tests.test_stage2_train.conftest import tied_head

LAYER_NAMES, ENCODINGS = ("1", "2"), ("bf16", "fp8")
DECODERS = tuple(LayerDecoder(encoding=encoding) for encoding in ENCODINGS)
BLOCK_SIZE = 5
WEIGHTS = offset_weights(BLOCK_SIZE)


@pytest.fixture
def head(architecture) -> TargetHead:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(
        architecture.vocab_size, architecture.hidden_size, generator=generator, dtype=torch.float64
    )
    return tied_head(weight)


@pytest.fixture(
    params=[
        {},
        {"is_causal": True},
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4},
    ],
    ids=["full", "causal", "sliding"],
)
def drafter(request, architecture) -> Drafter:
    drafter = Drafter(dataclasses.replace(architecture, **request.param))
    initialize(drafter, seed=0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    return drafter.double()


def make_sequence(number: int, num_tokens: int) -> SequenceStates:
    rng = np.random.default_rng(number)
    states = rng.standard_normal((2, num_tokens, 32)).astype(np.float32)
    return SequenceStates(
        sequence_id=f"sequence-{number}",
        token_ids=rng.integers(0, 60, num_tokens).astype(np.int32),
        loss_mask=rng.random(num_tokens) < 0.8,
        greedy=True,
        states={
            name: encode(encoding, layer)
            for name, encoding, layer in zip(LAYER_NAMES, ENCODINGS, states, strict=True)
        },
    )


SEQUENCES = [make_sequence(number, num_tokens) for number, num_tokens in enumerate((17, 25, 9))]


def make_batch(
    sequences: list[SequenceStates], *, batch_tokens: int = 60, num_anchors: int = 20
) -> PackedBatch:
    return collate(
        sequences,
        [Window(sequence_index=0, start=0, stop=len(s.token_ids)) for s in sequences],
        layer_names=LAYER_NAMES,
        batch_tokens=batch_tokens,
        num_anchors=num_anchors,
        weight_of_offset=WEIGHTS,
        mask_token_id=63,
        seed=0,
        epoch=0,
    )


@torch.no_grad()
def drafted(drafter: Drafter, head: TargetHead, batch: PackedBatch) -> torch.Tensor:
    hidden = draft_blocks(drafter, batch, head=head, decoders=DECODERS)
    return hidden.unflatten(0, (-1, BLOCK_SIZE))


def replace_part(sequence: SequenceStates, **changes) -> SequenceStates:
    return dataclasses.replace(sequence, **changes)


def with_other_states(sequence: SequenceStates, first: int) -> SequenceStates:
    """The sequence with other hidden states from position `first` on."""
    other = make_sequence(100, len(sequence.token_ids))
    return replace_part(
        sequence,
        states={
            name: EncodedStates(
                data=np.concatenate([states.data[:first], other.states[name].data[first:]]),
                scales=None
                if states.scales is None
                else np.concatenate([states.scales[:first], other.states[name].scales[first:]]),
            )
            for name, states in sequence.states.items()
        },
    )


def with_other_tokens(sequence: SequenceStates, first: int) -> SequenceStates:
    """The sequence with other token ids from position `first` on."""
    token_ids = sequence.token_ids.copy()
    token_ids[first:] = (token_ids[first:] + 1) % 60
    return replace_part(sequence, token_ids=token_ids)


def check_that_no_block_sees_the_future(drafter: Drafter, head: TargetHead) -> None:
    """Changing states at or after an anchor, or tokens after it, changes nothing for its block."""
    before = make_batch(SEQUENCES)
    expected = drafted(drafter, head, before)
    first_token = 17
    blocks = [b for b in range(20) if before.context_start[b] == first_token][::3]
    assert len(blocks) > 2
    for block in blocks:
        anchor = int(before.context_stop[block]) - first_token
        states = make_batch([SEQUENCES[0], with_other_states(SEQUENCES[1], anchor), SEQUENCES[2]])
        assert torch.equal(drafted(drafter, head, states)[block], expected[block])
        tokens = make_batch(
            [SEQUENCES[0], with_other_tokens(SEQUENCES[1], anchor + 1), SEQUENCES[2]]
        )
        assert torch.equal(drafted(drafter, head, tokens)[block], expected[block])


def check_that_every_block_sees_the_token_before(drafter: Drafter, head: TargetHead) -> None:
    """The state just before the anchor, the newest one there is, does change the block."""
    before = make_batch(SEQUENCES)
    expected = drafted(drafter, head, before)
    for block in range(0, 20, 2):
        start, stop = int(before.context_start[block]), int(before.context_stop[block])
        if start != 17 or stop - start == 0:
            continue
        earlier = with_other_states(SEQUENCES[1], stop - start - 1)
        found = drafted(drafter, head, make_batch([SEQUENCES[0], earlier, SEQUENCES[2]]))
        assert not torch.equal(found[block], expected[block])


def test_no_block_sees_the_future(drafter, head):
    check_that_no_block_sees_the_future(drafter, head)
    check_that_every_block_sees_the_token_before(drafter, head)


@pytest.mark.parametrize(
    ("shift", "law"),
    [
        (1, check_that_no_block_sees_the_future),
        (-1, check_that_every_block_sees_the_token_before),
    ],
)
def test_a_mask_shifted_by_one_would_be_noticed(drafter, head, monkeypatch, shift, law):
    def shifted(query, key, *, context_stop, **arguments):
        return visible(query, key, context_stop=context_stop + shift, **arguments)

    monkeypatch.setattr(stage2_train.attention, "visible", shifted)
    monkeypatch.setattr("stage2_train.step.training_attend", lambda b, a, _: reference_attend(b, a))
    with pytest.raises(AssertionError):
        law(drafter, head)


def check_that_rows_ask_for_the_sequences_own_tokens() -> None:
    """A row at position q of a sequence is asked for that sequence's token at q."""
    batch = make_batch(SEQUENCES)
    starts = np.cumsum([0] + [len(s.token_ids) for s in SEQUENCES])
    assert len(batch.row_index) > 40
    for row, label in zip(batch.row_index.tolist(), batch.row_label.tolist(), strict=True):
        block = row // BLOCK_SIZE
        sequence = SEQUENCES[int(np.flatnonzero(starts == int(batch.context_start[block]))[0])]
        position = int(batch.block_positions[row])
        anchor = int(batch.context_stop[block] - batch.context_start[block])
        assert 0 < position - anchor < BLOCK_SIZE
        assert label == sequence.token_ids[position]
        assert sequence.loss_mask[position]


def test_rows_ask_for_the_sequences_own_tokens():
    check_that_rows_ask_for_the_sequences_own_tokens()


@pytest.mark.parametrize("shift", [-1, 1])
def test_labels_shifted_by_one_would_be_noticed(monkeypatch, shift):
    def shifted(anchors, **arguments):
        return label_blocks(anchors + shift, **arguments)

    monkeypatch.setattr(stage2_train.blocks, "label_blocks", shifted)
    with pytest.raises((AssertionError, IndexError)):
        check_that_rows_ask_for_the_sequences_own_tokens()


def check_that_features_are_the_named_layers(store_dir, architecture) -> None:
    """The drafter reads the layers its architecture names, in that order."""
    architecture = dataclasses.replace(architecture, target_layer_ids=(1, 4))
    maker = make_batch_maker(
        TrainConfig(batch_tokens=80, num_anchors=4), architecture, torch.device("cpu")
    )
    store = open_store(store_dir)
    snapshot = store.snapshot()
    window = Window(sequence_index=2, start=0, stop=int(snapshot.num_tokens[2]))
    (batch,) = maker.batches(snapshot, [[window]], epoch=0)
    features = decode_features(batch.layers, DECODERS, hidden_size=32, dtype=torch.float32)
    sequence = store.sequence(snapshot.sequence_id(2))
    expected = torch.from_numpy(sequence.hidden_states(layers=["1", "4"])).flatten(1)
    assert torch.equal(features[: window.stop], expected)
    assert (features[window.stop :] == 0).all()


def test_features_are_the_named_layers(shared_store_dir, architecture):
    check_that_features_are_the_named_layers(shared_store_dir, architecture)


def test_layer_ids_shifted_by_one_would_be_noticed(shared_store_dir, architecture, monkeypatch):
    # The store holds layers 1, 2 and 4, so that layer 1 taken for 2 fails in the numbers alone.
    monkeypatch.setattr(stage2_train.data, "layer_name", lambda i: {1: "2", 4: "4"}[i])
    with pytest.raises(AssertionError):
        check_that_features_are_the_named_layers(shared_store_dir, architecture)


def batch_at_all_anchors(
    sequences: list[SequenceStates], *, batch_tokens: int, num_anchors: int
) -> PackedBatch:
    """A batch with every eligible anchor, so that packs and single sequences have the same."""
    start, parts, positions = 0, [], []
    for sequence in sequences:
        supervision = Supervision(
            sequence_id=sequence.sequence_id,
            token_ids=sequence.token_ids,
            loss_mask=sequence.loss_mask,
        )
        parts.append(
            blocks_at(
                eligible_anchors(sequence.loss_mask),
                supervision,
                batch_start=start,
                weight_of_offset=WEIGHTS,
            )
        )
        positions.append(np.arange(len(sequence.token_ids)))
        start += len(sequence.token_ids)
    num_padded = num_anchors - sum(len(part.position) for part in parts)
    parts.append(stage2_train.blocks._padding(num_padded, batch_start=start, block_size=BLOCK_SIZE))
    padded_positions = np.zeros(batch_tokens, np.int64)
    padded_positions[:start] = np.concatenate(positions)
    return batch_of(
        concatenate(parts),
        layers=tuple(
            pack_layer([s.states[name] for s in sequences], num_tokens=batch_tokens)
            for name in LAYER_NAMES
        ),
        positions=padded_positions,
        num_real_tokens=start,
        mask_token_id=63,
    )


def test_packing_changes_no_sequences_loss(drafter, head):
    def losses(sequences, **budget):
        batch = batch_at_all_anchors(sequences, **budget)
        return batch_loss(drafter, batch, head=head, decoders=DECODERS, chunk_rows=16).row_loss

    packed = losses(SEQUENCES, batch_tokens=70, num_anchors=50)
    alone = [losses([s], batch_tokens=30, num_anchors=30) for s in SEQUENCES]
    torch.testing.assert_close(packed, torch.cat(alone))
    turned = losses(SEQUENCES[::-1], batch_tokens=51, num_anchors=40)
    torch.testing.assert_close(turned, torch.cat(alone[::-1]))


def test_gradients_of_a_pack_are_the_weighted_sum_of_its_sequences(drafter, head):
    def gradients(sequences, weight_sum):
        drafter.zero_grad()
        batch = batch_at_all_anchors(sequences, batch_tokens=60, num_anchors=50)
        result = batch_loss(
            drafter,
            batch,
            head=head,
            decoders=DECODERS,
            chunk_rows=16,
            weight_sum=weight_sum or batch.weight_sum,
        )
        result.loss.backward()
        return [p.grad.clone() for p in drafter.parameters()], batch.weight_sum

    packed, weight_sum = gradients(SEQUENCES, None)
    parts = [gradients([s], weight_sum)[0] for s in SEQUENCES]
    for found, *shares in zip(packed, *parts, strict=True):
        torch.testing.assert_close(found, sum(shares[1:], shares[0]))


def test_attention_of_training_is_the_reference(drafter, head):
    batch = make_batch(SEQUENCES)
    torch.manual_seed(0)
    heads = [
        torch.randn(1, num_heads, num_tokens, 8, dtype=torch.float64)
        for num_heads, num_tokens in ((4, 100), (2, 160), (2, 160))
    ]
    fast = training_attend(batch, drafter.architecture, torch.float64)
    plain = reference_attend(batch, drafter.architecture)
    for layer_index in range(2):
        torch.testing.assert_close(fast(*heads, layer_index), plain(*heads, layer_index))


def test_a_block_drafts_what_decoding_would(drafter, head):
    """Training and decoding are one drafter: same hidden states at the same anchor."""
    batch = make_batch([SEQUENCES[1]], batch_tokens=25, num_anchors=6)
    trained = drafted(drafter, head, batch)
    features = decode_features(batch.layers, DECODERS, hidden_size=32, dtype=torch.float64)
    for block in range(6):
        anchor = int(batch.context_stop[block])
        tokens = batch.block_token_ids.unflatten(0, (-1, BLOCK_SIZE))[block]
        with torch.no_grad():
            context = drafter.context_key_values(
                features[None, :anchor], torch.arange(anchor)[None]
            )
            decoded = drafter(
                head.embed(tokens)[None],
                torch.arange(anchor, anchor + BLOCK_SIZE)[None],
                context,
                make_decoding_attend(drafter.architecture.attention_rules),
            )
        torch.testing.assert_close(decoded[0], trained[block])


def test_a_batch_without_labels_has_no_loss_and_no_gradient(drafter, head):
    silent = replace_part(SEQUENCES[0], loss_mask=np.zeros(17, np.bool_))
    batch = make_batch([silent])
    result = batch_loss(drafter, batch, head=head, decoders=DECODERS, chunk_rows=16)
    result.loss.backward()
    assert result.loss == 0
    assert result.sums.num_rows.sum() == 0
    assert all((p.grad == 0).all() for p in drafter.parameters() if p.grad is not None)
