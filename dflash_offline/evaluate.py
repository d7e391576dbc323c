"""Evaluate drafters by real speculative decoding: the number that says what a drafter is worth.

A process of its own, beside or after training: it loads the target, decodes the suites once with
the target alone, then with each drafter, and compares the answers token by token. Results go to
`eval.json` of each drafter, whole or not at all, and into each evaluated checkpoint, so that the
best one is known.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dflash_offline.config import EvalConfig, RunConfig, drafter_run, run_dir_of, store_dir_of
from dflash_offline.decode_target import TargetDecoder, check_cached_passes
from dflash_offline.plots import acceptance_plot
from dflash_offline.speculate import Decoding, DecodingSettings, Generation, decode
from dflash_offline.suites import Dialogue, dialogue_messages, load_suite
from stage1_extract.rendering import render
from stage1_extract.target import load_target, resolve_target
from stage1_extract.target_files import load_config
from stage1_extract.target_identity import weights_sha256
from stage1_extract.target_transformers import TransformersTarget
from stage2_train.acceptance import (
    accepted_by_offset,
    bootstrap_interval,
    mean_acceptance_length,
)
from stage2_train.checkpoint import (
    EVALUATION,
    best_checkpoint,
    latest_checkpoint,
    list_checkpoints,
    read_state,
)
from stage2_train.device import choose_device
from stage2_train.drafter import Drafter, initialize
from stage2_train.export import load_any_drafter
from stage2_train.target_head import TargetHead, load_target_head
from storage.files import replace_whole
from storage.reader import Snapshot, open_store

EXIT_LOSSLESS, EXIT_NOT_LOSSLESS = 0, 1
WATCH_PAUSE_S = 5.0
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


def evaluate(
    config: RunConfig, *, drafter_names: Sequence[str], folder: Path | None, watch: bool
) -> int:
    """Evaluates drafters of a run, or one folder, and prints the table.

    Args:
        config: the run file, checked.
        drafter_names: drafters to evaluate; none means all.
        folder: a drafter folder from anywhere, instead of the run's own.
        watch: whether to go on with new checkpoints until every training is done.

    Returns:
        0 when every answer equals the target's own up to ties, else 1.

    Raises:
        ValueError: there is nothing to evaluate, or target, store and drafter do not fit.
    """
    torch.set_num_threads(config.eval.torch_threads)
    names = list(drafter_names) or [drafter.name for drafter in config.drafter]
    drafter_dirs = {name: drafter_run(config, name).drafter_dir for name in names}
    if folder is None and not watch:
        _require_checkpoints(drafter_dirs)
    foreign: dict[str, Drafter] = {}
    if folder is not None:
        # Before the target decodes its own answers, which takes minutes.
        num_target_layers = load_config(config.target).num_hidden_layers
        foreign[folder.name] = load_any_drafter(folder, num_target_layers=num_target_layers)
    bench = open_bench(config)
    untrained = UntrainedDrafters(bench)
    if foreign:
        results = {
            name: evaluate_drafter(bench, drafter, untrained=untrained)
            for name, drafter in foreign.items()
        }
        for name, result in results.items():
            _write_json(run_dir_of(config) / f"eval-{name}.json", result)
    elif watch:
        results = watch_run(bench, drafter_dirs, untrained=untrained)
    else:
        results = {
            name: evaluate_run(bench, drafter_dir, untrained=untrained)
            for name, drafter_dir in drafter_dirs.items()
        }
    print_table(results)
    plot = "eval.svg" if folder is None else f"eval-{folder.name}.svg"
    plot_path = run_dir_of(config) / plot
    replace_whole(plot_path, acceptance_plot(results).encode())
    print(f"accepted by offset: {plot_path}")
    return _exit_code(results, tie_margin=bench.tie_margin)


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


def evaluate_run(
    bench: Bench, drafter_dir: Path, *, untrained: "UntrainedDrafters"
) -> dict[str, Any]:
    """Evaluates a drafter's best and newest checkpoint and writes the better one's `eval.json`."""
    forget_other_evaluations(drafter_dir, bench.config)
    candidates = {best_checkpoint(drafter_dir), latest_checkpoint(drafter_dir)}
    for checkpoint in sorted(path for path in candidates if path is not None):
        evaluate_checkpoint(bench, checkpoint, drafter_dir, untrained=untrained)
    result = _publish_best(drafter_dir)
    if result is None:
        raise ValueError(f"{drafter_dir}: its checkpoints were removed while they were decoded")
    return result


def forget_other_evaluations(drafter_dir: Path, config: EvalConfig) -> None:
    """Removes checkpoints' results of other settings: they cannot be compared with new ones."""
    for checkpoint in list_checkpoints(drafter_dir):
        path = checkpoint / EVALUATION
        if not path.is_file():
            continue
        settings = json.loads(path.read_text(encoding="utf-8")).get("settings")
        if settings != config.model_dump(mode="json"):
            path.unlink()


