"""Planning: the store, made or brought up to date before workers start, if there is room for it.

Imports no model code, so that an extraction with nothing left to do ends at once.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from stage1_extract.calibration import calibrate
from stage1_extract.config import ExtractRun
from stage1_extract.conversations import Conversations
from stage1_extract.plan import TOKEN_BYTES, StoreShape, num_shards, store_size
from stage1_extract.plan_counts import TokenCount, count_tokens
from stage1_extract.plan_room import problem_with_room, room_of
from stage1_extract.preparation import (
    calibration_sequences,
    open_conversations,
    record_layers,
    refuse_other_layers,
    run_sequence,
    store_identity,
    store_shape,
)
from stage1_extract.sequences import TokenSequence
from stage1_extract.target_files import load_config, load_tokenizer
from storage.reader import open_store
from storage.versions import versions
from storage.writer import WritableStore, create_store

_SAMPLED_CONVERSATIONS = 256


def prepare_store(
    run: ExtractRun, *, is_worker: bool = False, fewest_units: int = 1
) -> WritableStore:
    """Makes the store with identity, layer records and plan, or brings an existing one up to date.

    Idempotent, and safe when several processes call it at once. Loads no weights, but to calibrate
    a new store's encoding.

    Args:
        run: The run's settings.
        is_worker: Whether others may be filling the store already: then room on the disk is asked
            for only where new conversations are planned.
        fewest_units: How many units new conversations are planned in at least, if there are so many
            of them: one a worker, for two that have one unit between them compute it twice.

    Raises:
        ValueError: The target, the data or a setting is unusable, or there is no room.
        StoreError: The store belongs to another identity, or cannot be written.
    """
    config = load_config(run.target)
    shape = store_shape(run, config)
    tokenizer = load_tokenizer(run.target)
    conversations = open_conversations(run)
    if conversations.problems.counts:
        summary = f"{conversations.problems.summary()}{conversations.problems.first()}"
        print(f"unusable lines: {summary}", file=sys.stderr, flush=True)
    store = create_store(run.store_dir, store_identity(run, config, tokenizer))
    store.note_origin({"versions": versions(), "settings": run.model_dump(mode="json")})
    refuse_other_layers(store, shape)
    new_ids = store.unplanned(conversations.ids)
    new_tokens = tokens_to_plan(
        store, run, conversations, tokenizer, shape, new_ids, counts_open_units=not is_worker
    )
    # Behind the question of room: layers cannot be changed any more, and the answer may ask for it.
    sample = calibration_sequences(run, conversations, tokenizer, vocab_size=config.vocab_size)
    record_layers(store, shape, lambda: calibrate(run, sample, layers=shape.layers))
    if new_ids:
        num_units = max(num_shards(new_tokens, shape), min(fewest_units, len(new_ids)))
        store.plan_generation(new_ids, num_units=num_units)
    return store


def tokens_to_plan(
    store: WritableStore,
    run: ExtractRun,
    conversations: Conversations,
    tokenizer: PreTrainedTokenizerBase,
    shape: StoreShape,
    new_ids: Sequence[str],
    *,
    counts_open_units: bool,
) -> int:
    """Tokens of the conversations that no unit holds yet, about, if there is room for them.

    Args:
        store: Open for writing.
        run: The run's settings.
        conversations: All conversations of the run.
        tokenizer: The target's.
        shape: What a token takes in the store.
        new_ids: The conversations that no unit holds yet.
        counts_open_units: Whether room is asked for even when nothing is new, for units planned
            earlier and not committed. Not while other workers fill them: what they have written
            would count as missing.

    Raises:
        ValueError: No conversation of a sample can be used, or there is no room for the states.
    """
    if not new_ids and not counts_open_units:
        return 0
    open_units = set(store.units()) - store.committed()
    open_ids = [each for unit in open_units for each in store.sequences_of(unit)]
    wanted_ids = [*new_ids, *sorted(each for each in open_ids if each in conversations)]
    if not wanted_ids:
        return 0

    def tokens_of(conversation_id: str) -> TokenSequence:
        return run_sequence(
            run, conversations, conversation_id, tokenizer, vocab_size=store.identity.vocab_size
        )

    def count(max_counted: int) -> TokenCount:
        return counted(wanted_ids, tokens_of, max_counted=max_counted)

    return check_room(run, store, shape, count).num_tokens * len(new_ids) // len(wanted_ids)


def counted(
    conversation_ids: Sequence[str],
    to_sequence: Callable[[str], TokenSequence],
    *,
    max_counted: int,
) -> TokenCount:
    """`count_tokens`, of conversations that can be used.

    Raises:
        ValueError: None of those looked at can be.
    """
    count = count_tokens(conversation_ids, to_sequence, max_counted=max_counted)
    if count.num_tokens == 0:
        raise ValueError(
            f"data.conversations: none of {count.num_counted} conversations tried can be used;"
            f" the first: {count.first_problem}"
        )
    return count


def check_room(
    run: ExtractRun,
    store: WritableStore,
    shape: StoreShape,
    count: Callable[[int], TokenCount],
) -> TokenCount:
    """Refuses to start what the disk or `extract.max_store_bytes` cannot hold; gives the count.

    Args:
        run: The run's settings.
        store: Open for writing.
        shape: What a token takes in the store.
        count: Counts the conversations to come, or a sample of at most so many. A small one is
            taken first; where its error leaves the answer open, `data.counted_conversations`.

    Raises:
        ValueError: There is no room, in one line with the numbers and the ways out.
    """
    stored_bytes = committed_bytes(run, store, shape)
    if stored_bytes > 0:
        shape = replace(shape, head_bytes=0)
    room = room_of(run, stored_bytes=stored_bytes)
    found = count(_SAMPLED_CONVERSATIONS)
    if room.is_close_to(store_size(found, shape)):
        found = count(run.data.counted_conversations)
    problem = problem_with_room(run, found, shape, room, is_planned=bool(store.units()))
    if problem is not None:
        raise ValueError(problem)
    return found


def committed_bytes(run: ExtractRun, store: WritableStore, shape: StoreShape) -> int:
    """Bytes of what the store holds already, its head included; 0 for an empty one."""
    if not store.committed():
        return 0
    num_tokens = int(open_store(run.store_dir).snapshot().num_tokens.sum())
    return num_tokens * (shape.state_bytes + TOKEN_BYTES) + shape.head_bytes
