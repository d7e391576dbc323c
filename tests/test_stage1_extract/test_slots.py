"""Slots: every answer is the one its prompt alone would get, whatever runs beside it."""

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from stage1_extract.slots import Slots, can_share_slots, draws, next_tokens

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 8}
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mistral": WINDOW,
    "gemma2": WINDOW | {"query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0},
    "gemma3_text": WINDOW,
    "gpt_oss": WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {"partial_rotary_factor": 0.5},
    "olmo2": {},
    "granite": {},
    "cohere": {},
    "deepseek_v3": {
        "kv_lora_rank": 8,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "head_dim": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    },
}
LINEAR_ATTENTION = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# Lengths that make later prompts longer and shorter than what runs when they join.
PROMPTS = [
    [5 + (7 * row + column) % 90 for column in range(length)]
    for row, length in enumerate((3, 14, 1, 9, 22, 2, 5))
]
STOP_IDS = frozenset(range(10, 20))


def target_of(kind: str, special: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**SIZES, **special})
    attention = "eager" if kind in ("gemma2", "gpt_oss") else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.eval().requires_grad_(False)


def slots_of(model: PreTrainedModel, *, num_slots: int, **settings: Any) -> Slots:
    return Slots(model, num_slots=num_slots, max_new_tokens=12, stop_ids=STOP_IDS, **settings)


def answer_all(slots: Slots, prompts: Iterable[list[int]]) -> dict[int, list[int]]:
    """Fills every free slot at once; answers by the place of their prompt."""
    waiting = deque(enumerate(prompts))
    answers: dict[int, list[int]] = {}
    while waiting or slots.num_running:
        slots.start([waiting.popleft() for _ in range(min(slots.num_free, len(waiting)))])
        answers |= slots.step()
    return answers


