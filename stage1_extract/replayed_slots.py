"""Replayed slots: the fast way to write answers side by side, each slot with a buffer of its own.

A step has one shape whatever runs, so that on a GPU it is recorded as a CUDA graph and replayed:
small targets' kernels end sooner than Python can launch them. Some steps are replayed before the
host looks at what was written, and the next ones are handed over before it works on what it saw.
An answer is the one that `slots.Slots` gives, up to what other kernels round otherwise; the first
step is compared with the target's plain forward pass, and a target that attends in other ways
raises `DecodeUnsupportedError`: for it there are the plain slots.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from stage1_extract.decode_attention import DECODE_ATTENTION, DecodeUnsupportedError
from stage1_extract.generation import cut_after_stop
from stage1_extract.slots import AnswerRows, RunningAnswer, draws, next_tokens

STEPS_PER_LOOK = 8
"""Steps replayed before the host looks: an answer runs past its end by half of them on average."""
_ROOM_STEP_TOKENS = 128
_READ_TOKENS = 65_536
"""Prompt tokens, padding included, that are read at once."""
_PROVEN_PROMPTS = 4
_MAX_RELATIVE_ERROR = 0.05
"""Of the first logits against the plain pass: rounding of bf16 stays far below it."""


ChooseTokens = Callable[..., Tensor]
"""Gives each row's next token as `slots.next_tokens` does; it may not wait for the device."""


