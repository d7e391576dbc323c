"""A target that is a GGUF file: dequantised once into a Hugging Face folder, which is kept.

transformers reads the file. It knows a GGUF's tokenizer by tokens and merges alone, without the
rules by which its model splits text (digits one by one, for example), so the tokenizer's own files
are taken where they lie beside the GGUF.
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

from stage1_extract.embedded import cache_dir, publish, scratch_dir
from stage1_extract.target_identity import TOKENIZER_FILES

SUFFIX = ".gguf"
TOKENIZER_FILE = "tokenizer.json"
_FILES_BESIDE = (*TOKENIZER_FILES, "chat_template.jinja", "chat_template.json")
CONVERSION_VERSION = 1
"""Raise it whenever the converted files change, so that cached folders are made anew."""


def gguf_sources(path: Path) -> list[Path]:
    """The files that decide a conversion: the GGUF and its tokenizer's and template's beside it."""
    beside = (path.with_name(name) for name in _FILES_BESIDE)
    return [path, *(each for each in beside if each.is_file())]


def gguf_target_dir(path: Path) -> Path:
    """Folder with a GGUF file's weights (dequantised, bf16), configuration and tokenizer.

    Kept in the cache folder under the file's name and a digest of the sizes and times of change of
    its `gguf_sources`.

    Raises:
        ValueError: transformers cannot read the file's architecture.
    """
    states = [(each.name, each.stat()) for each in gguf_sources(path)]
    marks = [(name, state.st_size, state.st_mtime_ns) for name, state in states]
    digest = hashlib.sha256(repr(marks).encode()).hexdigest()[:16]
    folder = cache_dir() / "targets" / f"{path.stem}-{digest}-v{CONVERSION_VERSION}"
    if not folder.is_dir():
        with scratch_dir(folder.parent) as scratch:
            convert(path, scratch / "folder")
            publish(scratch / "folder", folder)
    return folder


def convert(path: Path, folder: Path) -> None:
    """Writes a GGUF file as a Hugging Face folder."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    arguments: dict[str, Any] = {"gguf_file": path.name, "dtype": torch.bfloat16}
    # Newer versions keep the weights packed unless told otherwise; older ones know no other way.
    if hasattr(transformers, "GgufConfig"):
        arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        model = AutoModelForCausalLM.from_pretrained(path.parent, **arguments)
        # What is saved is an ordinary model.
        model.config.__dict__.pop("quantization_config", None)
        if (path.parent / TOKENIZER_FILE).is_file():
            tokenizer = AutoTokenizer.from_pretrained(path.parent)
        else:
            print(
                f"target.model: {path} has no {TOKENIZER_FILE} beside it; its own tokens are used, "
                "which may split text otherwise than the model was trained with",
                file=sys.stderr,
            )
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except (ImportError, ValueError, KeyError, OSError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"target.model: transformers cannot read {path} ({type(error).__name__}: {reason}); "
            "give the model's Hugging Face folder instead"
        ) from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
