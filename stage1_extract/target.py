"""The target: what stage 1 asks of the model being accelerated, and the backends that give it.

A backend is one file with a class that has these few members and one entry in `BACKENDS`.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from jaxtyping import Float, Int32
from numpy import ndarray
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from stage1_extract.config import Batching, TargetConfig
from stage1_extract.embedded import embedded_target_dir, is_embedded
from stage1_extract.gguf_target import SUFFIX, gguf_target_dir


class Target(Protocol):
    """A frozen language model whose hidden states can be read."""

    config: PretrainedConfig
    """Configuration of the language model itself (the `text_config` of a multimodal one)."""
    tokenizer: PreTrainedTokenizerBase
    device: str

    batching: Batching
    """How sequences share a forward pass."""

    def hidden_states(
        self, token_ids: Sequence[Int32[ndarray, "_"]], *, layers: Sequence[str]
    ) -> dict[str, Float[Tensor, "tokens hidden"]]:
        """States by layer name, the sequences' tokens end to end.

        Each sequence's states are those that a forward pass of it alone would give. Layer "9" is
        the output of decoder layer 9, Hugging Face's `hidden_states[10]`; "lm_head_input" is the
        last layer's output after the final norm.
        """
        ...


SPREAD = "auto"
"""In place of a device: all GPUs that this process sees hold some layers, host memory the rest."""

BACKENDS = {"transformers": "stage1_extract.target_transformers:TransformersTarget"}
"""Backend name to "module:class"; imported only when used."""


def load_target(config: TargetConfig, *, device: str = "cpu", backend: str = "transformers") -> Any:
    """Loads the target on a device.

    Raises:
        ValueError: The backend is unknown, or the model is not found or cannot be loaded.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown target backend {backend!r}; known: {', '.join(BACKENDS)}")
    module_name, class_name = BACKENDS[backend].split(":")
    load: Callable[..., Target] = getattr(import_module(module_name), class_name).load
    return load(config, device=device)


def resolve_target(config: TargetConfig, *, weights: bool = True) -> str:
    """Path of the folder with the target's files; fetched or converted when need be.

    Args:
        config: Names the target.
        weights: Whether the weights of a hub model are wanted, too; its configuration and tokenizer
            alone are a few megabytes.

    Raises:
        ValueError: There is no such folder, hub id or embedded target.
    """
    if is_embedded(config.model):
        return str(embedded_target_dir(config.model))
    folder = Path(config.model).expanduser()
    if folder.suffix == SUFFIX and folder.is_file():
        return str(gguf_target_dir(folder))
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"target.model: {folder} has no config.json; give a Hugging Face model's folder"
            )
        return str(folder)
    if folder.is_absolute() or config.model.startswith((".", "~")) or config.model.count("/") > 1:
        raise ValueError(f"target.model: there is no folder {folder}")
    return _hub_snapshot(config.model, config.revision, weights=weights)


def target_name(config: TargetConfig) -> str:
    """Name of the target in a store: its hub id, embedded name or folder name, without a path."""
    folder = Path(config.model).expanduser()
    is_path = not is_embedded(config.model) and folder.exists()
    return folder.resolve().name if is_path else config.model


@cache
def _hub_snapshot(model: str, revision: str | None, *, weights: bool) -> str:
    """Folder of a hub model, fetched when need be; the hub is asked once a process."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    unused = ["*.bin", "*.pth", "*.pt", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "original/*"]
    if not weights:
        unused.append("*.safetensors")
    try:
        return str(snapshot_download(model, revision=revision, ignore_patterns=unused))
    except (HFValidationError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"target.model: {model!r} is no folder here and the hub does not give it"
            f" ({type(error).__name__}: {reason}); check the name, or give a local folder"
        ) from error
