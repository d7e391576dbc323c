"""What a drafter is decoded against: the target, the suites and the target's own answers."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dflash_offline.config import EvalConfig, RunConfig, store_dir_of
from dflash_offline.decode_target import TargetDecoder, check_cached_passes
from dflash_offline.speculate import Decoding, DecodingSettings, Generation, decode
from dflash_offline.suites import Dialogue, dialogue_messages, load_suite
from stage1_extract.rendering import render
from stage1_extract.target import load_target, resolve_target
from stage1_extract.target_identity import weights_sha256
from stage1_extract.target_transformers import TransformersTarget
from stage2_train.acceptance import (
    accepted_by_offset,
    bootstrap_interval,
    mean_acceptance_length,
)
from stage2_train.device import choose_device
from stage2_train.drafter import Drafter, initialize
from stage2_train.target_head import TargetHead, load_target_head
from storage.reader import Snapshot, open_store

# Rounding moves the two largest logits by about one unit in their last place each.
_TIE_MARGIN, _TIE_MARGIN_HALF = 0.02, 0.25


@dataclass(frozen=True, kw_only=True)
class Reference:
    """One suite with the target's own answers: what every drafter is compared with."""

    suite: str
    prompts: list[list[int]]
    plain: Decoding


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Everything that is loaded once and serves all drafters."""

    target: TransformersTarget
    head: TargetHead
    references: list[Reference]
    settings: DecodingSettings
    config: EvalConfig
    train_seed: int

    @property
    def tie_margin(self) -> float:
        """Top-2 margin below which a differing token is a tie."""
        if self.config.tie_margin is not None:
            return self.config.tie_margin
        is_half = torch.finfo(self.target.model.dtype).bits < 32
        return _TIE_MARGIN_HALF if is_half else _TIE_MARGIN


def open_bench(config: RunConfig) -> Bench:
    """Loads the target and decodes every suite with it alone."""
    store = open_store(store_dir_of(config))
    folder = resolve_target(config.target)
    if weights_sha256(folder) != store.identity.target_weights_sha256:
        raise ValueError(
            f"target.model {config.target.model} has other weights than the target of the store "
            f"({store.identity.target_name}); evaluate with the target that was extracted"
        )
    target = load_target(config.target, device=str(choose_device()))
    head = load_target_head(store)
    settings = DecodingSettings(
        max_new_tokens=config.eval.max_new_tokens,
        stop_token_ids=head.eos_token_ids,
        temperature=config.eval.temperature,
        top_p=config.eval.top_p,
        top_k=config.eval.top_k,
    )
    decoder = TargetDecoder(target.model)
    check_cached_passes(decoder)
    snapshot = store.snapshot()
    references = [
        decode_reference(
            decoder,
            name,
            snapshot=snapshot,
            tokenizer=target.tokenizer,
            template_arguments=store.identity.template_arguments,
            settings=settings,
            config=config.eval,
        )
        for name in config.eval.suites
    ]
    return Bench(
        target=target,
        head=head,
        references=references,
        settings=settings,
        config=config.eval,
        train_seed=config.train.seed,
    )


def decode_reference(
    decoder: TargetDecoder,
    suite: str,
    *,
    snapshot: Snapshot,
    tokenizer: Any,
    template_arguments: Mapping[str, Any],
    settings: DecodingSettings,
    config: EvalConfig,
) -> Reference:
    """Decodes a suite with the target alone, turn by turn; every turn is one request."""
    dialogues = load_suite(suite, snapshot=snapshot, limit=config.num_prompts)
    print(f"{suite}: the target decodes {len(dialogues)} prompts alone first", flush=True)
    answers: list[list[str]] = [[] for _ in dialogues]
    prompts: list[list[int]] = []
    generations: list[Generation] = []
    decode_s = 0.0
    room = getattr(decoder.config, "max_position_embeddings", None) or sys.maxsize
    num_too_long = 0
    for turn in range(max(len(dialogue.turns) or 1 for dialogue in dialogues)):
        asked: list[int] = []
        rendered: list[list[int]] = []
        for index, dialogue in enumerate(dialogues):
            if turn > 0 and (turn >= len(dialogue.turns) or len(answers[index]) < turn):
                continue
            prompt = _prompt_ids(dialogue, answers[index], tokenizer, template_arguments)
            if len(prompt) + settings.max_new_tokens > room:
                num_too_long += 1
                continue
            asked.append(index)
            rendered.append(prompt)
        plain = decode(
            decoder,
            rendered,
            settings=settings,
            batch_size=config.batch_size,
            seed=config.seed,
        )
        for index, generation in zip(asked, plain.generations, strict=True):
            answers[index].append(tokenizer.decode(generation.token_ids, skip_special_tokens=True))
        prompts += rendered
        generations += plain.generations
        decode_s += plain.decode_s
    if not prompts:
        raise ValueError(f"eval.suites: no prompt of {suite} leaves room for an answer")
    if all(len(generation.token_ids) == 1 for generation in generations):
        raise ValueError(f"eval: no answer of {suite} has a second token; nothing can be drafted")
    note = f", {num_too_long} too long and left out" if num_too_long else ""
    plain = Decoding(generations=generations, decode_s=decode_s)
    rate = f"target alone {plain.tokens_per_s:.1f} tokens/s"
    print(f"{suite}: {len(prompts)} prompts{note}, {rate}", flush=True)
    return Reference(suite=suite, prompts=prompts, plain=plain)


def _prompt_ids(
    dialogue: Dialogue,
    answers: Sequence[str],
    tokenizer: Any,
    template_arguments: Mapping[str, Any],
) -> list[int]:
    if dialogue.token_ids is not None:
        return list(dialogue.token_ids)
    messages = list(dialogue_messages(dialogue, answers))
    return render(messages, tokenizer, template_arguments, add_generation_prompt=True)


def evaluate_drafter(
    bench: Bench, drafter: Drafter, *, untrained: "UntrainedDrafters"
) -> dict[str, Any]:
    """Decodes every suite with a drafter; gives the content of `eval.json`."""
    suites = decode_suites(bench, drafter)
    floor = untrained.results(drafter) if bench.config.untrained else {}
    for suite, result in suites.items():
        result["untrained"] = floor.get(suite)
    first = bench.references[0].suite
    baseline = floor.get(first, {})
    return {
        "acceptance_length": suites[first]["acceptance_length"],
        "suites": suites,
        "untrained_acceptance_length": baseline.get("acceptance_length"),
        "untrained_interval": baseline.get("acceptance_length_interval"),
        "tie_margin": bench.tie_margin,
        "settings": bench.config.model_dump(mode="json"),
    }


def decode_suites(bench: Bench, drafter: Drafter) -> dict[str, dict[str, Any]]:
    """Gives each suite's result with a drafter."""
    return {
        reference.suite: suite_result(
            bench, reference, decode_with(bench, drafter, reference), drafter=drafter
        )
        for reference in bench.references
    }


