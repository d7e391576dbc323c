"""Import other projects' hidden-state caches into a store.

What a cache does not say about itself is taken from the run file: its target gives the identity,
and a few sequences are computed again with it, so that shifted layers, another model or another
final norm are found before anything is stored.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dflash_offline.foreign_caches import ForeignCache, ForeignSequence, open_cache
from stage1_extract.config import ExtractRun
from stage1_extract.parity import relative_differences
from stage1_extract.preparation import record_layers, store_identity, store_shape
from stage1_extract.target import load_target
from stage1_extract.target_files import load_config, load_tokenizer
from stage1_extract.target_transformers import TransformersTarget
from stage1_extract.worker import save_head
from storage.encodings import EncodedStates, calibrate_channels, encode
from storage.errors import NonFiniteStatesError
from storage.order import permutation
from storage.schema import LM_HEAD_INPUT, LayerRecord
from storage.shard_writer import ShardWriter
from storage.versions import versions
from storage.writer import create_store

CHECKED_SEQUENCES = 3
CHECKED_TOKENS = 512
LARGEST_DIFFERENCE = 0.1
"""Of a token's norm, averaged over a sequence: what bf16 in another order of sums explains."""


@dataclass(kw_only=True)
class ImportReport:
    """What was imported, and what the source lacked."""

    num_sequences: int = 0
    num_tokens: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Sequences that hold no states in the store, by reason."""
    taken_from_run: list[str] = field(default_factory=list)
    """Facts that the source does not record and nothing could check."""
    differences: dict[str, float] = field(default_factory=dict)
    """Relative difference of each layer from the target's own states; empty if not checked."""


@dataclass(frozen=True, kw_only=True)
class ImportSettings:
    """What the command line says about a source."""

    source: Path
    layout: str | None = None
    """None tells it by its files."""
    layer_ids: tuple[int, ...] | None = None
    """0-based decoder layers of the source's states, in their order; None asks the source."""
    loss_masks: Path | None = None
    """JSON lines with `id` and `loss_mask`, for sources without."""
    supervise_all: bool = False
    """Learn every token where there is no loss mask."""
    final_is_normed: bool | None = None
    """Whether final states lie behind the final norm; None takes what the layout says."""
    is_checked: bool = True
    """Whether some sequences are computed again with the target."""


