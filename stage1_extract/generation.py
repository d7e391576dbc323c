"""Generation: answers of the target to prompts, batch by batch, greedy or sampled.

The plain way: a batch is as slow as its longest answer. `slots` is the fast one, for targets whose
caches allow it.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import GenerationConfig

from stage1_extract.config import RegenerateConfig
from stage1_extract.problems import UnusableConversationError
from stage1_extract.target_files import stop_token_ids
from stage1_extract.target_transformers import TransformersTarget


class Generator:
    """Answers prompts with a loaded target, exactly as the settings say.

    The model's own generation defaults (top-k, repetition penalties) are put out of force: what
    is recorded beside an answer is all that shaped it.
    """

    def __init__(self, target: TransformersTarget, folder: str | Path, config: RegenerateConfig):
        self.stop_ids = frozenset(stop_token_ids(folder, target.config))
        self._target = target
        self._config = config
        self._max_tokens = getattr(target.config, "max_position_embeddings", None)
        sampling: dict[str, Any] = {"do_sample": False}
        if config.temperature > 0:
            sampling = {
                "do_sample": True,
                "temperature": config.temperature,
                "top_p": config.top_p,
                "top_k": 0,
            }
        target.model.generation_config = GenerationConfig(
            max_new_tokens=config.max_new_tokens,
            eos_token_id=sorted(self.stop_ids) or None,
            pad_token_id=min(self.stop_ids, default=0),
            **sampling,
        )

    def fits(self, prompt_ids: Sequence[int]) -> bool:
        """Whether prompt and longest answer lie within the target's positions."""
        needed = len(prompt_ids) + self._config.max_new_tokens
        return self._max_tokens is None or needed <= self._max_tokens

    def check_length(self, prompt_ids: Sequence[int], *, source: str) -> None:
        """Raises UnusableConversationError for a prompt that does not fit."""
        if not self.fits(prompt_ids):
            detail = f"{len(prompt_ids)} tokens + {self._config.max_new_tokens} new ones"
            raise UnusableConversationError(
                "prompt too long for the target", source=source, detail=detail
            )

    @torch.inference_mode()
    def answer(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Answer tokens of each prompt, the stop token included where there is one."""
        input_ids, attention_mask = pad_left(prompts)
        # The draw depends on the batch, not on what was answered before it: resuming changes less.
        torch.manual_seed(_batch_seed(self._config.seed, prompts))
        output = self._target.model.generate(
            input_ids=input_ids.to(self._target.device),
            attention_mask=attention_mask.to(self._target.device),
        )
        answers = output[:, input_ids.shape[1] :].tolist()
        return [cut_after_stop(each, self.stop_ids) for each in answers]


class BatchedAnswers:
    """Answers written batch by batch; the interface is that of `slots.Slots`."""

    def __init__(self, generator: Generator, *, num_slots: int):
        self.num_slots = num_slots
        self._generator = generator
        self._running: list[tuple[Any, Sequence[int]]] = []

    @property
    def num_running(self) -> int:
        """Prompts of the batch to come."""
        return len(self._running)

    @property
    def num_free(self) -> int:
        """Prompts that still fit into it."""
        return self.num_slots - len(self._running)

    def start(self, prompts: Sequence[tuple[Any, Sequence[int]]]) -> None:
        """Adds prompts to the batch."""
        self._running += prompts

    def step(self) -> list[tuple[Any, list[int]]]:
        """Answers the batch whole; gives request and answer tokens of each."""
        answers = self._generator.answer([prompt_ids for _, prompt_ids in self._running])
        requests = [request for request, _ in self._running]
        self._running = []
        return list(zip(requests, answers, strict=True))

    def shrink(self) -> list[Any]:
        """Drops the batch and halves its size, for want of memory; gives its requests."""
        requests = [request for request, _ in self._running]
        self._running = []
        self.num_slots = max(1, self.num_slots // 2)
        torch.cuda.empty_cache()
        return requests


def pad_left(
    prompts: Sequence[Sequence[int]],
) -> tuple[Int[Tensor, "prompts tokens"], Int[Tensor, "prompts tokens"]]:
    """Prompts that end together, and the mask of what is not padding."""
    longest = max(map(len, prompts))
    input_ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - len(prompt) :] = torch.tensor(prompt, dtype=torch.long)
        attention_mask[row, longest - len(prompt) :] = 1
    return input_ids, attention_mask


def cut_after_stop(token_ids: Sequence[int], stop_ids: frozenset[int]) -> list[int]:
    """Tokens up to and including the first stop token."""
    for index, token_id in enumerate(token_ids):
        if token_id in stop_ids:
            return list(token_ids[: index + 1])
    return list(token_ids)


def _batch_seed(seed: int, prompts: Sequence[Sequence[int]]) -> int:
    content = repr((seed, [list(prompt) for prompt in prompts])).encode()
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") % 2**63
