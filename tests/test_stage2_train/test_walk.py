"""The walk visits the positions of real decoding, prompt by prompt, without the target."""

import dataclasses

import numpy as np
import pytest
import torch

from dflash_offline.decode_target import TargetDecoder
from dflash_offline.speculate import DecodingSettings, decode
from stage2_train.draft import draft_logits
from stage2_train.walk import WalkSequence, supervised_runs, walk, walk_store
from storage.encodings import encode
from storage.reader import open_store
from storage.schema import LayerRecord, StoreIdentity
from storage.writer import create_store

LAYER_IDS = (0, 1)
STOPS = (2,)


def greedy_sequences(target, prompts, *, max_new_tokens):
    """Sequences as a store would hold them: the target's greedy answers and its states."""
    settings = DecodingSettings(max_new_tokens=max_new_tokens, stop_token_ids=STOPS)
    decoding = decode(TargetDecoder(target), prompts, settings=settings, batch_size=8)
    sequences = []
    for prompt, generation in zip(prompts, decoding.generations, strict=True):
        token_ids = prompt + generation.token_ids
        with torch.no_grad():
            states = target(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        sequences.append(
            WalkSequence(
                token_ids=token_ids,
                answer_start=len(prompt),
                states=torch.cat([states[index + 1][0] for index in LAYER_IDS], dim=-1),
            )
        )
    return sequences


@pytest.mark.parametrize(
    "architecture",
    [
        {},
        {"is_causal": True},
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6},
    ],
)
@pytest.mark.parametrize("batch_tokens", [100, 10_000])
def test_walk_is_real_decoding(make_target, make_drafter, make_head, architecture, batch_tokens):
    # Few tokens, so that a random drafter is right now and then and stops are met.
    target = make_target(vocab_size=12).double()
    torch.manual_seed(4)
    prompts = [torch.randint(0, 11, (n,)).tolist() for n in (1, 2, 3, 5, 8, 13, 7, 4, 6, 9, 2, 3)]
    sequences = greedy_sequences(target, prompts, max_new_tokens=30)
    ends_with_stop = [sequence.token_ids[-1] in STOPS for sequence in sequences]
    assert any(ends_with_stop)
    assert not all(ends_with_stop)

    drafter = make_drafter(target, **architecture)
    head = dataclasses.replace(make_head(target), eos_token_ids=STOPS)
    walked = walk(drafter, head, sequences, batch_tokens=batch_tokens)
    decoded = decode(
        TargetDecoder(target, layer_ids=LAYER_IDS),
        prompts,
        settings=DecodingSettings(max_new_tokens=30, stop_token_ids=STOPS),
        batch_size=5,
        drafter=drafter,
        head=head,
    )
    expected = [generation.acceptance_lengths for generation in decoded.generations]
    assert walked.acceptance_lengths == expected
    assert walked.acceptance_length > 1.0
    flat = [length for request in expected for length in request]
    assert 1 + sum(walked.accepted_by_offset) == pytest.approx(sum(flat) / len(flat))


def test_walk_drafts_the_very_blocks_of_decoding(make_target, make_drafter, make_head, monkeypatch):
    """Anchors and block lengths, near a stop (whole blocks) and near the limit (shorter ones)."""
    target = make_target(vocab_size=12).double()
    torch.manual_seed(4)
    prompts = [torch.randint(0, 11, (n,)).tolist() for n in (1, 2, 3, 5, 8, 13, 7, 4)]
    sequences = greedy_sequences(target, prompts, max_new_tokens=30)
    drafter = make_drafter(target)
    head = dataclasses.replace(make_head(target), eos_token_ids=STOPS)
    drafted = {"stage2_train.walk": [], "dflash_offline.speculate": []}
    for module, blocks in drafted.items():
        monkeypatch.setattr(
            f"{module}.draft_logits",
            lambda *args, blocks=blocks, **kwargs: (
                blocks.append((kwargs["anchors"].item(), kwargs["block_lengths"].item())),
                draft_logits(*args, **kwargs),
            )[1],
        )
    for prompt, sequence in zip(prompts, sequences, strict=True):
        walk(drafter, head, [sequence])
        decode(
            TargetDecoder(target, layer_ids=LAYER_IDS),
            [prompt],
            settings=DecodingSettings(max_new_tokens=30, stop_token_ids=STOPS),
            batch_size=1,
            drafter=drafter,
            head=head,
        )
    assert drafted["stage2_train.walk"] == drafted["dflash_offline.speculate"]
    assert {length for _, length in drafted["stage2_train.walk"]} > {2, 5}
    assert any(sequence.token_ids[-1] in STOPS for sequence in sequences)


