"""Preparation: a store's identity, its layer records and the plan of its units."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from jaxtyping import Int32
from numpy import ndarray
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from stage1_extract.calibration import ChannelScalesByLayer
from stage1_extract.config import ExtractRun
from stage1_extract.conversations import Conversations, read_conversations
from stage1_extract.layers import captured_layers
from stage1_extract.plan import TOKEN_BYTES, StoreShape, num_shards, store_size
from stage1_extract.plan_counts import TokenCount, count_tokens
from stage1_extract.plan_room import problem_with_room, room_of
from stage1_extract.problems import UnusableConversationError
from stage1_extract.sequences import (
    MASK_RULE_VERSION,
    TokenSequence,
    chat_template_sha256,
    to_sequence,
)
from stage1_extract.target import resolve_target, target_name
from stage1_extract.target_identity import tokenizer_sha256, weights_sha256
from storage.encodings import encoding_named
from storage.errors import StoreError
from storage.order import permutation
from storage.reader import open_store
from storage.schema import LayerRecord, StoreIdentity
from storage.writer import WritableStore

_SAMPLED_CONVERSATIONS = 256


def open_conversations(run: ExtractRun) -> Conversations:
    """The conversations of a run, as its `[data]` table says."""
    return read_conversations(
        run.data.conversations,
        limit=run.data.limit,
        strict=run.data.strict,
        bad_line_limit=run.data.bad_line_limit,
    )


def run_sequence(
    run: ExtractRun,
    conversations: Conversations,
    conversation_id: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocab_size: int,
    target_weights: str | None = None,
) -> TokenSequence:
    """One conversation as tokens, by the run's settings.

    Args:
        run: The run's settings.
        conversations: All conversations of the run.
        conversation_id: Which one.
        tokenizer: The target's.
        vocab_size: Token ids must lie below.
        target_weights: Short id of the target's weights, by which its own answers are known.

    Raises:
        UnusableConversationError: It cannot be used.
        ValueError: It was planned, but the run's data no longer holds it; or it cannot be used
            and `data.strict` is on.
    """
    if conversation_id not in conversations:
        raise ValueError(
            f"data.conversations: conversation {conversation_id!r} is planned in the store but not"
            " in the data any more; restore the files and data.limit, or use another store folder"
        )
    try:
        return to_sequence(
            conversations[conversation_id],
            tokenizer,
            template_arguments=run.data.template_arguments,
            max_sequence_tokens=run.data.max_sequence_tokens,
            long_conversations=run.data.long_conversations,
            vocab_size=vocab_size,
            target_weights=target_weights,
        )
    except UnusableConversationError as problem:
        if run.data.strict and not problem.is_wanted:
            raise ValueError(f"{problem} (data.strict stops at the first one)") from problem
        raise


def store_identity(
    run: ExtractRun, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> StoreIdentity:
    """What two runs must have in common to fill one store."""
    folder = resolve_target(run.target)
    return StoreIdentity(
        target_name=target_name(run.target),
        target_revision=run.target.revision,
        target_weights_sha256=weights_sha256(folder),
        tokenizer_sha256=tokenizer_sha256(folder),
        chat_template_sha256=chat_template_sha256(tokenizer),
        template_arguments=run.data.template_arguments,
        mask_rule_version=MASK_RULE_VERSION,
        max_sequence_tokens=run.data.max_sequence_tokens,
        long_conversations=run.data.long_conversations,
        compute_dtype=run.target.dtype,
        attention_backend=run.target.attention or "default",
        hidden_size=config.hidden_size,
        num_target_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        held_out_fraction=run.store.held_out_fraction,
    )


def record_layers(
    store: WritableStore, shape: StoreShape, calibrated: Callable[[], ChannelScalesByLayer]
) -> None:
    """Records the captured layers; a store that has others already is refused.

    Args:
        store: Open for writing.
        shape: Which layers, and their encoding.
        calibrated: Gives channel scales by layer; asked only where the encoding needs them and
            the store has none yet.

    Raises:
        StoreError: The store's shards hold other layers, or another encoding of them.
    """
    stored = store.layers
    if stored and sorted(stored) != sorted(shape.layers):
        raise StoreError(
            f"store.target_layer_ids: the store at {store.files} holds layers {', '.join(stored)},"
            f" this run wants {', '.join(shape.layers)}; restore the setting or use another store"
            " folder"
        )
    needs_scales = encoding_named(shape.encoding).calibrated and not stored
    scales = calibrated() if needs_scales else {}
    for name in shape.layers:
        record = LayerRecord(
            name=name,
            encoding=shape.encoding,
            hidden_size=shape.hidden_size,
            channel_scales=scales.get(name),
        )
        # Another process may have calibrated meanwhile: the first record holds.
        recorded = store.layers.get(name, record)
        store.add_layers([replace(record, channel_scales=recorded.channel_scales)])


def calibration_sequences(
    run: ExtractRun,
    conversations: Conversations,
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocab_size: int,
) -> Iterator[Int32[ndarray, "_"]]:
    """Token ids of usable conversations, in a random order that is always the same."""
    for place in permutation(len(conversations), seed=0, epoch=0, stream=0):
        with suppress(UnusableConversationError):
            yield run_sequence(
                run,
                conversations,
                conversations.ids[place],
                tokenizer,
                vocab_size=vocab_size,
            ).token_ids


def store_shape(run: ExtractRun, config: PretrainedConfig) -> StoreShape:
    """What the run file and the target's configuration say about the store's size."""
    layers = captured_layers(
        run.store.target_layer_ids,
        num_layers=run.store.num_layers,
        lm_head_input=run.store.lm_head_input,
        num_target_layers=config.num_hidden_layers,
    )
    return StoreShape(
        layers=tuple(layers),
        encoding=run.store.encoding,
        hidden_size=config.hidden_size,
        shard_bytes=run.store.shard_bytes,
        head_bytes=head_bytes(config, dtype=run.target.dtype),
    )


def head_bytes(config: PretrainedConfig, *, dtype: str) -> int:
    """Bytes of the target's embedding, and of its LM head where that is not the same matrix."""
    published = getattr(torch, dtype) if config.dtype is None else config.dtype
    num_matrices = 1 if config.tie_word_embeddings else 2
    return int(num_matrices * config.vocab_size * config.hidden_size * published.itemsize)


