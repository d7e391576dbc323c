"""Where training starts from: the target's own last layers, fresh weights, or another drafter.

A drafter's layer is a decoder layer of the target with two sources of keys. Copied from the
target's last ones, with context features that begin as the last captured layer's states, it is at
home in these states and in front of the target's LM head from its first step on.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from stage2_train.drafter import Drafter
from stage2_train.export import load_any_drafter
from storage.head import LAST_LAYERS_FILE
from storage.reader import Store

FRESH, FROM_TARGET = "fresh", "target"


def take_start_weights(drafter: Drafter, init_from: str | None, store: Store) -> str:
    """Fills a drafter that has fresh weights with those that training starts from.

    Args:
        drafter: the drafter, in fp32 on the CPU.
        init_from: the setting of the same name (see `DrafterConfig`).
        store: the store, which may keep the target's last layers.

    Returns:
        What training starts from, in words.

    Raises:
        ValueError: the store keeps nothing that fits, or another drafter has another shape.
    """
    if init_from == FRESH:
        return "fresh weights"
    if init_from not in (None, FROM_TARGET):
        take_weights(drafter, Path(init_from))
        return f"the weights of {init_from}"
    weights = last_layers(store)
    num_taken = 0 if weights is None else take_last_layers(drafter, weights)
    if num_taken > 0:
        num_matrices = 7 * len(drafter.layers)
        return f"the target's last layers ({num_taken} of {num_matrices} matrices fit)"
    reason = (
        "the store keeps no layers of its target (store.last_layers)"
        if weights is None
        else "the layers that the store keeps of its target have other widths or parts"
    )
    if init_from == FROM_TARGET:
        raise ValueError(f'init_from = "target": {reason}; leave it out, or set it to "fresh"')
    return f"fresh weights: {reason}"


def last_layers(store: Store) -> dict[str, Tensor] | None:
    """Gives the weights that the store keeps of its target's last layers; None if it does not."""
    if LAST_LAYERS_FILE not in store.head_names():
        return None
    return load_file(store.head_path(LAST_LAYERS_FILE))


@torch.no_grad()
def take_last_layers(drafter: Drafter, weights: Mapping[str, Tensor]) -> int:
    """Copies what fits of a target's last layers into a drafter's last ones.

    Where a matrix fits, the context features begin as the states of the last captured layer,
    normed as for the first of these layers; where none does, norms are not taken either.

    Args:
        drafter: the drafter, with fresh weights for the rest.
        weights: `layers.{id}.{part}.weight` and `norm.weight`, as the target has them.

    Returns:
        The number of matrices copied.
    """
    numbers = sorted({int(name.split(".")[1]) for name in weights if name.startswith("layers.")})
    numbers = numbers[-len(drafter.layers) :]
    num_fresh = len(drafter.layers) - len(numbers)
    source_of = {f"layers.{num_fresh + place}": f"layers.{n}" for place, n in enumerate(numbers)}
    fitting = {}
    for name, weight in drafter.named_parameters():
        layer, part = ".".join(name.split(".")[:2]), ".".join(name.split(".")[2:])
        source = weights.get(f"{source_of[layer]}.{part}" if layer in source_of else name)
        if source is not None and source.shape == weight.shape:
            fitting[name] = source
    num_matrices = sum(name.endswith("_proj.weight") for name in fitting)
    if num_matrices > 0:
        for name, source in fitting.items():
            drafter.get_parameter(name).copy_(source)
        _see_last_states(drafter, weights.get(f"layers.{numbers[0]}.input_layernorm.weight"))
        _scale_head_norms(drafter, list(fitting))
    return num_matrices


def _see_last_states(drafter: Drafter, norm: Tensor | None) -> None:
    hidden_size = drafter.architecture.hidden_size
    drafter.fc.weight[:, -hidden_size:] += torch.eye(hidden_size)
    if norm is not None and norm.shape == drafter.hidden_norm.weight.shape:
        drafter.hidden_norm.weight.copy_(norm)


def _scale_head_norms(drafter: Drafter, taken: list[str]) -> None:
    """Gives norms of queries and keys that the target lacks the scale which its own have.

    It is the root mean square of a head's channels behind a normed input, as if the input's
    channels were independent.
    """
    weights = drafter.state_dict()  # The drafter's own memory, not a copy.
    for number in range(len(drafter.layers)):
        layer = f"layers.{number}"
        for name in (f"{layer}.self_attn.q", f"{layer}.self_attn.k"):
            if f"{name}_proj.weight" in taken and f"{name}_norm.weight" not in taken:
                scaled = weights[f"{name}_proj.weight"] * weights[f"{layer}.input_layernorm.weight"]
                scale = scaled.square().sum(dim=1).mean().sqrt()
                weights[f"{name}_norm.weight"].fill_(float(scale))


def take_weights(drafter: Drafter, folder: Path) -> None:
    """Starts from the weights of another drafter of the same shape, in any layout we read."""
    shape = drafter.architecture
    other = load_any_drafter(folder, num_target_layers=shape.num_target_layers)
    if other.architecture.target_layer_ids != shape.target_layer_ids:
        raise ValueError(
            f"init_from {folder} reads target layers {other.architecture.target_layer_ids}, this "
            f"drafter {shape.target_layer_ids}; they must be the same"
        )
    try:
        drafter.load_state_dict(other.state_dict())
    except RuntimeError as error:
        first = str(error).splitlines()[-1].strip()
        raise ValueError(f"init_from {folder} has another shape: {first}") from error
