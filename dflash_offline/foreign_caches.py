"""Hidden-state caches of other projects, read sequence by sequence; each layout in one class.

Layouts as published with SpecForge 0.2, speculators 0.9, Model-Optimizer's
`collect_hidden_states` and DeepSpec's target cache, version 2. Files of torch are loaded with
`weights_only=True`: they hold data, and nothing in them is executed.
"""

import gzip
import io
import json
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ForeignSequence:
    """One sequence as another project kept it; nobody has checked yet that its lengths agree."""

    token_ids: Int64[Tensor, " tokens"]
    states: Float[Tensor, "state_tokens layers hidden"]
    """Of the captured layers, in the order of the source."""
    loss_mask: Bool[Tensor, " mask_tokens"] | None = None
    """None where the source keeps none."""
    final_states: Float[Tensor, "final_tokens hidden"] | None = None
    """Output of the last layer; None where the source keeps none."""


@runtime_checkable
class ForeignCache(Protocol):
    """A cache of another project."""

    name: str
    """The project's name."""
    ids: list[str]
    """Ids of its sequences, sorted."""
    layer_ids: tuple[int, ...] | None
    """0-based decoder layers of `states`, if the source says them."""
    final_is_normed: bool
    """Whether `final_states` lie behind the target's final norm."""
    facts: Mapping[str, Any]
    """What the source says about itself."""

    def read(self, sequence_id: str) -> ForeignSequence:
        """Reads one sequence; ValueError if its file is damaged or not of this layout."""


class _Files:
    """Sequences that lie in a file each, found by their suffix."""

    def __init__(self, folder: Path, suffixes: tuple[str, ...]):
        self._paths = {
            path.relative_to(folder).as_posix().removesuffix(suffix): path
            for suffix in suffixes
            for path in folder.rglob(f"*{suffix}")
        }
        self.ids = sorted(self._paths)
        self.layer_ids: tuple[int, ...] | None = None
        self.facts: Mapping[str, Any] = {}

    def _tensors(self, sequence_id: str) -> dict[str, Any]:
        return load_tensors(self._paths[sequence_id])


class SpecForgeCache(_Files):
    """`.ckpt` and `.ckpt.gz`: torch files, for DFlash or for EAGLE-3."""

    name = "specforge"
    final_is_normed = True

    def __init__(self, folder: Path, hidden_size: int):
        super().__init__(folder, (".ckpt", ".ckpt.gz"))
        self._hidden_size = hidden_size

    def read(self, sequence_id: str) -> ForeignSequence:
        """Reads one sequence."""
        raw, path = self._tensors(sequence_id), self._paths[sequence_id]
        is_eagle = "aux_hidden_state" in raw
        states = _required(raw, "aux_hidden_state" if is_eagle else "hidden_states", path)
        final = raw.get("hidden_state" if is_eagle else "target_last_hidden_states")
        return ForeignSequence(
            token_ids=_flat(_required(raw, "input_ids", path)).long(),
            loss_mask=_flat(_required(raw, "loss_mask", path)) > 0,
            states=_layered(states, self._hidden_size, path),
            final_states=None if final is None else _rows(final),
        )