def evaluate_checkpoint(
    bench: Bench, checkpoint: Path, drafter_dir: Path, *, untrained: "UntrainedDrafters"
) -> None:
    """Evaluates one checkpoint and leaves the result in it."""
    step = read_state(checkpoint)["step"]
    print(f"{drafter_dir.name}: decoding with {checkpoint.name}", flush=True)
    result = evaluate_drafter(bench, load_any_drafter(checkpoint), untrained=untrained)
    result |= {"drafter": drafter_dir.name, "step": step, "checkpoint": checkpoint.name}
    # Training may have removed the checkpoint meanwhile; then nothing depends on its result.
    with suppress(FileNotFoundError):
        if checkpoint.is_dir():
            _write_json(checkpoint / EVALUATION, result)


def _publish_best(drafter_dir: Path) -> dict[str, Any] | None:
    best = best_checkpoint(drafter_dir)
    # Training may have removed the only evaluated checkpoint meanwhile.
    if best is None or not (best / EVALUATION).is_file():
        return None
    result: dict[str, Any] = json.loads((best / EVALUATION).read_text(encoding="utf-8"))
    _write_json(drafter_dir / "eval.json", result)
    return result


def watch_run(
    bench: Bench, drafter_dirs: dict[str, Path], *, untrained: "UntrainedDrafters"
) -> dict[str, dict[str, Any]]:
    """Evaluates checkpoints as they appear, newest first, until every training is done."""
    results: dict[str, dict[str, Any]] = {}
    for drafter_dir in drafter_dirs.values():
        forget_other_evaluations(drafter_dir, bench.config)
    while True:
        has_news = False
        for name, drafter_dir in drafter_dirs.items():
            checkpoint = latest_checkpoint(drafter_dir)
            if checkpoint is None or (checkpoint / EVALUATION).is_file():
                continue
            has_news = True
            evaluate_checkpoint(bench, checkpoint, drafter_dir, untrained=untrained)
            published = _publish_best(drafter_dir)
            if published is not None:
                results[name] = published
                print_table({name: published})
        if not has_news:
            if all(is_training_done(drafter_dir) for drafter_dir in drafter_dirs.values()):
                published_last = {name: _publish_best(d) for name, d in drafter_dirs.items()}
                return {n: found for n, found in published_last.items() if found is not None}
            time.sleep(WATCH_PAUSE_S)


def is_training_done(drafter_dir: Path) -> bool:
    """Says whether the newest checkpoint is the last one of its training."""
    checkpoint = latest_checkpoint(drafter_dir)
    return checkpoint is not None and bool(read_state(checkpoint).get("is_done"))


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


def print_table(results: dict[str, dict[str, Any]]) -> None:
    """Prints one line for each drafter and suite."""
    table = Table(title="Real speculative decoding")
    for heading in ("drafter", "step", "suite", "prompts", "acceptance length", "untrained"):
        table.add_column(heading)
    for heading in ("lossless", "ties", "tokens/s target", "tokens/s drafted"):
        table.add_column(heading, justify="right")
    for name, result in results.items():
        for suite, found in result["suites"].items():
            low, high = found["acceptance_length_interval"]
            lossless = found["lossless_fraction"]
            table.add_row(
                name,
                str(result.get("step", "")),
                suite,
                str(found["num_prompts"]),
                f"{found['acceptance_length']:.3f} [{low:.3f}, {high:.3f}]",
                _untrained_cell(found.get("untrained")),
                "sampled" if lossless is None else f"{lossless:.1%}",
                str(found.get("num_ties", "")),
                f"{found['target_tokens_per_s']:.1f}",
                f"{found['drafted_tokens_per_s']:.1f}",
            )
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def _untrained_cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    low, high = found["acceptance_length_interval"]
    return f"{found['acceptance_length']:.3f} [{low:.3f}, {high:.3f}]"


def _exit_code(results: dict[str, dict[str, Any]], *, tie_margin: float) -> int:
    judged = [
        (f"{prefix}{name}, {suite}", found)
        for name, result in results.items()
        for suite, trained in result["suites"].items()
        for prefix, found in (("", trained), ("untrained ", trained.get("untrained") or {}))
        if found.get("num_differing")
    ]
    for name, found in judged:
        print(
            f"{name}: {found['num_differing']} of {found['num_prompts']} answers differ from the "
            f"target's own where its top-2 margin is above {tie_margin}",
            file=sys.stderr,
        )
    return EXIT_NOT_LOSSLESS if judged else EXIT_LOSSLESS


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


def _require_checkpoints(drafter_dirs: dict[str, Path]) -> None:
    for name, drafter_dir in drafter_dirs.items():
        if latest_checkpoint(drafter_dir) is None:
            torn = " whole" if list_checkpoints(drafter_dir) else ""
            raise ValueError(f"{drafter_dir} has no{torn} checkpoint; train drafter {name} first")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    replace_whole(path, (json.dumps(value, indent=1) + "\n").encode())
