"""Target files: a target's configuration, tokenizer and stop tokens, read without its weights.

Apart from the loaded target: importing model code takes seconds that preparing has no use for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from stage1_extract.config import TargetConfig
from stage1_extract.target import resolve_target

# What loading raises for a folder that is not what it should be; anything else is a bug.
_LOAD_ERRORS = (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError)


def load_config(config: TargetConfig) -> PretrainedConfig:
    """The language model's configuration, without its weights.

    Raises:
        ValueError: The target is not found or its configuration is unreadable.
    """
    folder = resolve_target(config)
    with clear_errors(config):
        whole = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    return whole.get_text_config()


def load_tokenizer(config: TargetConfig) -> PreTrainedTokenizerBase:
    """The target's tokenizer.

    Raises:
        ValueError: The target is not found or has no usable tokenizer.
    """
    folder = resolve_target(config)
    with clear_errors(config):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=config.trust_remote_code
        )
    if len(tokenizer) == 0:
        raise ValueError(f"target.model: {folder} has no tokenizer; add its tokenizer.json")
    return tokenizer


def stop_token_ids(folder: str | Path, config: PretrainedConfig) -> list[int]:
    """Tokens that end an answer: of the generation settings if there are any, else of the model."""
    from transformers import GenerationConfig

    path = Path(folder) / "generation_config.json"
    found = GenerationConfig.from_pretrained(folder).eos_token_id if path.is_file() else None
    if found is None:
        found = getattr(config, "eos_token_id", None)
    if found is None:
        return []
    return sorted({found} if isinstance(found, int) else set(found))


@contextmanager
def clear_errors(config: TargetConfig) -> Iterator[None]:
    """Turns what transformers raises for a folder that is not what it should be into one line."""
    try:
        yield
    except _LOAD_ERRORS as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"target.model: transformers cannot load {config.model!r}"
            f" ({type(error).__name__}: {lines[0]}); check that the folder is whole, that the model"
            " is known to this transformers version, and target.trust_remote_code if it needs code"
        ) from error
