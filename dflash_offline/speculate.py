"""Speculative decoding of many prompts at once: the drafter proposes, the target decides.

Greedy output equals plain greedy decoding of the target for any drafter; sampled output has the
target's distribution for any drafter. Plain decoding is the same loop without a drafter.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dflash_offline.decode_target import TargetDecoder, TargetPass
from dflash_offline.sampling import (
    accept_sampled,
    clip_gain,
    draw,
    sampling_probabilities,
)
from stage2_train.acceptance import accept_greedy
from stage2_train.draft import ContextCache, draft_logits, head_of
from stage2_train.drafter import Drafter
from stage2_train.target_head import TargetHead

# Caches are copied without their finished rows when no more than this share is still running.
_COMPACT_BELOW_FRACTION = 0.75


@dataclass(frozen=True, kw_only=True)
class DecodingSettings:
    """How answers are decoded."""

    max_new_tokens: int
    """Longest answer, in tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer; they are part of it."""
    temperature: float = 0.0
    """0 is greedy decoding."""
    top_p: float = 1.0
    """Nucleus share of probability kept when sampling."""
    top_k: int = 0
    """Most likely tokens kept when sampling; 0 keeps all."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One decoded answer."""

    token_ids: list[int]
    """Tokens after the prompt, a stop token included."""
    acceptance_lengths: list[int]
    """Tokens gained by each target pass after the prefill, clipped as the official package does."""
    top2_margins: list[float]
    """Distance of the target's two largest logits at each token; empty with a drafter."""


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """All answers, in the order of the prompts."""

    generations: list[Generation]
    decode_s: float
    """Time after the prefills, in seconds."""

    @property
    def tokens_per_s(self) -> float:
        """Rate of decoded tokens; each answer's first token belongs to its prefill."""
        gained = sum(len(generation.token_ids) - 1 for generation in self.generations)
        return gained / self.decode_s if self.decode_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Where one pass of every row begins and how far it goes."""

    anchor_ids: Int[Tensor, "rows"]
    """Last known token."""
    positions: Int[Tensor, "rows queries"]
    lengths: Int[Tensor, "rows"]
    """Tokens of the block that may count, anchor included."""


@dataclass
class _Rows:
    """The requests still running, one row each."""

    indices: Int[Tensor, "rows"]
    """Place of each in the batch."""
    starts: Int[Tensor, "rows"]
    """Position of the last known token."""
    limits: Int[Tensor, "rows"]
    """Length at which the request ends."""
    is_active: Bool[Tensor, "rows"]


def decode(
    target: TargetDecoder,
    prompts: Sequence[Sequence[int]],
    *,
    settings: DecodingSettings,
    batch_size: int,
    drafter: Drafter | None = None,
    head: TargetHead | None = None,
    seed: int = 0,
) -> Decoding:
    """Decode an answer to every prompt, in batches of prompts of like length.

    Args:
        target: the target; its `layer_ids` must be the drafter's.
        prompts: token ids of each prompt.
        settings: how to decode.
        batch_size: prompts decoded at once; 1 is used for a target with linear-attention layers.
        drafter: the drafter; None decodes with the target alone.
        head: the target's embedding and LM head for the drafter.
        seed: seed of sampling; what it gives depends on `batch_size`.

    Raises:
        ValueError: a prompt is empty, or the target reads other layers than the drafter.
    """
    empty = [index for index, prompt in enumerate(prompts) if len(prompt) == 0]
    if empty:
        raise ValueError(f"prompt {empty[0]} has no token; every prompt needs at least one")
    if drafter is not None:
        if drafter.architecture.target_layer_ids != target.layer_ids:
            raise ValueError(
                f"the drafter reads target layers {drafter.architecture.target_layer_ids}, the "
                f"target gives {target.layer_ids}"
            )
        if head is None:
            raise ValueError("a drafter needs the target's head")
        head = head_of(drafter, head)
        drafter.eval()
    generator = torch.Generator(device=target.device).manual_seed(seed)
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    size = 1 if target.must_replay else batch_size
    answers: dict[int, Generation] = {}
    decode_s = 0.0
    for first in range(0, len(order), size):
        indices = order[first : first + size]
        batch = _BatchDecoder(
            target,
            [prompts[index] for index in indices],
            settings=settings,
            drafter=drafter,
            head=head,
            generator=generator,
        )
        generations, seconds = batch.run()
        answers.update(zip(indices, generations, strict=True))
        decode_s += seconds
    return Decoding(
        generations=[answers[index] for index in range(len(prompts))], decode_s=decode_s
    )


class _BatchDecoder:
    """One batch of requests in lockstep: every pass gains each of them at least one token."""

    def __init__(
        self,
        target: TargetDecoder,
        prompts: Sequence[Sequence[int]],
        *,
        settings: DecodingSettings,
        drafter: Drafter | None,
        head: TargetHead | None,
        generator: torch.Generator,
    ) -> None:
        self.target, self.drafter, self.head = target, drafter, head
        self.settings, self.generator = settings, generator
        self.prompts = prompts
        self.block_size = 1 if drafter is None else drafter.architecture.block_size
        device = target.device
        self.offsets = torch.arange(self.block_size, device=device)
        self.stops = torch.tensor(settings.stop_token_ids, dtype=torch.long, device=device)
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        # A block that starts at the last token still writes its whole width.
        self.num_slots = int(lengths.max()) + settings.max_new_tokens + self.block_size
        size = (len(prompts), self.num_slots + 1)
        self.token_ids = torch.zeros(size, dtype=torch.long, device=device)
        self.margins = torch.zeros(size, dtype=torch.float32, device=device)
        self.acceptance_lengths: list[list[int]] = [[] for _ in prompts]
        self.ends = lengths.tolist()
        self.rows = _Rows(
            indices=torch.arange(len(prompts), device=device),
            starts=lengths.to(device),
            limits=(lengths + settings.max_new_tokens).to(device),
            is_active=torch.ones(len(prompts), dtype=torch.bool, device=device),
        )
        self.context: ContextCache | None = None
        # What the host knows of the rows, so that a pass costs one synchronisation.
        self.host_rows = list(range(len(prompts)))
        self.host_starts: list[int] = lengths.tolist()
        self.host_active: set[int] = set()

    @torch.inference_mode()
    def run(self) -> tuple[list[Generation], float]:
        """Decode all answers; gives them and the seconds after the prefill."""
        self._prefill()
        _synchronize(self.target.device)
        start_s = time.perf_counter()
        while self.host_active:
            block = self._block()
            drafted, draft_probabilities = self._draft(block)
            token_ids = torch.cat((block.anchor_ids[:, None], drafted), dim=1)
            seen = self.target.verify(token_ids, block.positions, num_visible=self._num_visible())
            num_accepted, new_ids = self._accept(seen.logits, block, drafted, draft_probabilities)
            num_kept = self._advance(num_accepted, new_ids, seen)
            self.target.keep_tokens(token_ids, seen.positions, num_kept)
            self._drop_finished_rows()
        _synchronize(self.target.device)
        return self._generations(), time.perf_counter() - start_s

    def _prefill(self) -> None:
        seen = self.target.prefill(self.prompts, num_slots=self.num_slots)
        if self.drafter is not None:
            self.context = ContextCache(
                self.drafter, batch_size=len(self.prompts), num_slots=self.num_slots + 1
            )
            assert seen.states is not None
            self.context.write(seen.states, seen.positions, seen.slots)
        logits = seen.logits[:, -1:]
        first_ids = self._choose(logits)
        self.token_ids[self.rows.indices, self.rows.starts] = first_ids[:, 0]
        self._record_margins(logits, self.rows.starts[:, None])
        self.rows.is_active = ~self._is_stop(first_ids)[:, 0] & (
            self.rows.starts + 1 < self.rows.limits
        )
        active = self.rows.is_active.tolist()
        self.host_active = {row for row, is_active in enumerate(active) if is_active}

    def _block(self) -> _Block:
        rows = self.rows
        return _Block(
            anchor_ids=self.token_ids[rows.indices, rows.starts],
            positions=rows.starts[:, None] + self.offsets,
            lengths=(rows.limits - rows.starts).clamp(1, self.block_size),
        )

    def _draft(
        self, block: _Block
    ) -> tuple[Int[Tensor, "rows drafted"], Float[Tensor, "rows drafted vocab"] | None]:
        """Propose the tokens after each anchor; with sampling also their distributions."""
        if self.drafter is None:
            return self.rows.starts.new_empty((len(self.rows.starts), 0)), None
        assert self.context is not None
        assert self.head is not None
        logits = draft_logits(
            self.drafter,
            self.head,
            self.context,
            anchor_ids=block.anchor_ids,
            anchors=self.rows.starts,
            block_lengths=block.lengths,
            num_visible=max(self.host_starts),
        )
        if self.settings.temperature == 0.0:
            return logits.argmax(dim=-1), None
        probabilities = self._probabilities(logits)
        return draw(probabilities, generator=self.generator), probabilities

    def _accept(
        self,
        logits: Float[Tensor, "rows queries vocab"],
        block: _Block,
        drafted: Int[Tensor, "rows drafted"],
        draft_probabilities: Float[Tensor, "rows drafted vocab"] | None,
    ) -> tuple[Int[Tensor, "rows"], Int[Tensor, "rows queries"]]:
        """Judge the drafted tokens; gives how many stand and the tokens gained, in order."""
        if draft_probabilities is None:
            new_ids = self._choose(logits)
            if self.drafter is None:
                self._record_margins(logits, block.positions + 1)
            # Accepted tokens equal the target's choices, so the choices are what is gained.
            return accept_greedy(drafted, new_ids, block.lengths - 1), new_ids
        num_accepted, next_ids = accept_sampled(
            drafted,
            draft_probabilities,
            self._probabilities(logits),
            block.lengths - 1,
            generator=self.generator,
        )
        new_ids = torch.cat((drafted, next_ids[:, None]), dim=1)
        new_ids.scatter_(1, num_accepted[:, None], next_ids[:, None])
        return num_accepted, new_ids

    def _advance(
        self,
        num_accepted: Int[Tensor, "rows"],
        new_ids: Int[Tensor, "rows queries"],
        seen: TargetPass,
    ) -> int:
        """Take the gained tokens in; gives how many tokens of the first row's block stay."""
        rows = self.rows
        room = rows.limits - rows.starts - 1
        gained, stopped = clip_gain(num_accepted, room, self._is_stop(new_ids))
        gained = gained * rows.is_active
        self.token_ids[rows.indices[:, None], seen.positions + 1] = new_ids
        rows.starts = rows.starts + gained
        rows.is_active = rows.is_active & ~stopped & (rows.starts + 1 < rows.limits)
        news = torch.stack((gained, rows.is_active.long()))
        if self.context is not None:
            assert seen.states is not None
            self.context.write(seen.states, seen.positions, seen.slots)
        host_gained, host_active = news.tolist()
        for row in tuple(self.host_active):
            self.acceptance_lengths[self.host_rows[row]].append(host_gained[row])
            self.host_starts[row] += host_gained[row]
            self.ends[self.host_rows[row]] = self.host_starts[row]
            if not host_active[row]:
                self.host_active.discard(row)
        return int(host_gained[0])

    def _drop_finished_rows(self) -> None:
        num_active, num_rows = len(self.host_active), len(self.host_rows)
        if not 0 < num_active <= num_rows * _COMPACT_BELOW_FRACTION:
            return
        kept = sorted(self.host_active)
        rows = torch.tensor(kept, device=self.target.device)
        self.target.keep_rows(rows)
        if self.context is not None:
            self.context.keep_rows(rows)
        self.rows = _Rows(
            indices=self.rows.indices[rows],
            starts=self.rows.starts[rows],
            limits=self.rows.limits[rows],
            is_active=self.rows.is_active[rows],
        )
        self.host_rows = [self.host_rows[row] for row in kept]
        self.host_starts = [self.host_starts[row] for row in kept]
        self.host_active = set(range(len(kept)))

    def _generations(self) -> list[Generation]:
        token_ids, margins = self.token_ids.tolist(), self.margins.tolist()
        return [
            Generation(
                token_ids=token_ids[index][len(prompt) : end + 1],
                acceptance_lengths=self.acceptance_lengths[index],
                top2_margins=[]
                if self.drafter is not None or self.settings.temperature > 0.0
                else margins[index][len(prompt) : end + 1],
            )
            for index, (prompt, end) in enumerate(zip(self.prompts, self.ends, strict=True))
        ]

    def _choose(self, logits: Float[Tensor, "rows queries vocab"]) -> Int[Tensor, "rows queries"]:
        if self.settings.temperature == 0.0:
            return logits.argmax(dim=-1)
        return draw(self._probabilities(logits), generator=self.generator)

    def _probabilities(self, logits: Tensor) -> Tensor:
        return sampling_probabilities(
            logits,
            temperature=self.settings.temperature,
            top_p=self.settings.top_p,
            top_k=self.settings.top_k,
        )

    def _record_margins(
        self,
        logits: Float[Tensor, "rows tokens vocab"],
        positions: Int[Tensor, "rows tokens"],
    ) -> None:
        top = logits.float().topk(2, dim=-1).values
        self.margins[self.rows.indices[:, None], positions] = top[..., 0] - top[..., 1]

    def _num_visible(self) -> int:
        return max(self.host_starts) + self.block_size

    def _is_stop(self, token_ids: Int[Tensor, "rows tokens"]) -> Bool[Tensor, "rows tokens"]:
        return (token_ids[..., None] == self.stops).any(dim=-1)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
