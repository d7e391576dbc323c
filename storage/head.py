"""Files beside the hidden states that stage 2 needs: embedding, norm, LM head, tokenizer."""

from crc32c import crc32c

from storage import layout
from storage.errors import DamagedShardError, StoreError
from storage.files import Files
from storage.records import create_record, read_record


def put_head_file(files: Files, name: str, data: bytes) -> None:
    """Stores a file under head/; an equal second put is fine, a different one raises."""
    record = {"num_bytes": len(data), "crc32c": f"{crc32c(data):08x}"}
    if not (
        files.create(layout.head_file(name), data)
        and create_record(files, layout.head_record(name), record)
    ):
        raise StoreError(
            f"{files}/{layout.head_file(name)} differs from this run's; "
            "the target changed since the store was made: use another store folder"
        )


def head_files(files: Files) -> list[str]:
    """Names of all files under head/, those in folders as `folder/name`."""
    names = [name.removesuffix(".json") for name in files.names(layout.HEAD_RECORDS)]
    return [name.replace("%2F", "/").replace("%25", "%") for name in names]


def read_head_file(files: Files, name: str) -> bytes:
    """A file of head/; raises DamagedShardError when its size or checksum is wrong."""
    place = f"{files}/{layout.head_file(name)}"
    try:
        record = read_record(files, layout.head_record(name))
        data = files.read(layout.head_file(name))
    except FileNotFoundError as error:
        raise DamagedShardError(f"{place} is missing; run `extract` to write it again") from error
    if len(data) != record["num_bytes"] or f"{crc32c(data):08x}" != record["crc32c"]:
        raise DamagedShardError(f"{place} is damaged; remove it and run `extract` again")
    return data