def import_cache(
    run: ExtractRun,
    settings: ImportSettings,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> ImportReport:
    """Fills the run's store from another project's cache.

    Resumable: committed units are passed over. A sequence with NaN states, or whose counts do not
    fit, is skipped with its reason.

    Args:
        run: gives the target, the store, its layers and encoding.
        settings: where and what the source is.
        progress: called with (units done, units in all) after each.

    Raises:
        ValueError: the source lacks what nobody gave, or its states are not the target's.
    """
    config = load_config(run.target)
    cache = open_cache(
        settings.source,
        layout=settings.layout,
        hidden_size=config.hidden_size,
        num_target_layers=config.num_hidden_layers,
    )
    target = load_target(run.target)
    importer = _Importer(run, settings, cache, target)
    report = ImportReport(taken_from_run=importer.unchecked_facts())
    if settings.is_checked:
        report.differences = importer.check()
    store = create_store(run.store_dir, store_identity(run, config, load_tokenizer(run.target)))
    store.note_origin(
        {
            "versions": versions(),
            "settings": run.model_dump(mode="json"),
            "imported_from": str(settings.source),
            "taken_from_run": report.taken_from_run,
        }
    )
    shape = store_shape(run, config)
    record_layers(store, shape, importer.calibrate)
    save_head(store, run, target, token_ids=importer.token_ids(cache.ids[0]))
    new = store.unplanned(cache.ids)
    if new:
        num_tokens = importer.estimate_tokens(new)
        num_units = max(1, -(-num_tokens * shape.state_bytes // shape.shard_bytes))
        store.plan_generation(new, num_units=num_units)
    records = store.layers
    known = set(cache.ids)
    # Units that `extract` planned and left open are not this source's to fill.
    units = [
        unit
        for unit in store.units()
        if not store.is_committed(unit) and known.issuperset(store.sequences_of(unit))
    ]
    for done, unit in enumerate(units, start=1):
        with store.start_shard(unit) as shard:
            for sequence_id in store.sequences_of(unit):
                importer.append(shard, sequence_id, records, report)
            shard.seal()
        if progress is not None:
            progress(done, len(units))
    return report


class _Importer:
    """Turns a source's sequences into what a store takes."""

    def __init__(
        self,
        run: ExtractRun,
        settings: ImportSettings,
        cache: ForeignCache,
        target: TransformersTarget,
    ):
        self.run, self.settings, self.cache, self.target = run, settings, cache, target
        self.layers = store_shape(run, load_config(run.target)).layers
        self.masks = {} if settings.loss_masks is None else read_masks(settings.loss_masks)
        self.layer_ids = self._source_layers()
        self.final_is_normed = (
            cache.final_is_normed if settings.final_is_normed is None else settings.final_is_normed
        )
        wanted = [int(name) for name in self.layers if name != LM_HEAD_INPUT]
        missing = sorted(set(wanted) - set(self.layer_ids))
        if missing:
            raise ValueError(
                f"store.target_layer_ids: the cache has layers {list(self.layer_ids)}, not "
                f"{', '.join(map(str, missing))}; choose among them"
            )
        if LM_HEAD_INPUT in self.layers and self.read(cache.ids[0]).final_states is None:
            raise ValueError("store.lm_head_input: the cache holds no final states; turn it off")

    def _source_layers(self) -> tuple[int, ...]:
        num_layers = self.cache.read(self.cache.ids[0]).states.shape[1]
        layer_ids = self.settings.layer_ids or self.cache.layer_ids
        if layer_ids is None:
            raise ValueError(
                f"a cache of {self.cache.name} does not say which layers it holds; name its "
                f"{num_layers} decoder layers, counted from 0, with --layers"
            )
        if len(layer_ids) != num_layers:
            raise ValueError(
                f"--layers: the cache holds {num_layers} layers, got {len(layer_ids)}: "
                f"{','.join(map(str, layer_ids))}"
            )
        return layer_ids

    def unchecked_facts(self) -> list[str]:
        """What the run file is believed in."""
        facts = ["target's weights and revision", "tokenizer and chat template", "mask rule"]
        if self.settings.layer_ids is not None:
            facts.append("layer ids")
        facts += [] if "hidden_dtype" in self.cache.facts else ["compute dtype"]
        if self.settings.supervise_all:
            facts.append("loss masks (every token is learnt)")
        facts.append("whether answers are the target's own greedy ones (taken as: no)")
        return facts

    def read(self, sequence_id: str) -> ForeignSequence:
        """One sequence of the source."""
        return self.cache.read(sequence_id)

    def token_ids(self, sequence_id: str) -> np.ndarray:
        """Token ids as the target takes them."""
        return self.read(sequence_id).token_ids.numpy().astype(np.int32)

    def states_of(self, sequence: ForeignSequence) -> dict[str, Float[Tensor, "tokens hidden"]]:
        """States by our layer names."""
        states = {}
        for name in self.layers:
            if name != LM_HEAD_INPUT:
                states[name] = sequence.states[:, self.layer_ids.index(int(name))]
        if LM_HEAD_INPUT in self.layers and sequence.final_states is not None:
            states[LM_HEAD_INPUT] = self._normed(sequence.final_states)
        return states

    @torch.inference_mode()
    def _normed(self, final: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        if self.final_is_normed:
            return final
        norm = self.target.decoder.norm
        normed: Tensor = norm(final.to(next(norm.parameters()).dtype))
        return normed

    def check(self) -> dict[str, float]:
        """Computes a few sequences again; largest difference by layer.

        Raises:
            ValueError: A layer's states are not the target's; says which layer they look like.
        """
        worst: dict[str, float] = {}
        for sequence_id in self._some(CHECKED_SEQUENCES):
            sequence = self.read(sequence_id)
            token_ids = sequence.token_ids[:CHECKED_TOKENS].numpy().astype(np.int32)
            found = self.states_of(sequence)
            expected = self.target.plain_hidden_states(token_ids, layers=list(self.layers))
            for name, states in found.items():
                rows = states[:CHECKED_TOKENS].float()
                difference = float(relative_differences(rows, expected[name].float()).mean())
                if not difference <= LARGEST_DIFFERENCE:
                    raise ValueError(self._unlike(sequence_id, name, rows, token_ids, difference))
                worst[name] = max(worst.get(name, 0.0), difference)
        return worst

    def _unlike(
        self, sequence_id: str, name: str, states: Tensor, token_ids: np.ndarray, difference: float
    ) -> str:
        """What is said of a layer that is not the target's: most often it is another layer."""
        num_layers = len(self.target.decoder.layers)
        every = [str(layer) for layer in range(num_layers)]
        computed = self.target.plain_hidden_states(token_ids, layers=[*every, LM_HEAD_INPUT])
        distances = {
            other: float(relative_differences(states, values.float()).mean())
            for other, values in computed.items()
        }
        nearest = min(distances, key=lambda other: distances[other])
        hint = "check target.model, its dtype and the template"
        if distances[nearest] <= LARGEST_DIFFERENCE:
            hint = f"they are those of layer {nearest}: correct --layers"
            if LM_HEAD_INPUT in (name, nearest):
                hint = f"they are those of {nearest}: correct --layers or --final-state"
        return (
            f"sequence {sequence_id!r}: the states given as layer {name} differ from the target's "
            f"by {difference:.0%} of their size; {hint} (--no-check imports them all the same)"
        )

    def calibrate(self) -> dict[str, tuple[float, ...]]:
        """Channel scales by layer, from the source's own states."""
        parts: dict[str, list[np.ndarray]] = {name: [] for name in self.layers}
        num_tokens = 0
        for sequence_id in self._some(len(self.cache.ids)):
            states = self.states_of(self.read(sequence_id))
            if all(torch.isfinite(values.float()).all() for values in states.values()):
                for name, values in states.items():
                    parts[name].append(values.float().numpy())
                num_tokens += len(states[self.layers[0]])
            if num_tokens >= self.run.store.calibration_tokens:
                break
        if num_tokens == 0:
            raise ValueError(
                f"{self.settings.source}: every sequence has NaN or infinity; nothing to import"
            )
        return {
            name: tuple(calibrate_channels(np.concatenate(each)).tolist())
            for name, each in parts.items()
        }

    def estimate_tokens(self, sequence_ids: Sequence[str]) -> int:
        """Tokens of some sequences together, from a sample of them."""
        sample = sequence_ids[:: max(1, len(sequence_ids) // 64)]
        counted = sum(len(self.read(each).token_ids) for each in sample)
        return counted * len(sequence_ids) // len(sample)

    def _some(self, count: int) -> Iterator[str]:
        for place in permutation(len(self.cache.ids), seed=0, epoch=0, stream=0)[:count]:
            yield self.cache.ids[place]

    def append(
        self,
        shard: ShardWriter,
        sequence_id: str,
        records: Mapping[str, LayerRecord],
        report: ImportReport,
    ) -> None:
        """Imports one sequence, or skips it with its reason."""
        try:
            sequence = self.read(sequence_id)
            mask = self._loss_mask(sequence_id, sequence)
            problem = self._problem(sequence, mask)
            states = {} if problem else self._encoded(sequence, records)
        except NonFiniteStatesError as error:
            problem, states = str(error), {}
        if problem:
            shard.skip(sequence_id=sequence_id, reason=problem)
            report.skipped[problem.split(" at ")[0]] += 1
            return
        shard.append(
            sequence_id=sequence_id,
            token_ids=sequence.token_ids.numpy().astype(np.int32),
            loss_mask=mask,
            greedy=False,
            states=states,
        )
        report.num_sequences += 1
        report.num_tokens += len(mask)

    def _loss_mask(self, sequence_id: str, sequence: ForeignSequence) -> np.ndarray:
        if sequence_id in self.masks:
            return self.masks[sequence_id]
        if sequence.loss_mask is not None:
            return sequence.loss_mask.numpy()
        if self.settings.supervise_all:
            return np.ones(len(sequence.token_ids), dtype=np.bool_)
        raise ValueError(
            f"sequence {sequence_id!r} of the cache has no loss mask: give them with --loss-masks "
            "FILE (lines with id and loss_mask), or learn every token with --supervise-all"
        )

    def _problem(self, sequence: ForeignSequence, mask: np.ndarray) -> str | None:
        num_tokens = len(sequence.token_ids)
        counts = {len(sequence.states), len(mask)}
        if sequence.final_states is not None:
            counts.add(len(sequence.final_states))
        if num_tokens == 0:
            return "no tokens"
        if counts != {num_tokens}:
            return "numbers of tokens, states and mask differ"
        if not 0 <= int(sequence.token_ids.min()) <= int(sequence.token_ids.max()) < self._vocab:
            return "token id outside the target's vocabulary"
        return None

    @property
    def _vocab(self) -> int:
        return int(self.target.config.vocab_size)

    def _encoded(
        self, sequence: ForeignSequence, records: Mapping[str, LayerRecord]
    ) -> dict[str, EncodedStates]:
        encoded = {}
        for name, values in self.states_of(sequence).items():
            scales = records[name].channel_scale_array
            encoded[name] = encode(
                records[name].encoding, values.float().numpy(), channel_scales=scales
            )
        return encoded


def read_masks(path: Path) -> dict[str, np.ndarray]:
    """Loss masks by sequence id, from JSON lines; ValueError names a line that is none."""
    masks = {}
    # Not by `str.splitlines`, which also splits at separators that an id may hold.
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            entry = json.loads(line)
            masks[str(entry["id"])] = np.array(entry["loss_mask"], dtype=np.bool_)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: expected id and loss_mask ({error})") from error
    return masks
