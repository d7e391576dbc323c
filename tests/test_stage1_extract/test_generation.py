"""Generation: padding, stopping, memory, and settings that nothing else may change."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stage1_extract.config import RegenerateConfig, TargetConfig
from stage1_extract.generation import BatchedAnswers, Generator, cut_after_stop, pad_left
from stage1_extract.target import load_target


@pytest.fixture
def make_generator(target_folder: Callable[..., Path]) -> Callable[..., Generator]:
    """Gives a generator of a tiny target."""

    def make(**settings: Any) -> Generator:
        folder = target_folder("llama")
        target = load_target(TargetConfig(model=str(folder), dtype="float32"))
        # A model's own defaults, which must have no effect.
        target.model.generation_config.repetition_penalty = 50.0
        config = RegenerateConfig(**({"max_new_tokens": 5} | settings))
        return Generator(target, folder, config)

    return make


def test_prompts_end_together() -> None:
    input_ids, mask = pad_left([[1, 2, 3], [4]])
    assert input_ids.tolist() == [[1, 2, 3], [0, 0, 4]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_answers_end_with_the_first_stop_token() -> None:
    assert cut_after_stop([5, 6, 9, 9, 0], frozenset({9})) == [5, 6, 9]
    assert cut_after_stop([5, 6], frozenset({9})) == [5, 6]


def test_the_models_own_defaults_have_no_effect(make_generator: Callable[..., Generator]) -> None:
    generator = make_generator()
    (answer,) = generator.answer([[40, 41, 42]])
    model, token_ids = generator._target.model, [40, 41, 42]
    with torch.inference_mode():
        for token_id in answer:
            assert int(model(torch.tensor([token_ids])).logits[0, -1].argmax()) == token_id
            token_ids.append(token_id)


def test_a_batch_is_answered_whole(make_generator: Callable[..., Generator]) -> None:
    generator = make_generator()
    batch = BatchedAnswers(generator, num_slots=3)
    batch.start([("a", [40]), ("b", [41, 42])])
    assert (batch.num_running, batch.num_free) == (2, 1)
    expected = [generator.answer([prompt])[0] for prompt in ([40], [41, 42])]
    assert batch.step() == [("a", expected[0]), ("b", expected[1])]
    assert batch.num_running == 0


def test_a_batch_too_large_is_given_back_and_halved(
    make_generator: Callable[..., Generator],
) -> None:
    batch = BatchedAnswers(make_generator(), num_slots=5)
    batch.start([("a", [40]), ("b", [41, 42])])
    assert batch.shrink() == ["a", "b"]
    assert (batch.num_slots, batch.num_running) == (2, 0)


def test_prompt_and_answer_must_fit(make_generator: Callable[..., Generator]) -> None:
    generator = make_generator(max_new_tokens=12)
    assert generator.fits([1] * 500)
    assert not generator.fits([1] * 501)
