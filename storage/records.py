"""JSON records that carry their own checksum, so that no flipped bit goes unnoticed."""

import json
from collections.abc import Mapping
from typing import Any

from crc32c import crc32c

from storage.errors import DamagedShardError
from storage.files import Files

_TAIL_BYTES = len(',\n"crc32c": "00000000"}\n')


def dump_record(value: Mapping[str, Any]) -> bytes:
    """The record as JSON; its last member is the CRC-32C of every byte before that member."""
    body = json.dumps({"record": value}, ensure_ascii=False)[:-1].encode()
    return body + f',\n"crc32c": "{crc32c(body):08x}"}}\n'.encode()


def parse_record(data: bytes, *, place: str) -> dict[str, Any]:
    """The value of a record; raises DamagedShardError when a byte differs from what was written."""
    body, tail = data[:-_TAIL_BYTES], data[-_TAIL_BYTES:]
    if tail != f',\n"crc32c": "{crc32c(body):08x}"}}\n'.encode():
        raise DamagedShardError(
            f"{place} is damaged (its checksum does not match); restore this file from a copy"
        )
    record: dict[str, Any] = json.loads(data)["record"]
    return record


def read_record(files: Files, path: str) -> dict[str, Any]:
    """Reads and checks a record; FileNotFoundError if there is none."""
    return parse_record(files.read(path), place=f"{files}/{path}")


def create_record(files: Files, path: str, value: Mapping[str, Any]) -> bool:
    """Creates a record exclusively; False if a different one is there."""
    return files.create(path, dump_record(value))