def test_an_answer_of_one_token_has_no_block(make_target, make_drafter, make_head):
    target = make_target()
    sequence = WalkSequence(token_ids=[1, 2, 3], answer_start=2, states=torch.zeros(3, 64))
    walked = walk(make_drafter(target), make_head(target), [sequence])
    assert walked.acceptance_lengths == [[]]


def test_supervised_runs_are_the_answers():
    mask = np.array([False, True, True, False, False, True])
    assert supervised_runs(mask) == [(1, 3), (5, 6)]
    assert supervised_runs(~mask) == [(0, 1), (3, 5)]
    assert supervised_runs(np.zeros(4, bool)) == []


@pytest.mark.parametrize("batch_tokens", [1, 10_000])
def test_walk_over_a_store_reads_greedy_answers_only(
    tmp_path, make_target, make_drafter, make_head, batch_tokens
):
    target = make_target(vocab_size=12)
    prompts = [[1, 3, 4], [5, 6], [7, 8, 9, 10], [4, 4]]
    sequences = greedy_sequences(target, prompts, max_new_tokens=12)
    sequences = [
        # What comes back from a store is rounded to its encoding.
        dataclasses.replace(each, states=each.states.bfloat16().float())
        for each in sequences
    ]
    store = create_store(tmp_path / "store", small_identity())
    store.add_layers([LayerRecord(name=str(i), encoding="bf16", hidden_size=32) for i in LAYER_IDS])
    ids = [f"id{number}" for number in range(len(sequences))]
    store.plan_generation(ids, num_units=1)
    with store.start_shard(store.units()[0]) as shard:
        for sequence_id, sequence in zip(ids, sequences, strict=True):
            states = sequence.states.numpy().reshape(-1, len(LAYER_IDS), 32)
            shard.append(
                sequence_id=sequence_id,
                token_ids=np.array(sequence.token_ids, dtype=np.int32),
                loss_mask=np.arange(sequence.num_tokens) >= sequence.answer_start,
                greedy=sequence_id != "id1",
                states={
                    str(layer_id): encode("bf16", np.ascontiguousarray(states[:, place]))
                    for place, layer_id in enumerate(LAYER_IDS)
                },
            )
        shard.seal()
    drafter, head = make_drafter(target), make_head(target)
    snapshot = open_store(tmp_path / "store").snapshot()
    indices = [snapshot.index_of(sequence_id) for sequence_id in ids]
    walked = walk_store(drafter, head, snapshot, indices, batch_tokens=batch_tokens)
    expected = walk(drafter, head, [sequences[0], sequences[2], sequences[3]])
    assert walked.acceptance_lengths == expected.acceptance_lengths


def small_identity():
    return StoreIdentity(
        target_name="tiny",
        target_revision=None,
        target_weights_sha256="0",
        tokenizer_sha256="0",
        chat_template_sha256="0",
        template_arguments={},
        mask_rule_version=1,
        max_sequence_tokens=64,
        long_conversations="truncate",
        compute_dtype="float32",
        attention_backend="sdpa",
        hidden_size=32,
        num_target_layers=3,
        vocab_size=12,
        held_out_fraction=0.0,
    )
