"""Plan: what a store will take before anything runs, and the ways to make it smaller. Pure.

Every number follows from token counts and the target's configuration; nothing here loads weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stage1_extract.plan_counts import TokenCount
from storage.encodings import (
    encoded_bytes_per_token,
    encoding_named,
    encoding_of_layer,
    encodings_for,
)
from storage.schema import CHUNK_TOKENS

TOKEN_BYTES = 5
"""Bytes of one token's id and loss mask."""

_RECORD_BYTES = 2_000
"""Commit record of a shard without its sequences."""
_SEQUENCE_BYTES = 70
"""Id, counts and checksum of one sequence in the commit record and in the plan."""
_CHECKSUM_BYTES = 6
"""One CRC-32C in base64, of each 256 tokens of each array."""
_INDEX_BYTES = 16
"""Entry of a chunk in an array's index."""
_METADATA_BYTES = 900
"""`zarr.json` of an array."""

_INODES_OF_A_SHARD = 4
"""Its folder, the tokens, the folder of layers, the commit record."""
_INODES_OF_AN_ARRAY = 5
"""Its folder, `zarr.json`, `c`, `c/0` and the data."""
_INODES_OF_A_STORE = 40
_FILES_OF_A_SHARD, _FILES_OF_AN_ARRAY, _FILES_OF_A_STORE = 2, 2, 30
"""The same without folders."""
"""Identity, layer records, plan, head and catalog, with their folders."""
_FAN_OUT = 256
"""Folders over which shards and commit records are spread, each."""

_CPU_BATCHES = 2
"""Batches of states and of their encoded form that a worker without a GPU holds."""
_MOST_BUFFERS = 8
"""Buffers of a batch each that a GPU worker pins, as `transfer` has it."""
_LIVE_HIDDEN = 8
"""Tensors of the hidden size that are alive inside one decoder layer."""
_LIVE_MLP = 3
"""Tensors of the MLP's size that are alive there."""


@dataclass(frozen=True, kw_only=True)
class StoreShape:
    """What decides how many bytes a token takes."""

    layers: tuple[str, ...]
    encoding: str
    hidden_size: int
    shard_bytes: int
    """Aimed size of one shard."""
    head_bytes: int = 0
    """Embedding, final norm and LM head, kept once."""
    packing: str | None = None
    """How chunks are packed without loss; what that saves is not counted on."""

    @property
    def state_bytes(self) -> int:
        """Bytes of one token's states over all layers."""
        encodings = [encoding_of_layer(name, self.encoding) for name in self.layers]
        return sum(encoded_bytes_per_token(each, self.hidden_size) for each in encodings)

    @property
    def num_arrays(self) -> int:
        """Arrays of a shard: one a layer, and one of scales where the encoding has any."""
        return len(self.layers) + encoding_named(self.encoding).has_scales


