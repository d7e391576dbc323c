"""What the `store` commands print: a store's contents, one sequence, the verdict of a check."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dflash_offline.progress import task_progress
from storage.copy import copy_store
from storage.derive import derive_store
from storage.encodings import ENCODINGS, encoded_bytes_per_token
from storage.joined import join_stores, members_of
from storage.losses import EncodingLoss, total_losses
from storage.places import files_at
from storage.reader import Snapshot, Store, open_store
from storage.repair import bury_damaged, collect_garbage
from storage.verify import verify_store

SHOWN_PROBLEMS = 50

SAMPLED_SHARDS = 64
"""Commit records that `store info` reads for what encoding lost."""


def print_store(store_dir: str) -> None:
    """Prints identity, layers and counts of a store."""
    store = open_store(store_dir)
    snapshot = store.snapshot()
    console = Console()
    print(f"store {store_dir}")
    identity = Table("field")
    identity.add_column("value", overflow="fold")
    for field, value in store.identity.to_json().items():
        identity.add_row(field, escape(value if isinstance(value, str) else json.dumps(value)))
    console.print(identity)
    console.print(_layer_table(store, snapshot))
    num_tokens = int(snapshot.num_tokens.sum())
    console.print(
        f"{snapshot.num_shards} shards, {snapshot.num_sequences:,} sequences "
        f"({int(snapshot.held_out.sum()):,} held out, {int(snapshot.greedy.sum()):,} answered "
        f"greedily by the target), {num_tokens:,} tokens, of which "
        f"{int(snapshot.num_supervised.sum()):,} can be anchors; snapshot {snapshot.id}"
    )
    for line in dict.fromkeys(map(_origin_words, store.origins())):
        console.print(line)


def _origin_words(origin: Mapping[str, Any]) -> str:
    """What filled the store, in a line; its settings stand in `origins/` of the store."""
    made_by = ", ".join(f"{name} {text}" for name, text in origin["versions"].items() if text)
    if "imported_from" not in origin:
        return f"filled with {made_by}"
    taken = ", ".join(origin["taken_from_run"])
    return f"imported from {origin['imported_from']} with {made_by}; taken from the run: {taken}"


def _layer_table(store: Store, snapshot: Snapshot) -> Table:
    """Layers with their encoding and what it lost, by the commit records of some shards."""
    shards = range(0, snapshot.num_shards, max(1, snapshot.num_shards // SAMPLED_SHARDS))
    losses = total_losses(map(snapshot.losses_of_shard, shards))
    measured = f"error and cut values from {len(shards)} of {snapshot.num_shards} shards"
    names = ("layer", "encoding", "bytes a token", "relative error", "values cut")
    table = Table(*names, title=f"layers; {measured}", title_justify="left")
    for name, layer in store.layers.items():
        token_bytes = encoded_bytes_per_token(layer.encoding, layer.hidden_size)
        loss = losses.get(name)
        found = ("not measured", "") if loss is None else _loss_text(loss)
        kept = layer.encoding if layer.packing is None else f"{layer.encoding}, {layer.packing}"
        if layer.packing is not None and shards:
            token_bytes = round(_stored_token_bytes(snapshot, shards, name))
        table.add_row(name, kept, f"{token_bytes:,}", *found)
    return table


def _stored_token_bytes(snapshot: Snapshot, shards: Sequence[int], layer: str) -> float:
    """Bytes of a token of one layer as they lie in some shards, whichever way these pack them."""
    commits = [snapshot.commit_of_shard(shard) for shard in shards]
    arrays = [commit.layers[layer] for commit in commits if layer in commit.layers]
    return sum(each.file_bytes for each in arrays) / max(1, sum(each.num_tokens for each in arrays))


def _loss_text(loss: EncodingLoss) -> tuple[str, str]:
    return f"{loss.relative_error:.2%}", f"{loss.num_saturated:,}"


def print_skipped(store_dir: str) -> None:
    """Prints a line for each sequence that was left out: its id, a tab, the reason."""
    for sequence_id, reason in sorted(open_store(store_dir).snapshot().skipped().items()):
        print(f"{sequence_id}\t{reason}")


def print_sequence(store_dir: str, *, sequence_id: str) -> None:
    """Prints a sequence as text, supervised tokens green, and its state norms by layer."""
    store = open_store(store_dir)
    snapshot = store.snapshot()
    index = snapshot.index_of(sequence_id)
    token_ids, loss_mask = snapshot.read_tokens(index)
    console = Console()
    console.print(_coloured(store, token_ids, loss_mask))
    split = "held out" if snapshot.held_out[index] else "training"
    console.print(
        f"[dim]{len(token_ids)} tokens, {int(loss_mask.sum())} supervised (green), {split} split[/]"
    )
    states = store.sequence(sequence_id).hidden_states(layers=list(store.layers))
    norms = np.linalg.norm(states, axis=-1)
    for column, name in enumerate(store.layers):
        row = norms[:, column]
        console.print(f"layer {name}: state norm median {np.median(row):.1f}, max {row.max():.1f}")


def print_states(
    store_dir: str,
    sequence_id: str,
    *,
    layers: Sequence[str] | None,
    tokens: str | None,
    num_values: int,
) -> None:
    """Prints a line a token: position, id, text, mask, then per layer size and first channels."""
    store = open_store(store_dir)
    snapshot = store.snapshot()
    index = snapshot.index_of(sequence_id)
    names = list(store.layers) if layers is None else list(layers)
    unknown = [name for name in names if name not in store.layers]
    if unknown:
        raise ValueError(
            f"{store_dir} has no layer {', '.join(unknown)}; it has {', '.join(store.layers)}"
        )
    positions = parse_range(tokens, num_tokens=int(snapshot.num_tokens[index]))
    token_ids, loss_mask = snapshot.read_tokens(index)
    states = store.sequence(sequence_id).hidden_states(
        layers=names, tokens=slice(positions.start, positions.stop)
    )
    text_of = _token_text(store)
    table = Table("position", "token", "text", "mask", *(f"layer {name}" for name in names))
    for position in positions:
        row = states[position - positions.start]
        table.add_row(
            str(position),
            str(token_ids[position]),
            Text(repr(text_of(int(token_ids[position])))[1:-1]),
            "learnt" if loss_mask[position] else "",
            *(_values_text(values, num_values) for values in row),
        )
    Console().print(table)


def parse_range(text: str | None, *, num_tokens: int) -> range:
    """The positions that `0:20`, `5:`, `-3:` or `7` means; None is all of them.

    Raises:
        ValueError: It is no range, or holds no position of the sequence.
    """
    if text is None:
        return range(num_tokens)
    first, colon, last = text.partition(":")
    try:
        start = int(first) if first or not colon else None
        stop = int(last) if last else None
    except ValueError as error:
        raise ValueError(f"--tokens {text}: expected a range such as 0:20") from error
    if not colon and start is not None:
        stop = start + 1 or None  # -1 is the last one, behind which none begins.
    positions = range(num_tokens)[slice(start, stop)]
    if not positions:
        raise ValueError(f"--tokens {text}: holds none of the sequence's {num_tokens} tokens")
    return positions


def _values_text(values: np.ndarray, num_values: int) -> str:
    shown = " ".join(f"{value:.3g}" for value in values[:num_values])
    return f"|{np.linalg.norm(values):.4g}| {shown}".rstrip()


def _token_text(store: Store) -> Callable[[int], str]:
    """Gives a token's text; its id where the store has no tokenizer to read (an imported one)."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(store.head_bytes("tokenizer/tokenizer.json"))
    except (ValueError, OSError):
        return str
    return lambda token_id: str(tokenizer.decode([token_id], skip_special_tokens=False))


