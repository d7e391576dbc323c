"""What makes two targets the same: hashes of weights and tokenizer, remembered per file."""

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from stage1_extract.embedded import cache_dir

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)


def weights_sha256(folder: str | Path) -> str:
    """One hash over the content of every weight file of a model folder.

    Raises:
        ValueError: The folder has no weight files.
    """
    folder = Path(folder)
    paths = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES)
    if any(path.suffix == ".safetensors" for path in paths):
        paths = [path for path in paths if path.suffix == ".safetensors"]
    if not paths:
        raise ValueError(f"target.model: {folder} has no weight files (*.safetensors)")
    return _sha256_of_files(paths)


def weights_id(folder: str | Path) -> str:
    """The start of `weights_sha256`: enough to tell targets apart in a line of data."""
    return weights_sha256(folder)[:16]


def tokenizer_sha256(folder: str | Path) -> str:
    """One hash over the tokenizer's files."""
    folder = Path(folder)
    return _sha256_of_files(path for name in TOKENIZER_FILES if (path := folder / name).is_file())


def _sha256_of_files(paths: Iterable[Path]) -> str:
    whole = hashlib.sha256()
    for path in paths:
        whole.update(f"{path.name} {_file_sha256(path)}\n".encode())
    return whole.hexdigest()


def _file_sha256(path: Path) -> str:
    """Content hash of a file, remembered by its path, size and modification time.

    A target of hundreds of gigabytes would otherwise be read once more by every worker.
    """
    path = path.resolve()
    status = path.stat()
    known_as = f"{path} {status.st_size} {status.st_mtime_ns}"
    note = cache_dir() / "hashes" / f"{hashlib.sha256(known_as.encode()).hexdigest()}.json"
    with suppress(OSError, ValueError, KeyError):
        return str(json.loads(note.read_bytes())["sha256"])
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    with suppress(OSError):  # A read-only cache folder costs time, nothing else.
        note.parent.mkdir(parents=True, exist_ok=True)
        unfinished = note.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps({"file": known_as, "sha256": found}))
        unfinished.replace(note)
    return found
