"""The stack of decoder layers inside a transformers model, and hooks that read its states."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from storage.schema import LM_HEAD_INPUT

# Where transformers' models keep their decoder layers and final norm.
_LAYERS_NAMES = ("layers", "h")
_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "embedding_norm")


class _ForwardDone(Exception):  # noqa: N818 - not an error: the layers above are not needed.
    """Ends a forward pass after the highest captured layer."""


@dataclass(frozen=True)
class Decoder:
    """The stack of decoder layers inside a model."""

    module: nn.Module
    """From token ids to final states."""
    layers: nn.ModuleList
    norm: nn.Module
    """The final norm."""


def find_decoder(model: PreTrainedModel) -> Decoder:
    """The stack of decoder layers inside a model, through multimodal wrappers.

    Raises:
        ValueError: The model has no such stack with a final norm.
    """
    decoder = model.get_decoder()
    inner = [_first_attribute(decoder, [name]) for name in ("language_model", "model")]
    for module in (decoder, *inner):
        layers = _first_attribute(module, _LAYERS_NAMES)
        norm = _first_attribute(module, _NORM_NAMES)
        if isinstance(layers, nn.ModuleList) and isinstance(norm, nn.Module):
            assert isinstance(module, nn.Module)
            return Decoder(module, layers, norm)
    raise ValueError(
        f"target.model: {type(model).__name__} has no decoder layers with a final norm where one"
        " looks for them; its hidden states cannot be read"
    )


def _first_attribute(module: object, names: Sequence[str]) -> object:
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


@contextmanager
def capture(decoder: Decoder, layers: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Collects states by layer name from forward passes inside the block.

    A pass stops after the highest captured layer; the final norm runs only for "lm_head_input".
    """
    captured: dict[str, Tensor] = {}
    ids = {int(name) for name in layers if name != LM_HEAD_INPUT}
    last = None if LM_HEAD_INPUT in layers else max(ids)

    def keep(name: str, *, then_stop: bool) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            captured[name] = output[0] if isinstance(output, tuple) else output
            if then_stop:
                raise _ForwardDone

        return hook

    handles = [
        decoder.layers[layer_id].register_forward_hook(
            keep(str(layer_id), then_stop=layer_id == last)
        )
        for layer_id in ids
    ]
    if LM_HEAD_INPUT in layers:
        handles.append(decoder.norm.register_forward_hook(keep(LM_HEAD_INPUT, then_stop=False)))
    try:
        yield captured
    except _ForwardDone:
        pass
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def no_hook_left_behind(model: nn.Module) -> Iterator[None]:
    """Takes away the hooks that transformers leaves where it has once collected hidden states.

    They do nothing any more, but the compiler cannot trace through them.
    """
    before = {module: set(module._forward_hooks) for module in model.modules()}
    try:
        yield
    finally:
        for module, known in before.items():
            for key in set(module._forward_hooks) - known:
                del module._forward_hooks[key]
            if "_output_capturing_hooks_installed" in vars(module):
                vars(module)["_output_capturing_hooks_installed"] = False