def print_verification(
    store_dir: str, *, full: bool, log_path: Path | None = None, num_threads: int = 4
) -> int:
    """Checks a store and prints every problem; returns the exit code, 1 for a damaged store."""
    _refuse_joined(store_dir)
    with task_progress("checking") as progress:
        report = verify_store(
            store_dir, full=full, progress=progress, num_threads=num_threads, log_path=log_path
        )
    console = Console()
    for problem in report.problems[:SHOWN_PROBLEMS]:
        console.print(Text.assemble(("damaged", "red"), f" {problem}"), soft_wrap=True)
    if len(report.problems) > SHOWN_PROBLEMS:
        print(f"... and {len(report.problems) - SHOWN_PROBLEMS} more")
    depth = "every chunk" if full else "commit records and file sizes (--full reads every chunk)"
    verdict = f"{len(report.problems)} problems" if report.problems else "whole"
    print(f"{store_dir}: {report.num_shards} shards, {verdict}; checked {depth}")
    return 1 if report.problems else 0


def repair_store(store_dir: str) -> None:
    """Checks every chunk, gives damaged shards up and says what to run next."""
    _refuse_joined(store_dir)
    with task_progress("checking every chunk") as progress:
        report = verify_store(store_dir, full=True, progress=progress)
    buried = bury_damaged(store_dir, report.problems)
    for unit in buried:
        print(f"given up: shard {unit}")
    if buried:
        print("run `extract` again: it fills exactly these anew")
    elif report.problems:
        raise ValueError(
            f"{store_dir}: {len(report.problems)} problems lie outside the shards and cannot be "
            f"repaired so; the first: {report.problems[0]}"
        )
    else:
        print(f"{store_dir}: whole, nothing to repair")


