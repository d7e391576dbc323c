"""The walk visits the positions of real decoding, prompt by prompt, without the target."""

import dataclasses

import pytest
import torch

from dflash_offline.decode_target import TargetDecoder, capture
from dflash_offline.speculate import DecodingSettings, decode
from stage2_train.walk import WalkSequence, walk

LAYER_IDS = (0, 1)
STOPS = (2,)


def greedy_sequences(target, prompts, *, max_new_tokens):
    """Sequences as a store would hold them: the target's greedy answers and its states."""
    settings = DecodingSettings(max_new_tokens=max_new_tokens, stop_token_ids=STOPS)
    decoding = decode(TargetDecoder(target), prompts, settings=settings, batch_size=8)
    sequences = []
    for prompt, generation in zip(prompts, decoding.generations, strict=True):
        token_ids = prompt + generation.token_ids
        with torch.inference_mode(), capture(target, LAYER_IDS) as states:
            target(torch.tensor([token_ids]), use_cache=False)
        sequences.append(
            WalkSequence(
                token_ids=token_ids,
                answer_start=len(prompt),
                states=torch.cat([states[index][0] for index in LAYER_IDS], dim=-1),
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


def test_an_answer_of_one_token_has_no_block(make_target, make_drafter, make_head):
    target = make_target()
    sequence = WalkSequence(token_ids=[1, 2, 3], answer_start=2, states=torch.zeros(3, 64))
    walked = walk(make_drafter(target), make_head(target), [sequence])
    assert walked.acceptance_lengths == [[]]
