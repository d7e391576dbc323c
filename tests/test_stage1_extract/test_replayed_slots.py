"""Replayed slots: the answers are those of the plain slots, whatever runs beside them."""

from collections import deque
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from triton.runtime.errors import OutOfResources

from stage1_extract.decode_attention import DecodeUnsupportedError
from stage1_extract.replayed_slots import ReplayedSlots, can_replay
from stage1_extract.slots import Slots

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Lengths that make later prompts longer and shorter than what runs when they join.
PROMPTS = [
    [5 + (7 * row + column) % 90 for column in range(length)]
    for row, length in enumerate((3, 14, 1, 9, 22, 2, 5))
]
STOP_IDS = frozenset(range(10, 14))
LONGEST = 19


def target_of(kind: str, **special: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**SIZES, **special})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def answers_by(
    slots: Slots | ReplayedSlots, prompts: list[list[int]] = PROMPTS
) -> dict[int, list[int]]:
    waiting = deque(enumerate(prompts))
    found: dict[int, list[int]] = {}
    while waiting or slots.num_running:
        slots.start([waiting.popleft() for _ in range(min(slots.num_free, len(waiting)))])
        found |= dict(slots.step())
    return found


def settings(**special: Any) -> dict[str, Any]:
    return {"num_slots": 3, "max_new_tokens": LONGEST, "stop_ids": STOP_IDS, **special}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "cohere", "granite"])
def test_answers_are_those_of_the_plain_slots(kind: str, sampling: dict[str, Any]) -> None:
    model = target_of(kind)
    expected = answers_by(Slots(model, **settings(**sampling)))
    assert answers_by(ReplayedSlots(model, **settings(**sampling))) == expected
    lengths = {len(answer) for answer in expected.values()}
    assert len(lengths) > 1
    assert max(lengths) <= LONGEST


def test_answers_do_not_depend_on_how_many_run() -> None:
    model = target_of("llama")
    many = answers_by(ReplayedSlots(model, **settings(num_slots=7)))
    assert answers_by(ReplayedSlots(model, **settings(num_slots=1))) == many


def test_a_longer_prompt_that_joins_later_makes_room() -> None:
    model = target_of("llama")
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[3], [5 + n % 90 for n in range(200)], PROMPTS[1]]
    expected = answers_by(Slots(model, **settings(num_slots=2)), prompts)
    assert answers_by(ReplayedSlots(model, **settings(num_slots=2)), prompts) == expected


def test_an_answer_ends_behind_its_first_stop_token() -> None:
    for answer in answers_by(ReplayedSlots(target_of("llama"), **settings())).values():
        assert not STOP_IDS & set(answer[:-1])
        assert answer[-1] in STOP_IDS or len(answer) == LONGEST


def test_shrinking_gives_back_what_ran_and_goes_on_with_half() -> None:
    model = target_of("llama")
    slots = ReplayedSlots(model, **settings(num_slots=4))
    slots.start(list(enumerate(PROMPTS))[:3])
    slots.step()
    assert sorted(slots.shrink()) == [0, 1, 2]
    assert (slots.num_slots, slots.num_free) == (2, 2)
    assert answers_by(slots) == answers_by(Slots(model, **settings()))


def test_what_had_ended_when_memory_ran_out_is_given_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = target_of("llama")
    expected = answers_by(Slots(model, **settings()))
    slots = ReplayedSlots(model, **settings(num_slots=len(PROMPTS)))
    slots.start(list(enumerate(PROMPTS)))
    slots.step()

    def full() -> None:
        raise torch.cuda.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(slots, "_replay", full)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            slots.step()
    dropped = slots.shrink()
    ended = dict(slots.step())
    assert len(ended) > 0
    assert sorted([*ended, *dropped]) == list(range(len(PROMPTS)))
    assert ended == {row: expected[row] for row in ended}


def test_the_targets_own_attention_is_put_back() -> None:
    model = target_of("llama")
    answers_by(ReplayedSlots(model, **settings()))
    assert model.config._attn_implementation == "sdpa"


# What each of them leaves out of its attention, two short answers do not show.
OTHER_WAYS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 64},
    "gemma3_text": {"sliding_window": 64},
    "llama4_text": {
        "attention_chunk_size": 64,
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
    "doge": {"keep_window_size": 64},
}


def test_a_plain_target_can_be_replayed() -> None:
    assert can_replay(target_of("llama"))


@pytest.mark.parametrize("kind", OTHER_WAYS)
def test_targets_that_attend_in_other_ways_are_refused(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not can_replay(target_of(kind, **OTHER_WAYS[kind]))
    assert "answers are written step by step" in capsys.readouterr().err


def test_a_gpu_that_cannot_run_the_kernel_leaves_the_target_to_the_plain_slots(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_large(*_: Any) -> None:
        raise OutOfResources(required=200_000, limit=100_000, name="shared memory")

    monkeypatch.setattr(ReplayedSlots, "_logits", too_large)
    assert not can_replay(target_of("llama"))
    assert "shared memory" in capsys.readouterr().err


def test_what_the_attention_does_not_compute_is_named() -> None:
    windowed = target_of("mistral", sliding_window=8)
    with pytest.raises(DecodeUnsupportedError, match="sliding_window"):
        ReplayedSlots(windowed, **settings()).start([(0, PROMPTS[0])])