@dataclass(frozen=True, kw_only=True)
class StoreSize:
    """What a store takes on its disk."""

    num_bytes: int
    num_bytes_error: int
    """Half width of the 95% interval, from that of the token count."""
    num_shards: int
    num_inodes: int
    """Files and folders, on a file system."""
    num_objects: int
    """Objects, in an object store, which has no folders."""

    @property
    def most_bytes(self) -> int:
        """Upper end of the interval."""
        return self.num_bytes + self.num_bytes_error


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to make a store fit, with what it then takes."""

    setting: str
    """As in the run file."""
    num_bytes: int
    """Upper end of the interval."""


def num_shards(num_tokens: int, shape: StoreShape) -> int:
    """Units that a generation of this many tokens is planned in."""
    return max(1, -(-num_tokens * shape.state_bytes // shape.shard_bytes))


def store_size(count: TokenCount, shape: StoreShape) -> StoreSize:
    """Bytes and inodes of a store that holds the counted conversations."""
    shards = num_shards(count.num_tokens, shape)
    token_bytes = shape.state_bytes + TOKEN_BYTES
    # A sequence's last checksum block is half empty on average.
    blocks = count.num_tokens / CHUNK_TOKENS + count.num_sequences / 2
    records = (
        shards * _RECORD_BYTES
        + count.num_sequences * _SEQUENCE_BYTES
        + blocks * shape.num_arrays * _CHECKSUM_BYTES
    )
    chunks = count.num_tokens / CHUNK_TOKENS + shards
    padding = shards * (CHUNK_TOKENS / 2) * shape.state_bytes
    arrays = padding + shape.num_arrays * (chunks * _INDEX_BYTES + shards * _METADATA_BYTES)
    used_folders = round(_FAN_OUT * (1 - (1 - 1 / _FAN_OUT) ** shards))
    return StoreSize(
        num_bytes=round(count.num_tokens * token_bytes + records + arrays) + shape.head_bytes,
        num_bytes_error=count.num_tokens_error * token_bytes,
        num_shards=shards,
        num_inodes=(
            shards * (_INODES_OF_A_SHARD + _INODES_OF_AN_ARRAY * shape.num_arrays)
            + 2 * used_folders
            + _INODES_OF_A_STORE
        ),
        num_objects=shards * (_FILES_OF_A_SHARD + _FILES_OF_AN_ARRAY * shape.num_arrays)
        + _FILES_OF_A_STORE,
    )


def ways_to_fit(
    count: TokenCount, shape: StoreShape, *, max_bytes: int, encodings: Sequence[str]
) -> list[Way]:
    """The changes of one setting each that bring a store to a size: encoding, layers, sequences.

    Args:
        count: Tokens of the data.
        shape: The store as the run file asks for it.
        max_bytes: What it may take.
        encodings: Encodings that an extraction can write.
    """
    ways = []
    suitable = [each for each in encodings if each in encodings_for(shape.hidden_size)]
    for encoding in sorted(suitable, key=lambda each: -_state_bytes(each, shape)):
        smaller = store_size(count, replace(shape, encoding=encoding))
        if encoding != shape.encoding and smaller.most_bytes <= max_bytes:
            ways.append(Way(setting=f'store.encoding = "{encoding}"', num_bytes=smaller.most_bytes))
    for number in range(len(shape.layers) - 1, 0, -1):
        smaller = store_size(count, replace(shape, layers=shape.layers[:number]))
        if smaller.most_bytes <= max_bytes:
            setting = f"{number} of {len(shape.layers)} layers"
            ways.append(Way(setting=setting, num_bytes=smaller.most_bytes))
            break
    whole = store_size(count, shape).most_bytes
    share = (max_bytes - shape.head_bytes) / max(1, whole - shape.head_bytes)
    limit = int(count.num_conversations * min(1.0, share))
    if limit > 0:
        shrunk = round((whole - shape.head_bytes) * limit / count.num_conversations)
        ways.append(Way(setting=f"data.limit = {limit}", num_bytes=shrunk + shape.head_bytes))
    return ways


def _state_bytes(encoding: str, shape: StoreShape) -> int:
    return encoded_bytes_per_token(encoding, shape.hidden_size)


@dataclass(frozen=True, kw_only=True)
class WorkerMemory:
    """What one extraction worker holds at its peak, in bytes."""

    device_bytes: int
    """Weights and one batch on each of its GPUs; on a CPU this is memory of the host, too."""
    host_bytes: int
    """Encoded batches on their way to the disk, where layer arrays are written batch by batch."""


def worker_memory(
    shape: StoreShape,
    *,
    num_parameters: int,
    element_bytes: int,
    batch_tokens: int,
    mlp_size: int,
    num_gpus: int = 1,
    write_buffer_bytes: int | None = None,
) -> WorkerMemory:
    """Peak memory of one worker: it grows with the batch, never with the store or the shard.

    Args:
        shape: The store.
        num_parameters: Of the target.
        element_bytes: Bytes of a number in the target's arithmetic type.
        batch_tokens: Tokens of the largest forward pass.
        mlp_size: Width of the target's MLP.
        num_gpus: GPUs that share the weights.
        write_buffer_bytes: Pinned memory between GPU and store; None without a GPU.
    """
    encoded_bytes = batch_tokens * (shape.state_bytes + TOKEN_BYTES)
    host_bytes = _CPU_BATCHES * encoded_bytes
    if write_buffer_bytes is not None:
        host_bytes = max(host_bytes, min(write_buffer_bytes, _MOST_BUFFERS * encoded_bytes))
    widths = (len(shape.layers) + _LIVE_HIDDEN) * shape.hidden_size + _LIVE_MLP * mlp_size
    return WorkerMemory(
        device_bytes=element_bytes * (num_parameters // num_gpus + batch_tokens * widths),
        host_bytes=host_bytes,
    )