def plan_units(
    store: WritableStore,
    run: ExtractRun,
    conversations: Conversations,
    tokenizer: PreTrainedTokenizerBase,
    shape: StoreShape,
    *,
    counts_open_units: bool,
) -> None:
    """Plans the conversations that no unit holds yet, in units of `shard_bytes`, if they fit.

    Args:
        store: Open for writing.
        run: The run's settings.
        conversations: All conversations of the run.
        tokenizer: The target's.
        shape: What a token takes in the store.
        counts_open_units: Whether room is asked for even when nothing is new, for units planned
            earlier and not committed. Not while other workers fill them: what they have written
            would count as missing.

    Raises:
        ValueError: No conversation of a sample can be used, or there is no room for the states.
    """
    new_ids = store.unplanned(conversations.ids)
    if not new_ids and not counts_open_units:
        return
    open_units = set(store.units()) - store.committed()
    open_ids = [each for unit in open_units for each in store.sequences_of(unit)]
    wanted_ids = [*new_ids, *sorted(each for each in open_ids if each in conversations)]
    if not wanted_ids:
        return

    def tokens_of(conversation_id: str) -> TokenSequence:
        return run_sequence(
            run, conversations, conversation_id, tokenizer, vocab_size=store.identity.vocab_size
        )

    def count(max_counted: int) -> TokenCount:
        return counted(wanted_ids, tokens_of, max_counted=max_counted)

    found = check_room(run, store, shape, count)
    if new_ids:
        new_tokens = found.num_tokens * len(new_ids) // len(wanted_ids)
        store.plan_generation(new_ids, num_units=num_shards(new_tokens, shape))


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
    problem = problem_with_room(run, found, shape, room)
    if problem is not None:
        raise ValueError(problem)
    return found


def committed_bytes(run: ExtractRun, store: WritableStore, shape: StoreShape) -> int:
    """Bytes of what the store holds already, its head included; 0 for an empty one."""
    if not store.committed():
        return 0
    num_tokens = int(open_store(run.store_dir).snapshot().num_tokens.sum())
    return num_tokens * (shape.state_bytes + TOKEN_BYTES) + shape.head_bytes
