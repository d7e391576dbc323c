"""Speculative decoding gives what the target alone gives, whatever the drafter."""

import pytest
import torch

from dflash_offline.decode_target import TargetDecoder
from dflash_offline.speculate import DecodingSettings, decode

LAYER_IDS = (0, 1)
STOPS = (2, 5)


def some_prompts(vocab_size, lengths=(3, 9, 1, 17, 6, 6)):
    torch.manual_seed(3)
    return [torch.randint(0, vocab_size - 1, (length,)).tolist() for length in lengths]


def uncached_greedy(model, prompt, *, max_new_tokens, stops):
    """The definition: one whole forward pass for every token, no cache, no batch."""
    token_ids = list(prompt)
    with torch.inference_mode():
        while len(token_ids) < len(prompt) + max_new_tokens:
            logits = model(torch.tensor([token_ids]), use_cache=False).logits[0, -1]
            token_ids.append(int(logits.argmax()))
            if token_ids[-1] in stops:
                break
    return token_ids[len(prompt) :]


@pytest.fixture
def target(make_target):
    return make_target().double()


@pytest.mark.parametrize("batch_size", [1, 4, 6])
@pytest.mark.parametrize("seed", [1, 2])
def test_greedy_output_is_the_targets_own_for_random_drafters(
    target, make_drafter, make_head, batch_size, seed
):
    prompts = some_prompts(target.config.vocab_size)
    settings = DecodingSettings(max_new_tokens=24, stop_token_ids=STOPS)
    decoder = TargetDecoder(target, layer_ids=LAYER_IDS)
    drafted = decode(
        decoder,
        prompts,
        settings=settings,
        batch_size=batch_size,
        drafter=make_drafter(target, seed=seed),
        head=make_head(target),
    )
    plain = decode(decoder, prompts, settings=settings, batch_size=batch_size)
    for prompt, with_drafter, alone in zip(
        prompts, drafted.generations, plain.generations, strict=True
    ):
        expected = uncached_greedy(target, prompt, max_new_tokens=24, stops=STOPS)
        assert with_drafter.token_ids == alone.token_ids == expected
        assert sum(with_drafter.acceptance_lengths) == len(expected) - 1
        assert alone.acceptance_lengths == [1] * (len(expected) - 1)


@pytest.mark.parametrize("stop", [True, False])
def test_fully_accepted_blocks_and_clipping(target, make_drafter, make_head, monkeypatch, stop):
    prompts = some_prompts(target.config.vocab_size, lengths=(4, 7))
    alone = decode(
        TargetDecoder(target),
        prompts,
        settings=DecodingSettings(max_new_tokens=23),
        batch_size=2,
    )
    answers = [prompt + g.token_ids for prompt, g in zip(prompts, alone.generations, strict=True)]
    # A stop token inside the third block; without it the limit cuts the last block.
    stops = (alone.generations[0].token_ids[11],) if stop else ()
    by_prefix = {}
    for answer in answers:
        for position in range(len(answer)):
            by_prefix[(position, answer[position])] = answer[position + 1 : position + 5]

    def know_the_answer(drafter, head, context, *, anchor_ids, anchors, **_):
        logits = torch.zeros(len(anchors), 4, target.config.vocab_size, dtype=torch.float64)
        for row, key in enumerate(zip(anchors.tolist(), anchor_ids.tolist(), strict=True)):
            for offset, token_id in enumerate(by_prefix[key]):
                logits[row, offset, token_id] = 1.0
        return logits

    monkeypatch.setattr("dflash_offline.speculate.draft_logits", know_the_answer)
    drafted = decode(
        TargetDecoder(target, layer_ids=LAYER_IDS),
        prompts,
        settings=DecodingSettings(max_new_tokens=23, stop_token_ids=stops),
        batch_size=2,
        drafter=make_drafter(target),
        head=make_head(target),
    )
    if stop:
        first = drafted.generations[0]
        end = alone.generations[0].token_ids.index(stops[0])
        assert first.token_ids == alone.generations[0].token_ids[: end + 1]
        full, rest = divmod(end, 5)
        assert first.acceptance_lengths == [5] * full + [rest] * (rest > 0)
    else:
        for with_drafter, without in zip(drafted.generations, alone.generations, strict=True):
            assert with_drafter.token_ids == without.token_ids
            assert with_drafter.acceptance_lengths == [5, 5, 5, 5, 2]


