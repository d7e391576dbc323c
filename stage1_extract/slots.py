"""Slots: answers written side by side; one that ends makes room for the next prompt at once.

All running answers end at the same column of one cache: shorter ones are padded on the left and
the padding is masked, so that the target's own forward pass, masks and windows serve as they are.
A new prompt is read by itself and its keys and values join the cache. The row of an answer that has
ended goes on unheeded until there are enough such rows, for dropping rows copies the whole cache.
Every answer is the one that its prompt alone would get, greedy or sampled.

transformers' own continuous batching was looked at and left: it needs paged attention functions,
replaces the target's attention (no soft caps, no sinks), and its interface differs between the
versions that this program runs on.
"""

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from stage1_extract.generation import pad_left
from stage1_extract.growing_cache import growing_cache

# Rows of ended answers are dropped when they are one in so many of all.
_DROP_SHARE = 8
_PLAIN_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")


@dataclass(eq=False)
class RunningAnswer:
    """One answer that is being written."""

    request: Any
    """The caller's own, given back with the answer."""
    prompt_ids: Sequence[int]
    token_ids: list[int]
    """Written so far."""
    uniforms: np.ndarray | None = None
    """One draw for each token to come, when sampling."""


def draws(seed: int, prompt_ids: Sequence[int], num_tokens: int) -> np.ndarray:
    """Uniform numbers that decide an answer's sampled tokens: a function of seed and prompt."""
    content = repr((seed, list(prompt_ids))).encode()
    key = int.from_bytes(hashlib.sha256(content).digest()[:16], "little")
    return np.random.Generator(np.random.Philox(key=key)).random(num_tokens)


def next_tokens(
    logits: Float[Tensor, "rows vocab"],
    *,
    temperature: float,
    top_p: float,
    uniforms: Float[Tensor, "rows"] | None,
) -> Int64[Tensor, "rows"]:
    """The next token of each row: the likeliest, or the one that its uniform number falls on.

    Args:
        logits: Of the last token of each row.
        temperature: 0 is greedy.
        top_p: Nucleus: the fewest likeliest tokens that together reach this share are kept.
        uniforms: In [0, 1); None only with temperature 0.
    """
    if temperature == 0.0:
        return logits.argmax(dim=-1)
    assert uniforms is not None
    shares, order = torch.softmax(logits.float() / temperature, dim=-1).sort(descending=True)
    upper = shares.cumsum(dim=-1)
    kept = torch.where(upper - shares < top_p, shares, 0.0)
    upper = kept.cumsum(dim=-1)
    wanted = uniforms.to(upper)[:, None] * upper[:, -1:]
    # Rounding could point behind the last kept token.
    place = torch.searchsorted(upper, wanted, right=True)
    place = place.clamp(max=(kept > 0).sum(dim=-1, keepdim=True) - 1)
    return order.gather(1, place)[:, 0]


def can_share_slots(model: PreTrainedModel) -> bool:
    """Whether a target's caches are keys and values only, so that rows can join and leave."""
    layers = DynamicCache(config=model.config.get_text_config()).layers
    return bool(layers) and all(type(layer).__name__ in _PLAIN_LAYERS for layer in layers)