class SpeculatorsCache(_Files):
    """`hs_<i>.safetensors`; loss masks stand in the prepared data set beside them (Arrow).

    The last layer of each file is the final state before the norm.
    """

    name = "speculators"
    final_is_normed = False

    def __init__(self, folder: Path):
        super().__init__(folder, (".safetensors",))
        self._folder = folder

    def read(self, sequence_id: str) -> ForeignSequence:
        """Reads one sequence."""
        path = self._paths[sequence_id]
        raw = load_tensors(path)
        states = _required(raw, "hidden_states", path)
        if states.dim() != 3 or states.shape[1] < 2:
            raise ValueError(
                f"{path}: expected hidden_states [tokens, layers, hidden] of two layers at least, "
                f"got {list(states.shape)}"
            )
        token_ids = _flat(_required(raw, "token_ids", path)).long()
        return ForeignSequence(
            token_ids=token_ids,
            loss_mask=self._loss_mask(sequence_id, token_ids),
            states=states[:, :-1],
            final_states=states[:, -1],
        )

    def _loss_mask(self, sequence_id: str, token_ids: Tensor) -> Tensor | None:
        row = self._rows.get(Path(sequence_id).name.removeprefix("hs_"))
        if row is None:
            return None
        expected, loss_mask = row
        if expected != token_ids.tolist():
            raise ValueError(f"{self._paths[sequence_id]}: token ids differ from the data set's")
        return torch.tensor(loss_mask) > 0

    @cached_property
    def _rows(self) -> dict[str, tuple[list[int], list[int]]]:
        """(token ids, loss mask) by number, of the data set in this folder or the one above."""
        for folder in (self._folder, self._folder.parent):
            if paths := sorted(folder.glob("*.arrow")):
                columns = [_arrow_columns(path, ("input_ids", "loss_mask")) for path in paths]
                pairs = [pair for part in columns for pair in zip(*part, strict=True)]
                return {str(number): pair for number, pair in enumerate(pairs)}
        return {}


