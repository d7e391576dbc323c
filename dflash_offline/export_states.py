"""Export a store as safetensors files, one a sequence, for programs that do not know our format."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from storage.files import LocalFiles, replace_whole
from storage.places import files_at, refuse_same_place
from storage.reader import open_store
from storage.schema import LM_HEAD_INPUT


def export_store(
    store_dir: str,
    out_dir: Path,
    *,
    layers: Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Writes each sequence of a store as a safetensors file; returns how many were written.

    A file holds `token_ids` int32 [tokens], `loss_mask` uint8 [tokens], `hidden_states` bf16
    [tokens, layers, hidden] and, where the store has it, `lm_head_input` bf16 [tokens, hidden]; its
    metadata name id, layers, target and split. Files appear whole; those that are there are passed
    over, so an interrupted export goes on.

    Raises:
        ValueError: A file there holds something else, such as other layers, or the folder is the
            store's own.
    """
    refuse_same_place(files_at(store_dir), LocalFiles(out_dir))
    store = open_store(store_dir)
    snapshot = store.snapshot()
    names = list(store.layers) if layers is None else list(layers)
    decoder_layers = [name for name in names if name != LM_HEAD_INPUT]
    num_written = 0
    for index in range(snapshot.num_sequences):
        sequence_id = snapshot.sequence_id(index)
        path = out_dir / f"{file_stem(sequence_id)}.safetensors"
        metadata = {
            "id": sequence_id,
            "layers": ",".join(decoder_layers),
            "target": store.identity.target_name,
            "split": "held_out" if snapshot.held_out[index] else "training",
        }
        if not _is_exported(path, metadata, has_final=LM_HEAD_INPUT in names):
            token_ids, loss_mask = snapshot.read_tokens(index)
            tensors = {
                "token_ids": torch.from_numpy(token_ids.copy()),
                "loss_mask": torch.from_numpy(loss_mask.astype(np.uint8)),
            }
            values = store.sequence(sequence_id).hidden_states(layers=names)
            states = torch.from_numpy(values).to(torch.bfloat16)
            columns = [names.index(name) for name in decoder_layers]
            tensors["hidden_states"] = states[:, columns].contiguous()
            if LM_HEAD_INPUT in names:
                tensors[LM_HEAD_INPUT] = states[:, names.index(LM_HEAD_INPUT)].contiguous()
            replace_whole(path, save(tensors, metadata))
            num_written += 1
        if progress is not None:
            progress(index + 1, snapshot.num_sequences)
    return num_written


def _is_exported(path: Path, metadata: Mapping[str, str], *, has_final: bool) -> bool:
    """Whether a sequence's file is there already.

    Raises:
        ValueError: The file there is not what is to be written.
    """
    if not path.exists():
        return False
    try:
        with safe_open(path, framework="numpy") as file:
            is_same = (
                file.metadata() == metadata and (LM_HEAD_INPUT in set(file.keys())) == has_final
            )
    except SafetensorError:
        is_same = False
    if not is_same:
        raise ValueError(
            f"{path} is another file than this export would write (other layers or another store,"
            " perhaps); choose an empty folder"
        )
    return True


def file_stem(sequence_id: str) -> str:
    """The id as a file's name: quoted as in URLs, a long one by its SHA-256."""
    quoted = quote(sequence_id, safe=" ")
    return quoted if len(quoted) <= 200 else hashlib.sha256(sequence_id.encode()).hexdigest()
