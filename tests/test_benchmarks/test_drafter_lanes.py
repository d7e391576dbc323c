"""What the acceptance benchmark trains and judges is what the product trains and judges."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from stage2_train.architecture import DrafterArchitecture
from stage2_train.collate import collate
from stage2_train.config import OptimizerConfig, TrainConfig
from stage2_train.decode import LayerDecoder
from stage2_train.drafter import Drafter, initialize
from stage2_train.step import batch_loss
from stage2_train.target_head import TargetHead
from stage2_train.walk import WalkSequence, walk
from storage.encodings import EncodedStates
from storage.reader import SequenceStates

HIDDEN, VOCAB, BLOCK, PERIOD = 32, 64, 4, 5
STOP = 63


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import acceptance_data
    import acceptance_states
    import acceptance_table
    import drafter_lanes
    import encoding_acceptance

    return SimpleNamespace(
        lanes=drafter_lanes,
        data=acceptance_data,
        states=acceptance_states,
        table=acceptance_table,
        acceptance=encoding_acceptance,
    )


def make_texts(bench: Any) -> Any:
    """Answers that count round and round, and end with a stop token."""
    rng = np.random.default_rng(0)
    token_ids, masks = [], []
    for number in range(40):
        length = int(rng.integers(20, 50))
        tokens = (np.arange(length) + number) % PERIOD
        tokens[rng.random(length) < 0.1] = 9  # So that no drafter can be right always.
        tokens[-1] = STOP
        token_ids.append(tokens.astype(np.int32))
        masks.append(np.arange(length) >= 7)
    return bench.data.Texts(
        ids=[f"{'judged' if number % 4 == 0 else 'math'}-{number:02d}" for number in range(40)],
        token_ids=token_ids,
        loss_masks=masks,
        starts=np.concatenate([[0], np.cumsum([len(tokens) for tokens in token_ids])]),
        trained="math",
    )


@pytest.fixture
def parts(bench: Any) -> Any:
    """Texts, states of two layers, head, settings, and one lane with fresh weights."""
    generator = torch.Generator().manual_seed(0)
    texts = make_texts(bench)
    states = [
        torch.randn(int(texts.starts[-1]), HIDDEN, generator=generator).bfloat16() for _ in range(2)
    ]
    embed = torch.randn(VOCAB, HIDDEN, generator=generator)
    head = TargetHead(
        config={},
        embed_weight=embed,
        lm_head_weight=embed,
        lm_head_bias=None,
        embedding_scale=1.0,
        logit_scale=1.0,
        final_logit_softcapping=None,
        tokenizer_size=VOCAB,
        mask_token_id=62,
        eos_token_ids=(STOP,),
    )
    architecture = DrafterArchitecture(
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        rms_norm_eps=1e-6,
        vocab_size=VOCAB,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=128,
        block_size=BLOCK,
        mask_token_id=62,
        target_layer_ids=(1, 3),
        num_target_layers=4,
        layer_types=("full_attention",) * 2,
    )
    train = TrainConfig(batch_tokens=160, num_anchors=48, max_steps=60)
    shape = bench.lanes.BatchShape(batch_tokens=160, num_anchors=48, block_size=BLOCK)
    settings = bench.data.BatchSettings(train=train, shape=shape, mask_token_id=62)
    bench.data.keep(texts, settings)
    lane = bench.lanes.Lane(
        settings=bench.lanes.LaneSettings(
            architecture=architecture,
            head=head,
            shape=shape,
            optimizer=OptimizerConfig(learning_rate=1e-2),
            chunk_rows=64,
            device=torch.device("cpu"),
            dtype=torch.float32,
            fast_path=None,
        ),
        states=bench.states.resident_states("bf16", states, states),
    )
    drafter = Drafter(architecture)
    initialize(drafter, seed=3)
    lane.start({name: weight.detach() for name, weight in drafter.named_parameters()})
    return SimpleNamespace(
        texts=texts, states=states, head=head, settings=settings, lane=lane, drafter=drafter
    )


def stored(parts: Any, index: int) -> SequenceStates:
    rows = slice(parts.texts.starts[index], parts.texts.starts[index + 1])
    return SequenceStates(
        sequence_id=parts.texts.ids[index],
        token_ids=parts.texts.token_ids[index],
        loss_mask=parts.texts.loss_masks[index],
        greedy=True,
        states={
            str(layer): EncodedStates(states[rows].view(torch.int16).numpy().view(np.uint16))
            for layer, states in enumerate(parts.states)
        },
    )


def test_a_step_has_the_product_s_loss_and_gradients(bench: Any, parts: Any) -> None:
    train, lane = parts.settings.train, parts.lane
    batches = bench.data.make_batches(3, 0, 4)
    for number, (epoch, windows) in enumerate(bench.data.windows_of(3, 4)):
        batch = collate(
            [stored(parts, window.sequence_index) for window in windows],
            windows,
            layer_names=["0", "1"],
            batch_tokens=train.batch_tokens,
            num_anchors=train.num_anchors,
            weight_of_offset=bench.data.offset_weights(BLOCK),
            mask_token_id=62,
            seed=3,
            epoch=epoch,
        )
        parts.drafter.zero_grad()
        decoders = [LayerDecoder(encoding="bf16")] * 2
        wanted = batch_loss(
            parts.drafter, batch, head=parts.head, decoders=decoders, chunk_rows=64
        ).loss
        wanted.backward()
        lane._numbers.copy_(torch.from_numpy(batches.numbers[number]))
        lane._weights.copy_(torch.from_numpy(batches.weights[number]))
        lane._clear_gradients()
        lane.gradients()
        assert lane.loss() == pytest.approx(float(wanted.detach()), rel=1e-5)
        for ours, theirs in zip(lane.optimizer.parameters, parts.drafter.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-6)


def test_rows_stand_at_different_places_none_of_them_an_anchor(bench: Any, parts: Any) -> None:
    """What compiled layers ask of all rows, those that only fill up a batch included."""
    batches = bench.data.make_batches(0, 0, 5)
    judged, _ = bench.data.judged_batches(parts.texts, parts.settings)
    for numbers in (*batches.numbers, *judged):
        rows = parts.settings.shape.parts(torch.from_numpy(numbers))["row_index"]
        assert bool((rows % BLOCK != 0).all())
        assert len(rows.unique()) == len(rows)
    assert bool((batches.weights == 0).any(axis=1).all())


def test_the_walk_is_the_product_s(bench: Any, parts: Any) -> None:
    batches = bench.data.make_batches(0, 0, 150)
    for numbers, weights in zip(batches.numbers, batches.weights, strict=True):
        parts.lane.step(torch.from_numpy(numbers), torch.from_numpy(weights), 5e-3)
    judged, groups = bench.data.judged_batches(parts.texts, parts.settings)
    laboratory = bench.acceptance.Laboratory(
        texts=parts.texts,
        settings=parts.settings,
        lanes={"bf16": parts.lane},
        judged=torch.from_numpy(judged),
        groups=groups,
    )
    found = laboratory.judge()["bf16"]["judged"]
    joined = torch.cat(parts.states, dim=1).float()
    answers = [
        WalkSequence(
            token_ids=parts.texts.token_ids[index].tolist(),
            answer_start=7,
            states=joined[parts.texts.starts[index] : parts.texts.starts[index + 1]],
        )
        for index in parts.texts.of_suite("judged")
    ]
    wanted = walk(parts.lane.drafter, parts.head, answers).acceptance_length
    assert wanted > 1.3
    assert found["walk"] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("encoding", ["fp8", "int8", "int4", "int8.fp8", "klt2p"])
def test_states_lie_encoded_and_their_padding_decodes_to_zero(
    bench: Any, parts: Any, encoding: str
) -> None:
    resident = bench.states.resident_states(encoding, parts.states, parts.states)
    rows = torch.tensor([5, bench.lanes.NO_ROW, 17])
    from stage2_train.step import decode_features

    found = decode_features(
        resident.at(rows), resident.decoders, hidden_size=HIDDEN, dtype=torch.float32
    )
    wanted = torch.cat(parts.states, dim=1).float()
    assert not found[1].any()
    for place, row in ((0, 5), (2, 17)):
        error = (found[place] - wanted[row]).norm() / wanted[row].norm()
        assert 0 < error < 0.6


def test_a_ratio_is_that_of_pairs_and_knows_its_error(bench: Any) -> None:
    def suites(value: float) -> dict[str, dict[str, float]]:
        return {"a": {"walk": value, "all": value}, "b": {"walk": value, "all": value}}

    outcomes = bench.table.Outcomes(
        suites_of={
            **{("bf16", seed): suites(1.5 + seed / 10) for seed in range(4)},
            **{("int4", seed): suites((1.5 + seed / 10) * 0.99) for seed in range(3)},
            ("int4", 9): suites(7.0),
        }
    )
    ratio = outcomes.ratio("int4")
    assert outcomes.seeds("int4") == [0, 1, 2]
    assert (ratio.mean, ratio.error) == pytest.approx((0.99, 0.0), abs=1e-9)
    assert bench.table.mean_ratio([0.9, 1.1]).error == pytest.approx(np.log(1.1 / 0.9) / 2)