def decode_with(bench: Bench, drafter: Drafter, reference: Reference) -> Decoding:
    """Decodes a suite with a drafter."""
    model = bench.target.model
    decoder = TargetDecoder(model, layer_ids=drafter.architecture.target_layer_ids)
    _check_fit(drafter, decoder)
    return decode(
        decoder,
        reference.prompts,
        settings=bench.settings,
        batch_size=bench.config.batch_size,
        drafter=drafter.to(decoder.device, decoder.dtype),
        head=bench.head,
        seed=bench.config.seed,
    )


def suite_result(
    bench: Bench, reference: Reference, drafted: Decoding, *, drafter: Drafter
) -> dict[str, Any]:
    """Gives one suite's part of `eval.json`."""
    lengths = [generation.acceptance_lengths for generation in drafted.generations]
    result: dict[str, Any] = {
        "num_prompts": len(reference.prompts),
        "acceptance_length": mean_acceptance_length(lengths),
        "acceptance_length_interval": list(interval(lengths, bench.config)),
        "accepted_by_offset": accepted_by_offset(
            lengths, block_size=drafter.architecture.block_size
        ),
        "target_tokens_per_s": reference.plain.tokens_per_s,
        "drafted_tokens_per_s": drafted.tokens_per_s,
        "lossless_fraction": None,
    }
    if bench.settings.temperature == 0.0:
        verdicts = [
            compare(alone, with_drafter, tie_margin=bench.tie_margin)
            for alone, with_drafter in zip(
                reference.plain.generations, drafted.generations, strict=True
            )
        ]
        result |= {
            "lossless_fraction": 1.0 - verdicts.count("differs") / len(verdicts),
            "num_ties": verdicts.count("tie"),
            "num_differing": verdicts.count("differs"),
        }
    return result


def compare(alone: Generation, with_drafter: Generation, *, tie_margin: float) -> str:
    """Says whether an answer `equals` the target's own, leaves it at a `tie`, or `differs`.

    Only the first differing token is judged: after it the two answer different things.
    """
    if alone.token_ids == with_drafter.token_ids:
        return "equals"
    pairs = zip(alone.token_ids, with_drafter.token_ids, strict=False)
    first = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
    # A longer answer with the same beginning cannot be explained by a tie.
    return "tie" if first is not None and alone.top2_margins[first] < tie_margin else "differs"


def interval(lengths: list[list[int]], config: EvalConfig) -> tuple[float, float]:
    """Gives the 95% bootstrap interval of the mean acceptance length."""
    return bootstrap_interval(lengths, seed=config.seed)


class UntrainedDrafters:
    """Results of fresh drafters, decoded once for each shape: the floor, and as good a witness
    of losslessness as a trained one.
    """

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._results: dict[str, dict[str, dict[str, Any]]] = {}

    def results(self, like: Drafter) -> dict[str, dict[str, Any]]:
        """Gives each suite's result with a drafter of this shape before any training."""
        key = json.dumps(like.architecture.to_config(), sort_keys=True)
        if key not in self._results:
            fresh = Drafter(like.architecture)
            initialize(fresh, seed=self.bench.train_seed)
            self._results[key] = decode_suites(self.bench, fresh)
        return self._results[key]


def _check_fit(drafter: Drafter, decoder: TargetDecoder) -> None:
    shape, config = drafter.architecture, decoder.config
    for name, found, expected in (
        ("hidden_size", shape.hidden_size, config.hidden_size),
        ("num_target_layers", shape.num_target_layers, config.num_hidden_layers),
    ):
        if found != expected:
            raise ValueError(
                f"the drafter was made for another target: its {name} is {found}, this target's "
                f"{expected}"
            )