@pytest.mark.parametrize("settings", [{"is_causal": True}, {"sliding": True}, {}])
def test_batching_changes_nothing(make_target, make_drafter, make_head, settings):
    # Few tokens, so that a random drafter is right now and then.
    target = make_target(vocab_size=8).double()
    changes = dict(settings)
    if changes.pop("sliding", False):
        changes.update(layer_types=("full_attention", "sliding_attention"), sliding_window=4)
    prompts = some_prompts(target.config.vocab_size)
    decoder = TargetDecoder(target, layer_ids=LAYER_IDS)
    arguments = {
        "settings": DecodingSettings(max_new_tokens=20, stop_token_ids=(2,)),
        "drafter": make_drafter(target, seed=6, **changes),
        "head": make_head(target),
    }
    alone = decode(decoder, prompts, batch_size=1, **arguments)
    together = decode(decoder, prompts, batch_size=6, **arguments)
    assert alone.generations == together.generations
    assert any(max(g.acceptance_lengths, default=1) > 1 for g in alone.generations)


def test_one_token_answers_have_no_block(target, make_drafter, make_head):
    decoding = decode(
        TargetDecoder(target, layer_ids=LAYER_IDS),
        [[1, 2, 3]],
        settings=DecodingSettings(max_new_tokens=1),
        batch_size=1,
        drafter=make_drafter(target),
        head=make_head(target),
    )
    assert len(decoding.generations[0].token_ids) == 1
    assert decoding.generations[0].acceptance_lengths == []


def test_margins_are_those_of_the_plain_forward(target):
    prompt = some_prompts(target.config.vocab_size)[1]
    settings = DecodingSettings(max_new_tokens=6)
    answer = decode(TargetDecoder(target), [prompt], settings=settings, batch_size=1).generations[0]
    with torch.inference_mode():
        logits = target(torch.tensor([prompt + answer.token_ids])).logits[0]
    top = logits[len(prompt) - 1 : -1].topk(2).values
    torch.testing.assert_close(torch.tensor(answer.top2_margins), (top[:, 0] - top[:, 1]).float())


def test_empty_prompt_and_wrong_layers_are_refused(target, make_drafter, make_head):
    settings = DecodingSettings(max_new_tokens=2)
    with pytest.raises(ValueError, match="prompt 1 has no token"):
        decode(TargetDecoder(target), [[1], []], settings=settings, batch_size=2)
    with pytest.raises(ValueError, match="reads target layers"):
        decode(
            TargetDecoder(target, layer_ids=(1,)),
            [[1]],
            settings=settings,
            batch_size=1,
            drafter=make_drafter(target),
            head=make_head(target),
        )


@pytest.mark.parametrize("nucleus", [{}, {"top_p": 0.8}, {"top_k": 4}])
def test_sampled_tokens_have_the_targets_distribution(
    make_target, make_drafter, make_head, nucleus
):
    """The first three tokens after one prompt, over many draws, against exact probabilities."""
    target = make_target(vocab_size=8, hidden_size=16, num_hidden_layers=2, initializer_range=0.2)
    drafter = make_drafter(target, block_size=3, num_hidden_layers=1)
    settings = DecodingSettings(max_new_tokens=4, temperature=0.7, **nucleus)
    prompt, num_draws = [1, 4, 2], 3000
    decoding = decode(
        TargetDecoder(target, layer_ids=LAYER_IDS),
        [prompt] * num_draws,
        settings=settings,
        batch_size=num_draws,
        drafter=drafter,
        head=make_head(target),
        seed=5,
    )
    counts = torch.zeros(8, 8, 8)
    for generation in decoding.generations:
        counts[tuple(generation.token_ids[:3])] += 1
    expected = exact_distribution(target, prompt, settings=settings) * num_draws
    assert counts[expected == 0].sum() == 0
    # Pearson's statistic over the cells that are common enough, against its normal approximation.
    common = expected >= 5
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum().item()
    num_cells = int(common.sum())
    assert abs(statistic - num_cells) < 4 * (2 * num_cells) ** 0.5
    accepted = [length for g in decoding.generations for length in g.acceptance_lengths]
    assert 1.05 < sum(accepted) / len(accepted) < 3.0


def exact_distribution(target, prompt, *, settings):
    """Probability of every triple of tokens after the prompt, from plain forward passes."""
    from dflash_offline.sampling import sampling_probabilities

    size = target.config.vocab_size
    tokens = torch.arange(size)
    pairs = torch.cartesian_prod(tokens, tokens)
    rows = torch.cat((torch.tensor(prompt).expand(len(pairs), -1), pairs), dim=1)
    with torch.inference_mode():
        logits = target(rows).logits[:, len(prompt) - 1 :]
    probabilities = sampling_probabilities(
        logits, temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k
    )
    first, second, third = probabilities.unbind(dim=1)
    joint = first.gather(1, pairs[:, :1]) * second.gather(1, pairs[:, 1:]) * third
    return joint.view(size, size, size)
