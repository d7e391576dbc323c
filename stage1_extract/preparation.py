"""Preparation: a store's identity, its layer records and the plan of its units."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from stage1_extract.config import ExtractRun
from stage1_extract.conversations import Conversations, read_conversations
from stage1_extract.problems import UnusableConversationError
from stage1_extract.sequences import (
    MASK_RULE_VERSION,
    TokenSequence,
    chat_template_sha256,
    to_sequence,
)
from stage1_extract.target import resolve_target, target_name
from stage1_extract.target_identity import tokenizer_sha256, weights_sha256
from storage.encodings import encoded_bytes_per_token
from storage.errors import StoreError
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
    identity: StoreIdentity,
) -> TokenSequence:
    """One conversation as tokens, by the run's settings.

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
            vocab_size=identity.vocab_size,
            target_weights=identity.target_weights_sha256[:16],
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
    store: WritableStore, layers: Sequence[str], *, encoding: str, hidden_size: int
) -> None:
    """Records the captured layers; a store that has others already is refused.

    Raises:
        StoreError: The store's shards hold other layers, or another encoding of them.
    """
    stored = list(store.layers)
    if stored and sorted(stored) != sorted(layers):
        raise StoreError(
            f"store.target_layer_ids: the store at {store.files} holds layers {', '.join(stored)},"
            f" this run wants {', '.join(layers)}; restore the setting or use another store folder"
        )
    store.add_layers(
        LayerRecord(name=name, encoding=encoding, hidden_size=hidden_size) for name in layers
    )


def plan_new_conversations(
    store: WritableStore,
    run: ExtractRun,
    conversations: Conversations,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Plans the conversations that the store has not planned yet, in units of `shard_bytes`.

    Raises:
        ValueError: No conversation of a sample can be used, or the disk cannot hold the states.
    """
    # Unit by unit, because each question to the store looks at its files.
    planned = {each for unit in store.units() for each in store.sequences_of(unit)}
    new_ids = [each for each in conversations.ids if each not in planned]
    if not new_ids:
        return
    sample = new_ids[:: max(1, len(new_ids) // _SAMPLED_CONVERSATIONS)]
    sampled_tokens = count_tokens(run, conversations, sample, tokenizer, store.identity)
    token_bytes = sum(
        encoded_bytes_per_token(record.encoding, record.hidden_size)
        for record in store.layers.values()
    )
    needed_bytes = sampled_tokens * len(new_ids) // len(sample) * token_bytes
    if isinstance(run.store_dir, Path):
        check_disk(run.store_dir, needed_bytes=needed_bytes, force=run.extract.force)
    num_units = max(1, -(-needed_bytes // run.store.shard_bytes))
    store.plan_generation(new_ids, num_units=num_units)


def count_tokens(
    run: ExtractRun,
    conversations: Conversations,
    conversation_ids: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    identity: StoreIdentity,
) -> int:
    """Tokens of some conversations together; unusable ones count none.

    Raises:
        ValueError: None of them can be used.
    """
    num_tokens = 0
    first_problem: UnusableConversationError | None = None
    for conversation_id in conversation_ids:
        try:
            sequence = run_sequence(run, conversations, conversation_id, tokenizer, identity)
        except UnusableConversationError as problem:
            first_problem = first_problem or problem
        else:
            num_tokens += sequence.num_tokens
    if num_tokens == 0:
        raise ValueError(
            f"data.conversations: none of {len(conversation_ids)} conversations tried can be used;"
            f" the first: {first_problem}"
        )
    return num_tokens


def check_disk(store_dir: Path, *, needed_bytes: int, force: bool) -> None:
    """Refuses to start what the disk cannot hold.

    Raises:
        ValueError: Free space is below the estimate and `force` is off.
    """
    free_bytes = shutil.disk_usage(store_dir).free
    if needed_bytes > free_bytes and not force:
        raise ValueError(
            f"the store needs about {needed_bytes / 1e9:.1f} GB more and {store_dir} has"
            f" {free_bytes / 1e9:.1f} GB free; free space, capture fewer layers or conversations,"
            " use a smaller store.encoding, or set extract.force = true"
        )