class ModelOptimizerCache(_Files):
    """`<conversation id>.pt`: torch files with auxiliary layers side by side; no loss mask."""

    name = "model-optimizer"
    final_is_normed = True

    def __init__(self, folder: Path, hidden_size: int, num_target_layers: int):
        super().__init__(folder, (".pt",))
        self._hidden_size = hidden_size
        # Its indices count the embedding as 0, so they are one above ours.
        entries = {2, max(0, num_target_layers // 2), max(1, num_target_layers - 3)}
        self.layer_ids = tuple(entry - 1 for entry in sorted(entries))

    def read(self, sequence_id: str) -> ForeignSequence:
        """Reads one sequence."""
        raw, path = self._tensors(sequence_id), self._paths[sequence_id]
        loss_mask = raw.get("loss_mask")
        return ForeignSequence(
            token_ids=_flat(_required(raw, "input_ids", path)).long(),
            loss_mask=None if loss_mask is None else _flat(loss_mask) > 0,
            states=_layered(_required(raw, "aux_hidden_states", path), self._hidden_size, path),
            final_states=_rows(_required(raw, "hidden_states", path)),
        )


_DEEPSPEC_ENTRY = struct.Struct("<QIIQQQQQ")
"""Sample id, shard, tokens, then the offsets of ids, attention mask, loss mask, states, final."""
_DEEPSPEC_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


class DeepSpecCache:
    """`manifest.json`, `samples.idx` and raw shards."""

    name = "deepspec"
    final_is_normed = True

    def __init__(self, folder: Path):
        self._folder = folder
        self.facts: Mapping[str, Any] = json.loads((folder / "manifest.json").read_text())
        if self.facts.get("version") != 2:
            raise ValueError(
                f"{folder}: manifest version {self.facts.get('version')}; this program reads 2"
            )
        index = (folder / "samples.idx").read_bytes()
        if len(index) != self.facts["num_samples"] * _DEEPSPEC_ENTRY.size:
            raise ValueError(f"{folder}/samples.idx does not hold num_samples entries")
        self._entries = {str(entry[0]): entry for entry in _DEEPSPEC_ENTRY.iter_unpack(index)}
        self.ids = sorted(self._entries)
        self.layer_ids: tuple[int, ...] | None = tuple(self.facts["target_layer_ids"])

    def read(self, sequence_id: str) -> ForeignSequence:
        """Reads one sequence."""
        _, shard, num_tokens, *offsets = self._entries[sequence_id]
        path = self._folder / self.facts["shards"][shard]["file_name"]
        hidden_size, num_layers = self.facts["hidden_size"], len(self.layer_ids or ())
        dtype = _DEEPSPEC_DTYPES[self.facts["hidden_dtype"]]
        with path.open("rb") as file:

            def take(offset: int, kind: torch.dtype, *shape: int) -> Tensor:
                num_bytes = int(np.prod(shape)) * kind.itemsize
                file.seek(offset)
                data = bytearray(file.read(num_bytes))
                if len(data) < num_bytes:
                    raise ValueError(f"{path} ends before sample {sequence_id} does")
                return torch.frombuffer(data, dtype=torch.uint8).view(kind).reshape(shape)

            return ForeignSequence(
                token_ids=take(offsets[0], torch.int32, num_tokens).long(),
                loss_mask=take(offsets[2], torch.uint8, num_tokens) > 0,
                states=take(offsets[3], dtype, num_tokens, num_layers, hidden_size),
                final_states=take(offsets[4], dtype, num_tokens, hidden_size),
            )


def open_cache(
    folder: Path, *, layout: str | None, hidden_size: int, num_target_layers: int
) -> ForeignCache:
    """Opens a cache of another project.

    Args:
        folder: where it lies.
        layout: a name in LAYOUTS, or None to tell it by its files.
        hidden_size: of the target.
        num_target_layers: decoder layers of the target.

    Raises:
        ValueError: there is no such cache, or it holds no sequences.
    """
    makers: dict[str, Callable[[], ForeignCache]] = {
        "specforge": lambda: SpecForgeCache(folder, hidden_size),
        "speculators": lambda: SpeculatorsCache(folder),
        "model-optimizer": lambda: ModelOptimizerCache(folder, hidden_size, num_target_layers),
        "deepspec": lambda: DeepSpecCache(folder),
    }
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give that of the cache")
    cache = makers[layout or tell_layout(folder)]()
    if not cache.ids:
        raise ValueError(f"{folder} holds no sequences of {cache.name}")
    return cache


LAYOUTS = ("specforge", "speculators", "model-optimizer", "deepspec")


def tell_layout(folder: Path) -> str:
    """The layout of a cache, by its files; ValueError where none fits."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; check the path of the cache")
    if (folder / "samples.idx").is_file():
        return "deepspec"
    for name, pattern in {
        "specforge": "*.ckpt*",
        "speculators": "hs_*.safetensors",
        "model-optimizer": "*.pt",
    }.items():
        if next(folder.rglob(pattern), None) is not None:
            return name
    raise ValueError(f"{folder} holds no cache that is known; name its layout with --from")


def load_tensors(path: Path) -> dict[str, Any]:
    """The tensors of a torch file (`.gz` too) or safetensors file; nothing in it is executed.

    Raises:
        ValueError: it is damaged, or holds more than data.
    """
    try:
        if path.name.endswith(".safetensors"):
            return dict(load_file(path))
        if path.name.endswith(".gz"):
            with gzip.open(path) as file:
                source: Any = io.BytesIO(file.read())
        else:
            source = path
        found = torch.load(source, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:150]
        raise ValueError(f"{path} cannot be read ({reason}); remove it, or make it anew") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a dictionary of tensors, got {type(found).__name__}")
    return found


def _required(raw: Mapping[str, Any], key: str, path: Path) -> Tensor:
    if not isinstance(raw.get(key), Tensor):
        raise ValueError(f"{path} has no tensor {key!r}; it has {', '.join(sorted(raw))}")
    tensor: Tensor = raw[key]
    return tensor


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)


def _rows(tensor: Tensor) -> Tensor:
    """[tokens, width], a batch of one dropped."""
    return tensor.reshape(-1, tensor.shape[-1])


def _layered(tensor: Tensor, hidden_size: int, path: Path) -> Tensor:
    rows = _rows(tensor)
    if rows.shape[1] % hidden_size:
        raise ValueError(
            f"{path}: states of width {rows.shape[1]} are no layers of the target's "
            f"{hidden_size}; check target.model"
        )
    layered: Tensor = rows.unflatten(1, (-1, hidden_size))
    return layered


def _arrow_columns(path: Path, names: tuple[str, ...]) -> Iterator[list[Any]]:
    try:
        import pyarrow
    except ImportError as error:
        raise ValueError(
            f"{path} needs the package pyarrow: pip install pyarrow, or give --loss-masks"
        ) from error
    with pyarrow.memory_map(str(path)) as source:
        try:
            table = pyarrow.ipc.open_stream(source).read_all()
        except pyarrow.ArrowInvalid:
            table = pyarrow.ipc.open_file(source).read_all()
        return iter([table.column(name).to_pylist() for name in names])
