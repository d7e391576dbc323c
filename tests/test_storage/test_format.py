"""FORMAT.md is true: a reader written from it alone gets what ours gets from the golden store."""

import base64
import hashlib
import json
import math
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c
from numcodecs import blosc

from storage.catalog import fold, read_catalog
from storage.files import LocalFiles
from storage.reader import open_store
from storage.schema import FORMAT_VERSION
from storage.verify import verify_store

GOLDEN = Path(__file__).with_name("golden")


def read_record(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    body, tail = data[:-24], data[-24:]
    assert tail == b',\n"crc32c": "%08x"}\n' % crc32c(body)
    return dict(json.loads(data)["record"])


def fan_out(unit: str) -> str:
    return hashlib.sha256(unit.encode()).hexdigest()[:2]


def unpack(text: str) -> tuple[int, ...]:
    data = base64.b64decode(text)
    return struct.unpack(f"<{len(data) // 4}I", data)


def read_rows(folder: Path, array: dict[str, Any], lengths: list[int]) -> np.ndarray:
    """All rows of an array, its blocks and its tail verified."""
    data = (folder / "c/0/0").read_bytes()
    assert len(data) == array["file_bytes"]
    row_bytes = array["width"] * np.dtype(array["dtype"]).itemsize
    assert array["profile"] in ("raw", "packed")
    if array["profile"] == "packed":
        data = unpacked(data, unpack(array["chunk_bytes"]), sum(lengths) * row_bytes)
    checksums = iter(unpack(array["checksums"]))
    start = 0
    for length in lengths:
        for first in range(0, length, 256):
            stop = start + min(length, first + 256) * row_bytes
            assert crc32c(data[start + first * row_bytes : stop]) == next(checksums)
        start += length * row_bytes
    assert next(checksums, None) is None
    assert crc32c(data[start:]) == array["tail_crc32c"]
    assert crc32c((folder / "zarr.json").read_bytes()) == array["metadata_crc32c"]
    return np.frombuffer(data[:start], array["dtype"]).reshape(-1, array["width"])


def unpacked(data: bytes, chunk_bytes: tuple[int, ...], num_bytes: int) -> bytes:
    """A packed file as a raw one: its rows, then what lies behind its chunks."""
    rows, start = b"", 0
    index = [(sum(chunk_bytes[:i]), size) for i, size in enumerate(chunk_bytes)]
    for size in chunk_bytes:
        buffer, checksum = data[start : start + size - 4], data[start + size - 4 : start + size]
        assert int.from_bytes(checksum, "little") == crc32c(buffer)
        rows += blosc.decompress(buffer)
        start += size
    assert not any(rows[num_bytes:])
    assert struct.unpack(f"<{2 * len(index)}Q", data[start:-4]) == sum(index, ())
    return rows[:num_bytes] + data[start:]


def e4m3(code: int) -> float:
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    value = mantissa / 512 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


def decode_row(layer: dict[str, Any], row: np.ndarray, s: float) -> list[float]:
    """The values of one token, as the table of encodings says, in double precision."""
    encoding, hidden, c = layer["encoding"], layer["hidden_size"], layer["channel_scales"]
    if encoding == "bf16":
        return [struct.unpack("<f", struct.pack("<I", int(bits) << 16))[0] for bits in row]
    if encoding == "fp8":
        return [e4m3(int(code)) * s for code in row]
    if encoding == "int8":
        return [int(code) * s * scale for code, scale in zip(row, c, strict=True)]
    b = {"int4": 4, "int3": 3, "int2": 2}[encoding]
    r = math.gcd(hidden, 64)
    g = min(r, 32 if b == 4 else 64)
    z = []
    for h in range(hidden):
        k = sum((int(row[p * hidden // 8 + h // 8]) >> (h % 8) & 1) << p for p in range(b))
        q = int(row[b * hidden // 8 + h // g])
        z.append((k - 2 ** (b - 1) + 0.5) * q * q * s / 65025)
    values = []
    for h in range(hidden):
        run, m = h // r * r, h % r
        mixed = sum((-1) ** (m & n).bit_count() * z[run + n] for n in range(r)) / math.sqrt(r)
        values.append(mixed * c[h])
    return values


def test_every_version_is_kept_golden() -> None:
    versions = [path.name for path in GOLDEN.iterdir() if path.is_dir()]
    kinds = ("", "-grown", "-joined")
    wanted = [f"v{number}{kind}" for number in range(1, FORMAT_VERSION + 1) for kind in kinds]
    assert sorted(versions) == sorted(wanted)


CONTENTS = {
    "v1": (
        "6b1640da32b8f85ce30850d33fb4b35dfc471d18433ce71eb58105a1899f770e",
        "3c2c250e96209771:0.0",
    ),
    "v1-grown": (
        "5d7facc12091052d11197265ff750d219ee1662eddb6d8c84421e824993d4cff",
        "83f8599896f31cf5:0.0",
    ),
    "v1-joined": (
        "78b531b94ae31b0add6223a636620e785005ca92cb6bf0cdd7345700ecbc4806",
        "3c2c250e96209771:0.0|83f8599896f31cf5:0.0",
    ),
}
"""Content digest and snapshot of each golden store. `-grown` has packed layers, one that was added
and one that is being added; `-joined` reads both as one."""


@pytest.mark.parametrize("name", CONTENTS)
def test_golden_stores_are_read(name: str) -> None:
    store = open_store(GOLDEN / name)
    assert (store.content_digest(), store.snapshot().id) == CONTENTS[name]
    assert store.is_complete()
    if not name.endswith("-joined"):
        assert verify_store(GOLDEN / name, full=True).ok


def test_joined_stores_and_pending_layers_follow_the_document() -> None:
    members = read_record(GOLDEN / "v1-joined/joined.json")["members"]
    assert [(GOLDEN / "v1-joined" / member).resolve().name for member in members] == [
        "v1",
        "v1-grown",
    ]
    grown = GOLDEN / "v1-grown"
    pending = {path.stem for path in (grown / "pending_layers").iterdir()}
    visible = {path.stem for path in (grown / "layers").iterdir()}
    assert pending == {"7", "lm_head_input"}
    assert pending - visible == {"lm_head_input"}
    assert set(open_store(grown).layers) == visible == {"1", "2", "3", "4", "5", "6", "7"}


@pytest.mark.parametrize("name", ["v1", "v1-grown"])
def test_a_reader_written_from_the_document_agrees(name: str) -> None:
    root = GOLDEN / name
    unit = "00000-00000"
    commit = read_record(root / "commits" / fan_out(unit) / f"{unit}.json")
    check_layers(root, commit, commit)
    for path in (root / "added" / fan_out(unit) / unit).glob("*.json"):
        added = read_record(path)
        assert path.stem == "+".join(added["layers"])
        check_layers(root, commit, added)


def check_layers(root: Path, commit: dict[str, Any], record: dict[str, Any]) -> None:
    """The layers of a commit or of an added record are what our reader gives."""
    shards = root / "shards" / fan_out(commit["unit"])
    lengths = commit["num_tokens"]
    folder = shards / f"{record['unit']}.{record['attempt']}"
    scales = read_rows(folder / "scales", record["scales"], lengths)
    tokens = (shards / f"{commit['unit']}.{commit['attempt']}" / "tokens.bin").read_bytes()
    ours = open_store(root).snapshot()
    for name, array in record["layers"].items():
        layer = read_record(root / "layers" / f"{name}.json")
        rows = read_rows(folder / "layers" / name, array, lengths)
        columns = record["scale_columns"]
        column = columns.index(name) if name in columns else None
        start = 0
        for place, length in enumerate(lengths):
            read = ours.read(ours.index_of(commit["sequence_ids"][place]), layers=[name])
            np.testing.assert_array_equal(read.states[name].data, rows[start : start + length])
            packed = tokens[5 * start : 5 * (start + length)]
            assert crc32c(packed) == unpack(commit["tokens_checksums"])[place]
            assert struct.unpack(f"<{length}i", packed[: 4 * length]) == tuple(read.token_ids)
            assert list(packed[4 * length :]) == read.loss_mask.astype(int).tolist()
            states = open_store(root).sequence(read.sequence_id).hidden_states(layers=[name])
            for t in range(0, length, 41):
                s = 1.0 if column is None else float(scales[start + t, column])
                expected = decode_row(layer, rows[start + t], s)
                np.testing.assert_allclose(states[t, 0], expected, rtol=1e-5, atol=1e-5)
            start += length


def test_plans_and_splits_follow_the_document() -> None:
    root = GOLDEN / "v1"
    plan = read_record(root / "generations/00000.json")
    listed = (root / "plans" / f"{plan['ids_sha256']}.ids").read_bytes()
    assert hashlib.sha256(listed).hexdigest() == plan["ids_sha256"]
    ids = listed.decode().split("\n")[:-1]
    assert ids == sorted(ids) == [" third", "first", "zweite ä"]
    commit = read_record(root / "commits" / fan_out("00000-00000") / "00000-00000.json")
    assert commit["ids_sha256"] == plan["ids_sha256"]
    fraction = read_record(root / "store.json")["held_out_fraction"]
    snapshot = open_store(root).snapshot()
    for index in range(snapshot.num_sequences):
        digest = hashlib.sha256(snapshot.sequence_id(index).encode()).digest()
        held_out = int.from_bytes(digest[:8], "little") < math.floor(fraction * 2**64)
        assert snapshot.held_out[index] == held_out
    for sequence_id in ids:
        digest = hashlib.sha256(struct.pack("<I", 0) + sequence_id.encode()).digest()
        assert int.from_bytes(digest[:8], "little") % plan["num_units"] == 0


def test_the_catalog_follows_the_document() -> None:
    (path,) = (GOLDEN / "v1" / "catalog").iterdir()
    data = path.read_bytes()
    assert data[:8] == b"DFLCAT01"
    assert int.from_bytes(data[-4:], "little") == crc32c(data[:-4])
    start = 16 + int.from_bytes(data[8:16], "little")
    header = json.loads(data[16:start])
    assert header["num_generations_complete"] == 1
    columns = {}
    for name, dtype, shape in header["columns"]:
        count = math.prod(shape)
        columns[name] = np.frombuffer(data, dtype, count, start).reshape(shape)
        start += columns[name].nbytes
    assert start == len(data) - 4
    assert columns["num_tokens"].tolist() == [3, 300]
    assert columns["id_text"].tobytes().decode() == "firstzweite ä"


def test_the_catalog_of_columns_follows_the_document(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "v1", tmp_path / "store")
    files = LocalFiles(tmp_path / "store")
    files.remove_tree("catalog")
    fold(files, read_catalog(files))
    (path,) = (tmp_path / "store" / "catalog").iterdir()
    data = path.read_bytes()
    assert data[:8] == b"DFLCAT02"
    assert int.from_bytes(data[4092:4096], "little") == crc32c(data[:4092])
    header = json.loads(data[16 : 16 + int.from_bytes(data[8:16], "little")])
    assert header["num_generations_complete"] == 1
    columns = {}
    for name, column in header["columns"].items():
        assert column["offset"] % 64 == 0
        count = math.prod(column["shape"])
        found = np.frombuffer(data, column["dtype"], count, column["offset"])
        stop = column["offset"] + found.nbytes + -found.nbytes % 64
        assert crc32c(data[column["offset"] : stop]) == column["crc32c"]
        columns[name] = found.reshape(column["shape"])
    assert stop == len(data)
    assert columns["num_tokens"].tolist() == [3, 300]
    assert columns["id_text"].tobytes().decode() == "firstzweite ä"


def test_a_newer_version_is_refused_by_name(tmp_path: Path) -> None:
    from storage.errors import StoreError
    from storage.records import dump_record

    value = read_record(GOLDEN / "v1" / "store.json") | {"format_version": 2, "new": 1}
    (tmp_path / "store.json").write_bytes(dump_record(value))
    with pytest.raises(StoreError, match="format version 2"):
        open_store(tmp_path)
