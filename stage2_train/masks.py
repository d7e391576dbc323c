"""The attention masks of a batch, in the form that suits its attention kernels."""

from typing import NamedTuple

from jaxtyping import Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from stage2_train.architecture import DrafterArchitecture
from stage2_train.block_attention import BlockTables, block_tables, has_room, suits
from stage2_train.flex import make_block_mask, visible_runs

AttentionMask = BlockTables | BlockMask


class BatchMasks(NamedTuple):
    """The masks of a batch, built once for layers of equal rules."""

    of_layers: tuple[AttentionMask, ...]
    tensors: tuple[Tensor, ...]
    """All that the masks are made of."""


def batch_masks(
    context_start: Int[Tensor, "blocks"],
    context_stop: Int[Tensor, "blocks"],
    *,
    num_context_tokens: int,
    architecture: DrafterArchitecture,
    is_flex_wanted: bool = False,
) -> BatchMasks:
    """Gives the mask of each layer, without waiting for the device.

    Tables of our own kernels where these take the drafter's shape on a GPU, else FlexAttention's;
    those always where they are wanted.
    """
    block_size = architecture.block_size
    num_queries = len(context_start) * block_size
    is_ours = (
        not is_flex_wanted
        and has_room(context_start.device)
        and suits(
            num_heads=architecture.num_attention_heads,
            num_kv_heads=architecture.num_key_value_heads,
            head_dim=architecture.head_dim,
            num_queries=num_queries,
            block_size=block_size,
        )
    )
    masks: dict[object, AttentionMask] = {}
    tensors: list[Tensor] = []
    for rule in dict.fromkeys(architecture.attention_rules):
        runs = visible_runs(
            context_start,
            context_stop,
            num_context_tokens=num_context_tokens,
            block_size=block_size,
            rule=rule,
        )
        tensors += runs.tensors
        if is_ours:
            masks[rule] = tables = block_tables(runs, num_context_tokens=num_context_tokens)
            tensors.append(tables.query_ranges)
        else:
            masks[rule] = mask = make_block_mask(runs, num_keys=num_context_tokens + num_queries)
            tensors += [part for part in mask.as_tuple() if isinstance(part, Tensor)]
    return BatchMasks(tuple(masks[rule] for rule in architecture.attention_rules), tuple(tensors))
