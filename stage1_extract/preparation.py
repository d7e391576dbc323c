"""Preparation: a store's identity, its layer records and the plan of its units."""

from collections.abc import Callable, Iterator, Mapping
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
from stage1_extract.plan import StoreShape
from stage1_extract.problems import UnusableConversationError
from stage1_extract.rendering import chat_template_sha256
from stage1_extract.sequences import MASK_RULE_VERSION, TokenSequence, to_sequence
from stage1_extract.target import resolve_target, target_name
from stage1_extract.target_identity import tokenizer_sha256, weights_sha256
from storage.encodings import encoding_named, encoding_of_layer
from storage.errors import StoreError
from storage.order import permutation
from storage.schema import LayerRecord, StoreIdentity
from storage.writer import WritableStore


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


def refuse_other_layers(store: WritableStore, shape: StoreShape) -> None:
    """Stops a run whose layers or encoding are not those that a store has already.

    Raises:
        StoreError: They are not; says which setting to restore.
    """
    stored = store.layers
    if not stored:
        return
    missing, others = set(shape.layers) - set(stored), set(stored) - set(shape.layers)
    # Until something is planned, another command may be in the midst of recording them.
    if others or (missing and store.units()):
        raise StoreError(
            f"store.target_layer_ids: the store at {store.files} holds layers {', '.join(stored)},"
            f" this run wants {', '.join(shape.layers)}; restore the setting or use another store"
            " folder"
        )
    for name, record in stored.items():
        if not is_kept_as(record.encoding, name, shape.encoding):
            raise StoreError(
                f"store.encoding: in the store at {store.files} layer {name} is stored as"
                f" {record.encoding}, this run wants {shape.encoding}; set store.encoding ="
                f' "{record.encoding}" to go on with it, or use another store folder'
            )


def is_kept_as(encoding: str, name: str, wanted: str) -> bool:
    """Whether a layer kept in some encoding suits a run that wants some.

    As `encoding_of_layer` says, or in the wanted one itself, as older stores keep the final state.
    """
    return encoding in (wanted, encoding_of_layer(name, wanted))


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
    refuse_other_layers(store, shape)
    is_missing = bool(set(shape.layers) - set(store.layers))
    needs_scales = encoding_named(shape.encoding).calibrated and is_missing
    scales = calibrated() if needs_scales else {}
    for name in shape.layers:
        record = LayerRecord(
            name=name,
            encoding=encoding_of_layer(name, shape.encoding),
            hidden_size=shape.hidden_size,
            channel_scales=scales.get(name),
            packing=shape.packing,
        )
        first = store.layers.get(name)
        if first is not None:
            record = replace(record, encoding=first.encoding, channel_scales=first.channel_scales)
        record_once(record, record_as=store.add_layers, recorded=lambda: store.layers)


def record_once(
    record: LayerRecord,
    *,
    record_as: Callable[[list[LayerRecord]], None],
    recorded: Callable[[], Mapping[str, LayerRecord]],
) -> None:
    """Records a layer; where another process was faster, its channel scales hold.

    Processes that calibrate at once, on devices of different kinds, differ in the last bits.

    Raises:
        StoreError: The layer is recorded with another encoding or packing.
    """
    try:
        record_as([record])
    except StoreError:
        first = recorded().get(record.name)
        if first is None or first != replace(record, channel_scales=first.channel_scales):
            raise


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
        head_bytes=head_bytes(
            config, dtype=run.target.dtype, num_last_layers=run.store.last_layers
        ),
        packing=run.store.packing,
    )


def head_bytes(config: PretrainedConfig, *, dtype: str, num_last_layers: int) -> int:
    """Bytes of the target's embedding, of its LM head where that is not the same matrix, and of the
    decoder layers that are kept, as far as they are dense.
    """
    published = getattr(torch, dtype) if config.dtype is None else config.dtype
    num_matrices = 1 if config.tie_word_embeddings else 2
    num_weights = num_matrices * config.vocab_size * config.hidden_size
    num_weights += min(num_last_layers, config.num_hidden_layers) * _layer_weights(config)
    return int(num_weights * published.itemsize)


def _layer_weights(config: PretrainedConfig) -> int:
    """Weights of one decoder layer's projections and dense MLP."""
    width = config.hidden_size
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or width // num_heads
    num_key_value_heads = getattr(config, "num_key_value_heads", None) or num_heads
    is_dense = not any(getattr(config, n, None) for n in ("num_experts", "num_local_experts"))
    mlp_width = getattr(config, "intermediate_size", None) or 0 if is_dense else 0
    return int(width * (2 * (num_heads + num_key_value_heads) * head_dim + 3 * mlp_width))
