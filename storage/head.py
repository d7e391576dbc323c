"""Files beside the hidden states that stage 2 needs: embedding, norm, LM head, tokenizer."""

from collections.abc import Iterable, Iterator
from typing import Any

from crc32c import crc32c

from storage import layout
from storage.errors import DamagedShardError, StoreError
from storage.files import Files
from storage.records import create_record, read_record

WEIGHTS_FILE, FACTS_FILE = NEEDED = ("target.safetensors", "target.json")
"""What no drafter trains without."""
LAST_LAYERS_FILE = "last_layers.safetensors"
"""What drafters may start from."""
READ_BYTES = 16 * 2**20
"""Bytes of one read while a file is checked."""


def put_head_file(files: Files, name: str, data: bytes) -> None:
    """Stores a file under head/; an equal second put is fine, a different one raises.

    A file that is not what its record says any more is written again.
    """
    record = {"num_bytes": len(data), "crc32c": f"{crc32c(data):08x}"}
    path = layout.head_file(name)
    is_there = files.create(path, data)
    if not is_there and _recorded(files, name) == record:
        # The record says that these were its bytes: the file was damaged since.
        stream = files.replacing_stream(path)
        stream.write(data)
        stream.close()
        is_there = True
    if not (is_there and create_record(files, layout.head_record(name), record)):
        raise StoreError(
            f"{files}/{path} differs from this run's; "
            "the target changed since the store was made: use another store folder"
        )


def _recorded(files: Files, name: str) -> dict[str, Any] | None:
    try:
        return read_record(files, layout.head_record(name))
    except FileNotFoundError:
        return None


def lacking_head_files(files: Files, *, also: Iterable[str] = ()) -> list[str]:
    """Files of head/ that are needed or recorded, but not there in their full size.

    Their bytes are not read: a flipped one shows when the file is used.

    Args:
        files: The store's files.
        also: Names of further files that shall be there.
    """
    names = sorted({*NEEDED, *also, *head_files(files)})
    return [name for name in names if not _has_full_size(files, name)]


def _has_full_size(files: Files, name: str) -> bool:
    try:
        recorded: int = read_record(files, layout.head_record(name))["num_bytes"]
        return files.size(layout.head_file(name)) == recorded
    except FileNotFoundError:
        return False


def head_files(files: Files) -> list[str]:
    """Names of all files under head/, those in folders as `folder/name`."""
    names = [name.removesuffix(".json") for name in files.names(layout.HEAD_RECORDS)]
    return [name.replace("%2F", "/").replace("%25", "%") for name in names]


def read_head_file(files: Files, name: str) -> bytes:
    """A file of head/; raises DamagedShardError when its size or checksum is wrong."""
    return b"".join(bytes(part) for part in _verified_parts(files, name))


def check_head_file(files: Files, name: str) -> None:
    """Reads a file of head/ piece by piece; raises DamagedShardError as `read_head_file`."""
    for _ in _verified_parts(files, name):
        pass


def _verified_parts(files: Files, name: str) -> Iterator[memoryview]:
    """The file's bytes in pieces that are overwritten by the next; raises at the end."""
    path = layout.head_file(name)
    try:
        record = read_record(files, layout.head_record(name))
        left = files.size(path)
        checksum, offset = 0, 0
        if left == record["num_bytes"]:
            memory = memoryview(bytearray(min(left, READ_BYTES)))
            reader = files.range_reader(path)
            while offset < left:
                part = memory[: left - offset]
                reader.read_into(offset, [part])
                checksum, offset = crc32c(part, checksum), offset + len(part)
                yield part
    except FileNotFoundError as error:
        raise DamagedShardError(
            f"{files}/{path} is missing; run `extract` to write it again"
        ) from error
    if left != record["num_bytes"] or f"{checksum:08x}" != record["crc32c"]:
        raise DamagedShardError(f"{files}/{path} is damaged; remove it and run `extract` again")
