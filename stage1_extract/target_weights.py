"""A target's weights as they go into the store: whole, and in the type they were published in."""

import torch
from torch import Tensor

from stage1_extract.target_transformers import TransformersTarget


def whole(weight: Tensor) -> Tensor:
    """The weight, put together where processes hold parts of it."""
    from torch.distributed.tensor import DTensor

    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def as_published(weight: Tensor, target: TransformersTarget) -> Tensor:
    """The weight in the type the model was published in, where that loses nothing."""
    published = target.published_dtype
    if published is not None and published != weight.dtype:
        narrow = weight.to(published)
        if torch.equal(narrow.to(weight.dtype), weight):
            weight = narrow
    return weight.contiguous().cpu()