class SlotLayer(DynamicLayer):  # type: ignore[misc]  # transformers has no types there
    """Keys and values of one layer, a buffer for each slot; a new token goes to its slot's end."""

    def __init__(self, keys: Tensor, values: Tensor, *, rows: Tensor, num_tokens: Tensor):
        super().__init__()
        self.keys, self.values = keys, values
        self._rows, self._num_tokens = rows, num_tokens
        self.is_initialized = True
        self.dtype, self.device = keys.dtype, keys.device

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Adds one token to each slot; gives the whole buffers."""
        self.keys[self._rows, :, self._num_tokens] = key_states[:, :, 0]
        self.values[self._rows, :, self._num_tokens] = value_states[:, :, 0]
        return self.keys, self.values

    def get_seq_length(self, *_: Any) -> int:
        """Nothing depends on it: every slot has a number of tokens of its own."""
        return 0


class ReplayedSlots(AnswerRows):
    """Running answers of one target; the interface is that of `slots.Slots`."""

    def __init__(
        self, model: PreTrainedModel, *, choose: ChooseTokens = next_tokens, **settings: Any
    ):
        self._device, self._choose = model.device, choose
        self._is_proven = False
        super().__init__(model, **settings)

    def _clear(self) -> None:
        self._running = [None] * self.num_slots
        self._room_tokens = 0
        self._layers: list[SlotLayer] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        # Rows whose next tokens are being written, and how many each of them had before.
        self._in_flight: list[int] = []

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
        free = [row for row, answer in enumerate(self._running) if answer is None]
        started = list(zip(free, prompts, strict=False))
        for row, (request, prompt_ids) in started:
            self._running[row] = RunningAnswer(request, prompt_ids, [])
        # Those of like length together, the longest first: little padding, and room is made once.
        started.sort(key=lambda each: -len(each[1][1]))
        while started:
            longest = len(started[0][1][1])
            count = max(1, _READ_TOKENS // longest)
            self._read([row for row, _ in started[:count]])
            started = started[count:]

    @torch.inference_mode()
    def step(self) -> list[tuple[Any, list[int]]]:
        """Looks at what was written since the last call and hands the next steps over.

        Returns:
            Request and answer tokens of those that ended, by a stop token (included) or at the
            longest length.
        """
        self._look()
        self._in_flight = [row for row, answer in enumerate(self._running) if answer is not None]
        if self._in_flight:
            for _ in range(STEPS_PER_LOOK):
                self._replay()
        ended, self._ended = self._ended, []
        return ended

    # --- reading prompts ------------------------------------------------------------------------

    def _read(self, rows: Sequence[int]) -> None:
        """Reads the prompts of some slots in one forward pass and puts them into their buffers.

        Padding stands on the right, where nothing before it sees it. The last token is read
        anew by the first step, whose logits are the first answer token's.
        """
        prompts = [answer.prompt_ids for row in rows if (answer := self._running[row])]
        longest = max(map(len, prompts))
        token_ids = np.zeros((len(prompts), longest), np.int64)
        for row, prompt in enumerate(prompts):
            token_ids[row, : len(prompt)] = prompt
        cache = DynamicCache()
        self._plain_logits(token_ids, cache)
        self._make_room(longest + self._max_new_tokens + STEPS_PER_LOOK, like=cache)
        self._take_in(rows, cache)
        if not self._is_proven:
            self._prove(rows[:_PROVEN_PROMPTS])

    def _plain_logits(self, token_ids: np.ndarray, cache: Cache) -> Float[Tensor, "prompts vocab"]:
        """Logits behind the last column by the target's own pass, which fills a cache."""
        output = self._model(
            input_ids=torch.from_numpy(token_ids).to(self._device),
            use_cache=True,
            **{self._cache_argument: cache, **self._last_logits_only},
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _take_in(self, rows: Sequence[int], cache: Cache) -> None:
        """Puts prompts' keys and values into their slots."""
        chosen = torch.tensor(rows, device=self._device)
        answers = [self._running[row] for row in rows]
        for layer, read in zip(self._layers, cache.layers, strict=True):
            layer.keys[chosen, :, : read.keys.shape[2]] = read.keys
            layer.values[chosen, :, : read.values.shape[2]] = read.values
        prompts = [answer.prompt_ids for answer in answers if answer is not None]
        self._token_ids[chosen] = self._tensor([prompt[-1] for prompt in prompts])
        self._num_tokens[chosen] = self._tensor([len(prompt) - 1 for prompt in prompts])
        self._num_written[chosen] = 0
        if self._temperature > 0.0:
            uniforms = np.stack([draws(self._seed, p, self._max_new_tokens) for p in prompts])
            self._uniforms[chosen, : self._max_new_tokens] = torch.from_numpy(uniforms).to(
                self._uniforms
            )

    def _tensor(self, numbers: Sequence[int]) -> Int64[Tensor, "_"]:
        return torch.tensor(numbers, dtype=torch.long, device=self._device)

    def _make_room(self, num_tokens: int, *, like: Cache) -> None:
        """Makes the buffers, or longer ones, when they have no room for so many tokens."""
        if num_tokens <= self._room_tokens:
            return
        old, self._layers, self._graph = self._layers, [], None
        if not old:
            zeros = torch.zeros(self.num_slots, dtype=torch.long, device=self._device)
            width = self._max_new_tokens + STEPS_PER_LOOK
            self._token_ids, self._num_tokens = zeros.clone(), zeros.clone()
            self._num_written, self._rows = zeros.clone(), torch.arange(len(zeros)).to(zeros)
            self._written = zeros[:, None].repeat(1, width)
            self._uniforms = torch.zeros(self.num_slots, width, device=self._device)
        self._room_tokens = -(-num_tokens // _ROOM_STEP_TOKENS) * _ROOM_STEP_TOKENS
        for read in like.layers:
            held = old.pop(0) if old else None
            self._layers.append(
                SlotLayer(
                    self._buffer(read.keys, held and held.keys),
                    self._buffer(read.values, held and held.values),
                    rows=self._rows,
                    num_tokens=self._num_tokens,
                )
            )

    def _buffer(self, like: Tensor, before: Tensor | None) -> Tensor:
        """Room for all slots' keys or values in one layer, with what was held before."""
        buffer = like.new_zeros(self.num_slots, like.shape[1], self._room_tokens, like.shape[3])
        if before is not None:
            buffer[:, :, : before.shape[2]] = before
        return buffer

    # --- writing --------------------------------------------------------------------------------

    def _replay(self) -> None:
        """One step of all slots, recorded when it is first taken."""
        if self._device.type != "cuda":
            self._write(self._logits())
            return
        if self._graph is None:
            self._record()
        assert self._graph is not None
        self._graph.replay()

    def _record(self) -> None:
        """Records a step; what it changes while it is tried is put back."""
        changed = (self._token_ids, self._num_tokens, self._num_written, self._written)
        kept = [each.clone() for each in changed]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._write(self._logits())
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self._write(self._logits())
        for each, before in zip(changed, kept, strict=True):
            each.copy_(before)
        self._graph = graph

    def _logits(self) -> Float[Tensor, "slots vocab"]:
        """Logits after the newest token of each slot, which its buffers take in."""
        with _attention(self._model, DECODE_ATTENTION):
            output = self._model(
                input_ids=self._token_ids[:, None],
                position_ids=self._num_tokens[:, None],
                # Four axes: taken as it is, and looked at by nobody.
                attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self._device),
                slot_tokens=self._num_tokens,
                use_cache=True,
                **{self._cache_argument: Cache(layers=list(self._layers))},
                **self._last_logits_only,
            )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _write(self, logits: Float[Tensor, "slots vocab"]) -> None:
        """Writes the next token of each slot; all on the device, in place.

        Slots without an answer write, too, never past their buffers.
        """
        last = self._written.shape[1] - 1
        column = self._num_written.clamp(max=last)[:, None]
        uniforms = self._uniforms.gather(1, column)[:, 0] if self._temperature > 0.0 else None
        tokens = self._choose(
            logits, temperature=self._temperature, top_p=self._top_p, uniforms=uniforms
        )
        self._token_ids.copy_(tokens)
        self._written.scatter_(1, column, tokens[:, None])
        self._num_written.add_(1)
        self._num_tokens.add_(1).clamp_(max=self._room_tokens - 1)

    def _look(self) -> None:
        """Waits for the steps handed over; takes in what they wrote, and ends answers."""
        if not self._in_flight:
            return
        answers = [(row, answer) for row in self._in_flight if (answer := self._running[row])]
        rows = self._tensor([row for row, _ in answers])
        firsts = self._tensor([len(answer.token_ids) for _, answer in answers])
        columns = firsts[:, None] + torch.arange(STEPS_PER_LOOK, device=self._device)
        written = self._written[rows].gather(1, columns).tolist()
        for (row, answer), tokens in zip(answers, written, strict=True):
            has_stop = not self._stop_ids.isdisjoint(tokens)
            answer.token_ids += cut_after_stop(tokens, self._stop_ids) if has_stop else tokens
            del answer.token_ids[self._max_new_tokens :]
            if has_stop or len(answer.token_ids) == self._max_new_tokens:
                self._ended.append((answer.request, answer.token_ids))
                self._running[row] = None
        self._in_flight = []
        freed = [row for row, _ in answers if self._running[row] is None]
        if freed:
            # An idle slot begins anew, so that it attends to little.
            self._num_tokens[self._tensor(freed)] = 0

    def _prove(self, rows: Sequence[int]) -> None:
        """Compares the first step's logits with those of the target's own pass."""
        found = self._logits()[torch.tensor(rows, device=self._device)].float()
        expected = torch.cat(
            [
                self._plain_logits(np.array([answer.prompt_ids], np.int64), DynamicCache())
                for row in rows
                if (answer := self._running[row])
            ]
        ).float()
        error = float((found - expected).norm() / expected.norm())
        if not error < _MAX_RELATIVE_ERROR:
            raise DecodeUnsupportedError(f"logits differ by {error:.3f} from the plain pass's")
        self._is_proven = True


def can_replay(model: PreTrainedModel) -> bool:
    """Whether a target's answers can be written this way: tried with two short ones.

    What a window or chunks leave out shows in longer ones only, so targets with them are told by
    their caches.
    """
    layers = DynamicCache(config=model.config.get_text_config()).layers
    if any(type(layer) is not DynamicLayer for layer in layers):
        print("answers are written step by step: the target attends in windows", file=sys.stderr)
        return False
    slots = ReplayedSlots(model, num_slots=2, max_new_tokens=4, stop_ids=frozenset())
    try:
        slots.start([(0, [1, 2, 3, 4]), (1, [5, 6])])
        slots.step()
        slots.step()
    # Whatever a foreign model or a GPU's compiler raises here, the plain slots serve the target.
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        print(f"answers are written step by step: {first_line}", file=sys.stderr)
        return False
    return True


@contextmanager
def _attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Lets a model attend by another function."""
    configs = list({id(c): c for c in (model.config, model.config.get_text_config())}.values())
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = name
    try:
        yield
    finally:
        for config, each in zip(configs, before, strict=True):
            config._attn_implementation = each