@torch.inference_mode()
def greedy_answer(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Plain greedy decoding of one prompt, without a cache."""
    token_ids = list(prompt)
    for _ in range(12):
        token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
        if token_ids[-1] in STOP_IDS:
            break
    return token_ids[len(prompt) :]


@pytest.mark.parametrize("kind", TARGETS)
def test_answers_are_those_of_one_by_one_greedy_decoding(kind: str) -> None:
    model = target_of(kind, TARGETS[kind])
    assert can_share_slots(model)
    expected = {place: greedy_answer(model, prompt) for place, prompt in enumerate(PROMPTS)}
    lengths = {len(answer) for answer in expected.values()}
    assert len(lengths) > 1, "answers must end at different times, or no slot is filled again"
    for num_slots in (1, 3):
        assert answer_all(slots_of(model, num_slots=num_slots), PROMPTS) == expected


@pytest.mark.parametrize("kind", TARGETS)
def test_rows_of_ended_answers_that_stay_change_no_other(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = target_of(kind, TARGETS[kind])
    expected = {place: greedy_answer(model, prompt) for place, prompt in enumerate(PROMPTS)}
    # They stay until all answers have ended.
    monkeypatch.setattr("stage1_extract.slots._DROP_SHARE", 1)
    slots = slots_of(model, num_slots=len(PROMPTS))
    slots.start(list(enumerate(PROMPTS)))
    answers: dict[int, list[int]] = {}
    num_rows = set()
    while slots.num_running:
        answers |= slots.step()
        num_rows.add((slots.num_running, len(slots._running)))
    assert answers == expected
    assert any(0 < num_running < rows for num_running, rows in num_rows)


def test_what_had_ended_when_memory_ran_out_is_given_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = target_of("llama", {})
    expected = [greedy_answer(model, prompt) for prompt in PROMPTS]
    first = min(range(len(PROMPTS)), key=lambda place: len(expected[place]))
    slots = slots_of(model, num_slots=len(PROMPTS))
    slots.start(list(enumerate(PROMPTS)))

    def full(*_: Any) -> None:
        raise torch.cuda.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(slots, "_keep_rows", full)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            answer_all(slots, [])
    assert first not in slots.shrink()
    assert dict(slots.step())[first] == expected[first]


def test_linear_attention_cannot_share_slots() -> None:
    model = target_of("qwen3_5_text", LINEAR_ATTENTION)
    assert not can_share_slots(model)


def test_sampled_answers_do_not_depend_on_slots_or_order() -> None:
    model = target_of("llama", {})
    settings = {"temperature": 1.0, "top_p": 0.9, "seed": 3}
    alone = answer_all(slots_of(model, num_slots=1, **settings), PROMPTS)
    beside = answer_all(slots_of(model, num_slots=4, **settings), PROMPTS[::-1])
    assert {len(PROMPTS) - 1 - place: answer for place, answer in beside.items()} == alone
    other = answer_all(slots_of(model, num_slots=1, **settings | {"seed": 4}), PROMPTS)
    assert other != alone


def test_what_was_dropped_for_memory_is_given_back() -> None:
    model = target_of("llama", {})
    slots = slots_of(model, num_slots=4)
    slots.start([("a", PROMPTS[0]), ("b", PROMPTS[1])])
    slots.step()
    assert slots.shrink() == ["a", "b"]
    assert (slots.num_slots, slots.num_running) == (2, 0)
    assert answer_all(slots, PROMPTS[:1]) == {0: greedy_answer(model, PROMPTS[0])}


def test_prompts_that_memory_could_not_take_are_given_back_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots = slots_of(target_of("llama", {}), num_slots=2)
    slots.start([("a", PROMPTS[0])])

    def full(*_: Any, **__: Any) -> None:
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(slots, "_forward", full)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        slots.start([("b", PROMPTS[1])])
    assert slots.shrink() == ["a", "b"]


def test_the_cache_holds_no_column_that_is_padding_in_every_row() -> None:
    slots = slots_of(target_of("llama", {}), num_slots=2)
    slots.start([("long", PROMPTS[4]), ("short", PROMPTS[2])])
    slots._keep_rows([1])
    assert slots._is_real.tolist() == [[True]]
    assert all(layer.keys.shape[2] == 1 for layer in slots._cache.layers)


def sampled_shares(logits: list[float], num_draws: int = 4_000, **settings: Any) -> np.ndarray:
    uniforms = (torch.arange(num_draws) + 0.5) / num_draws
    rows = torch.tensor(logits).expand(num_draws, -1)
    tokens = next_tokens(rows, uniforms=uniforms, **settings)
    return np.bincount(tokens.numpy(), minlength=len(logits)) / num_draws


def test_tokens_are_drawn_by_their_probability() -> None:
    logits = [0.3, -1.0, 2.0, 0.0]
    for temperature in (0.5, 1.0, 2.0):
        expected = torch.softmax(torch.tensor(logits) / temperature, dim=0).numpy()
        found = sampled_shares(logits, temperature=temperature, top_p=1.0)
        assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.4, [2]), (0.5, [2]), (0.51, [2, 0]), (0.8, [2, 0]), (0.81, [2, 0, 1])]
)
def test_the_nucleus_is_the_fewest_tokens_that_reach_its_share(
    top_p: float, kept: list[int]
) -> None:
    shares = np.array([0.3, 0.15, 0.5, 0.05])
    found = sampled_shares(np.log(shares).tolist(), temperature=1.0, top_p=top_p)
    expected = np.zeros(4)
    expected[kept] = shares[kept] / shares[kept].sum()
    assert found == pytest.approx(expected, abs=1e-3)


def test_no_draw_leaves_the_nucleus() -> None:
    logits = torch.tensor([[5.0, 0.0, -20.0]])
    last = torch.tensor([np.nextafter(np.float32(1), np.float32(0))])
    token = next_tokens(logits, temperature=1.0, top_p=0.9, uniforms=last)
    assert token.tolist() == [0]


def test_draws_follow_seed_and_prompt_only() -> None:
    assert (draws(1, [4, 5], 6) == draws(1, [4, 5], 8)[:6]).all()
    assert (draws(1, [4, 5], 6) != draws(2, [4, 5], 6)).all()
    assert (draws(1, [4, 5], 6) != draws(1, [4], 6)).all()