def remove_garbage(store_dir: str) -> None:
    """Removes what no reader looks at and names it."""
    _refuse_joined(store_dir)
    removed = collect_garbage(store_dir)
    for name in removed:
        print(f"removed {name}")
    print(f"{store_dir}: {len(removed)} leftovers removed")


def print_copy(source_dir: str, target_dir: str) -> None:
    """Copies a store, shows how far it is, and says what was new."""
    with task_progress("copying") as progress:
        report = copy_store(source_dir, target_dir, progress=progress)
    print(
        f"{target_dir}: {report.num_shards} shards, {report.num_copied} of them new "
        f"({report.num_bytes / 1e9:.3g} GB copied and read back)"
    )


def _refuse_joined(store_dir: str) -> None:
    """Raises for joined stores, whose members are to be named."""
    if members := members_of(files_at(store_dir)):
        raise ValueError(f"{store_dir} only joins others; give one of them: {', '.join(members)}")


def join_into(joined_dir: str, members: Sequence[str]) -> None:
    """Joins stores and says what there is to read now."""
    snapshot = join_stores(joined_dir, members).snapshot()
    print(
        f"{joined_dir}: {len(members)} stores, {snapshot.num_shards} shards, "
        f"{snapshot.num_sequences:,} sequences; give this place as store.dir to train on all"
    )


def encode_store(
    source_dir: str,
    target_dir: str,
    *,
    encoding: str | None,
    like: str | None = None,
    packing: str | None = None,
) -> None:
    """Derives a store in another encoding and says how large both are."""
    if (encoding is None) == (like is None):
        raise ValueError("give either --encoding or --like")
    if like is not None and packing is not None:
        raise ValueError("--packing goes with --encoding; with --like the store named decides")
    if encoding is not None and encoding not in ENCODINGS:
        raise ValueError(f"--encoding {encoding}: expected one of {', '.join(ENCODINGS)}")
    with task_progress(f"encoding to {encoding or like}") as progress:
        derive_store(
            source_dir, target_dir, encoding=encoding, like=like, packing=packing, progress=progress
        )
    for place in (source_dir, target_dir):
        layers = open_store(place).layers.values()
        token_bytes = sum(
            encoded_bytes_per_token(layer.encoding, layer.hidden_size) for layer in layers
        )
        print(f"{place}: {token_bytes:,} bytes of states a token")


def _coloured(store: Store, token_ids: np.ndarray, loss_mask: np.ndarray) -> Text:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(store.head_bytes("tokenizer/tokenizer.json"))
    text = Text()
    edges = np.flatnonzero(np.diff(loss_mask.astype(np.int8))) + 1
    for run in np.split(np.arange(len(token_ids)), edges):
        piece = tokenizer.decode(token_ids[run].tolist(), skip_special_tokens=False)
        text.append(piece, style="green" if loss_mask[run[0]] else "dim")
    return text