class AnswerRows:
    """Rows of a batch in which answers run; both kinds of slots are such."""

    _running: list["RunningAnswer | None"]
    """A row whose answer has ended holds None."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_slots: int,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ):
        self.num_slots = num_slots
        self._model = model
        self._max_new_tokens = max_new_tokens
        self._stop_ids = stop_ids
        self._temperature, self._top_p, self._seed = temperature, top_p, seed
        parameters = inspect.signature(model.forward).parameters
        # The argument has another name in newer versions of transformers.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._last_logits_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        # Answers wait here until they are given: memory may run out in between.
        self._ended: list[tuple[Any, list[int]]] = []
        self._clear()

    @property
    def num_running(self) -> int:
        """Answers that are being written."""
        return sum(answer is not None for answer in self._running)

    @property
    def num_free(self) -> int:
        """Prompts that can be started now."""
        return self.num_slots - self.num_running

    def shrink(self) -> list[Any]:
        """Drops all running answers and halves the slots, for want of memory.

        Returns:
            The requests of the dropped answers, to be started again.
        """
        requests = [answer.request for answer in self._running if answer is not None]
        self.num_slots = max(1, self.num_slots // 2)
        self._clear()
        torch.cuda.empty_cache()
        return requests

    def _clear(self) -> None:
        """Forgets all rows and what was computed for them."""
        raise NotImplementedError


class Slots(AnswerRows):
    """Running answers of one target, at most `num_slots` at a time."""

    def _live_rows(self) -> list[int]:
        return [row for row, answer in enumerate(self._running) if answer is not None]

    def _clear(self) -> None:
        self._running = []
        self._cache = growing_cache()
        self._is_real = torch.zeros(0, 0, dtype=torch.bool)
        self._logits: Tensor | None = None

    @torch.inference_mode()
    def start(self, prompts: Sequence[tuple[Any, Sequence[int]]]) -> None:
        """Reads prompts in one forward pass and lets their answers run beside the others.

        When memory does not suffice for it, these prompts count as running: `shrink` gives them.

        Args:
            prompts: Request and prompt tokens of each; at most `num_free`.
        """
        assert len(prompts) <= self.num_free
        if not prompts:
            return
        try:
            self._drop_ended(at_least=1)
        finally:
            self._running += [
                RunningAnswer(request, prompt_ids, [], self._draws(prompt_ids))
                for request, prompt_ids in prompts
            ]
        token_ids, attention_mask = pad_left([prompt_ids for _, prompt_ids in prompts])
        is_real = attention_mask.bool().to(self._model.device)
        cache = growing_cache()
        logits = self._forward(token_ids, is_real=is_real, cache=cache)
        self._join(cache, is_real, logits)

    @torch.inference_mode()
    def step(self) -> list[tuple[Any, list[int]]]:
        """Writes one token of every running answer.

        Returns:
            Request and answer tokens of those that ended with it, by a stop token (included) or at
            the longest length.
        """
        if self._live_rows():
            self._write_tokens()
        ended, self._ended = self._ended, []
        return ended

    def _write_tokens(self) -> None:
        assert self._logits is not None
        tokens = next_tokens(
            self._logits,
            temperature=self._temperature,
            top_p=self._top_p,
            uniforms=self._next_draws(),
        )
        for row, (answer, token_id) in enumerate(zip(self._running, tokens.tolist(), strict=True)):
            if answer is None:
                continue
            answer.token_ids.append(token_id)
            if token_id in self._stop_ids or len(answer.token_ids) == self._max_new_tokens:
                self._ended.append((answer.request, answer.token_ids))
                self._running[row] = None
        kept = self._drop_ended(at_least=-(-len(self._running) // _DROP_SHARE))
        if kept:
            self._advance(tokens[torch.tensor(kept, device=tokens.device)])

    def _drop_ended(self, *, at_least: int) -> list[int]:
        """Drops the rows of ended answers if they are so many; gives the rows that stay."""
        live = self._live_rows()
        num_ended = len(self._running) - len(live)
        if live and num_ended < at_least:
            return list(range(len(self._running)))
        if num_ended:
            self._keep_rows(live)
        return live

    def _advance(self, tokens: Int64[Tensor, "rows"]) -> None:
        """Takes the tokens just written in, for the logits of the next ones."""
        column = torch.ones_like(self._is_real[:, :1])
        self._is_real = torch.cat([self._is_real, column], dim=1)
        self._logits = self._forward(tokens[:, None], is_real=self._is_real, cache=self._cache)

    def _forward(
        self,
        token_ids: Int64[Tensor, "rows queries"],
        *,
        is_real: Bool[Tensor, "rows columns"],
        cache: Cache,
    ) -> Float[Tensor, "rows vocab"]:
        """Logits after the last token; the cache takes the tokens in."""
        positions = (is_real.long().cumsum(dim=1) - 1).clamp(min=0)
        ended = [row for row, answer in enumerate(self._running) if answer is None]
        if cache is self._cache and ended:
            # The row of an ended answer must not run past the target's last position.
            positions[torch.tensor(ended, device=positions.device)] = 0
        output = self._model(
            input_ids=token_ids.to(self._model.device),
            attention_mask=is_real.long(),
            position_ids=positions[:, -token_ids.shape[1] :],
            use_cache=True,
            **{self._cache_argument: cache, **self._last_logits_only},
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _join(
        self,
        cache: Cache,
        is_real: Bool[Tensor, "rows columns"],
        logits: Float[Tensor, "rows vocab"],
    ) -> None:
        """Puts new rows under the running ones, all ending at the same column."""
        if self._logits is None:
            self._cache, self._is_real, self._logits = cache, is_real, logits
            return
        width = max(self._is_real.shape[1], is_real.shape[1])
        for old, new in zip(self._cache.layers, cache.layers, strict=True):
            keys = [widened(each.keys, width, dim=2) for each in (old, new)]
            values = [widened(each.values, width, dim=2) for each in (old, new)]
            old.hold(torch.cat(keys), torch.cat(values))
        parts = [widened(each, width, dim=1) for each in (self._is_real, is_real)]
        self._is_real = torch.cat(parts)
        self._logits = torch.cat([self._logits, logits])

    def _keep_rows(self, rows: Sequence[int]) -> None:
        """Drops all other rows, and the columns that are padding in every row that stays."""
        self._running = [self._running[row] for row in rows]
        if not rows:
            self._clear()
            return
        assert self._logits is not None
        chosen = torch.tensor(rows, device=self._is_real.device)
        first = int(self._is_real[chosen].any(dim=0).long().argmax())
        self._is_real = self._is_real[chosen, first:]
        self._logits = self._logits[chosen]
        for layer in self._cache.layers:
            layer.hold(layer.keys[chosen, :, first:], layer.values[chosen, :, first:])

    def _draws(self, prompt_ids: Sequence[int]) -> np.ndarray | None:
        if self._temperature == 0.0:
            return None
        return draws(self._seed, prompt_ids, self._max_new_tokens)

    def _next_draws(self) -> Tensor | None:
        if self._temperature == 0.0:
            return None
        numbers = [
            0.0
            if answer is None or answer.uniforms is None
            else answer.uniforms[len(answer.token_ids)]
            for answer in self._running
        ]
        return torch.tensor(numbers, dtype=torch.float32, device=self._model.device)


def widened(values: Tensor, width: int, *, dim: int) -> Tensor:
    """A tensor with zeros put in front along a dimension until it is `width` long."""
    shape = list(values.shape)
    shape[dim] = width - shape[dim]
    return values if shape[dim] == 0 else torch.cat([values.new_zeros(shape), values], dim=dim)
