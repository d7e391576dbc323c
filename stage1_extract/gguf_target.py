"""A target that is a GGUF file: dequantised once into a Hugging Face folder, which is kept.

transformers reads the file. It knows a GGUF's tokenizer by tokens and merges alone, without the
rules by which its model splits text (digits one by one, for example), so the tokenizer's own files
are taken where they lie beside the GGUF.
"""

import sys
from pathlib import Path
from typing import Any

from stage1_extract.embedded import cache_dir, publish, scratch_dir

SUFFIX = ".gguf"
TOKENIZER_FILE = "tokenizer.json"
CONVERSION_VERSION = 1
"""Raise it whenever the converted files change, so that cached folders are made anew."""


def gguf_target_dir(path: Path) -> Path:
    """Folder with a GGUF file's weights (dequantised, bf16), configuration and tokenizer.

    Kept in the cache folder under the file's name, its size and time of change, and those of the
    tokenizer beside it.

    Raises:
        ValueError: transformers cannot read the file's architecture.
    """
    sources = [each for each in (path, path.with_name(TOKENIZER_FILE)) if each.is_file()]
    states = (each.stat() for each in sources)
    marks = "-".join(f"{state.st_size}-{state.st_mtime_ns}" for state in states)
    folder = cache_dir() / "targets" / f"{path.stem}-{marks}-v{CONVERSION_VERSION}"
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
