"""The records that say what a store is: its identity and its layers."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from storage import layout
from storage.encodings import encoding_named
from storage.errors import StoreError, StoreNotFoundError
from storage.files import Files
from storage.packing import PACKINGS
from storage.records import create_record, read_record
from storage.schema import FORMAT_VERSION, LayerRecord, StoreIdentity, check_same_identity


def create_identity(files: Files, identity: StoreIdentity) -> None:
    """Makes a folder a store with this identity; raises if it is anything else already."""
    _refuse_other_folders(files)
    if not create_record(files, layout.IDENTITY, identity.to_json()):
        found = read_record(files, layout.IDENTITY)
        _check_version(files, found)
        check_same_identity(found, identity, place=files)


def _refuse_other_folders(files: Files) -> None:
    try:
        names = files.names("")
    except NotADirectoryError as error:
        raise StoreError(f"{files} is a file; choose another store folder") from error
    if names and layout.IDENTITY not in names:
        raise StoreError(
            f"{files} holds other files and is no store; choose an empty or new folder"
        )


def read_identity(files: Files) -> StoreIdentity:
    """The identity of a store; raises StoreNotFoundError where there is none."""
    try:
        value = read_record(files, layout.IDENTITY)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoreNotFoundError(
            f"there is no store at {files}; check the path, or run `extract` to make one"
        ) from error
    _check_version(files, value)
    return StoreIdentity.from_json(value)


def _check_version(files: Files, value: Mapping[str, Any]) -> None:
    what, known = "", {field.name for field in fields(StoreIdentity)}
    if value.get("format_version") != FORMAT_VERSION:
        what = f"format version {value.get('format_version')}, this program reads {FORMAT_VERSION}"
    elif other := sorted(known ^ set(value)):
        what = f"another identity than this program knows ({', '.join(other)})"
    if what:
        raise StoreError(
            f"{files} has {what}; use the program that wrote the store, or a newer one"
        )


def add_layers(
    files: Files, records: list[LayerRecord], *, path_of: Callable[[str], str] = layout.layer_record
) -> None:
    """Records layers; a name that is there with other contents raises StoreError."""
    for record in records:
        _check_record(record)
        path = path_of(record.name)
        if not create_record(files, path, record.to_json()):
            found = LayerRecord.from_json(read_record(files, path))
            raise StoreError(
                f"{files}: layer {record.name} is stored as {_describe(found)}, this run "
                f"wants {_describe(record)}; keep the store's setting or use another folder"
            )


def read_layers(files: Files, folder: str = layout.LAYERS) -> dict[str, LayerRecord]:
    """The layer records of a store by name, decoder layers in order."""
    names = [name.removesuffix(".json") for name in files.names(folder)]
    return {
        name: LayerRecord.from_json(read_record(files, f"{folder}/{name}.json"))
        for name in sorted(names, key=_layer_order)
    }


def _layer_order(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdigit() else (2**31, name)


def _check_record(record: LayerRecord) -> None:
    if not record.name.replace("_", "").isalnum() or not record.name.isascii():
        raise ValueError(f"layer name {record.name!r} may hold letters, digits and _ only")
    entry = encoding_named(record.encoding)
    entry.width(record.hidden_size)
    if record.packing not in (None, *PACKINGS):
        raise ValueError(
            f"layer {record.name}: unknown packing {record.packing!r}; expected one of "
            f"{', '.join(PACKINGS)}"
        )
    num_scales = None if record.channel_scales is None else len(record.channel_scales)
    if num_scales != (record.hidden_size if entry.calibrated else None):
        raise ValueError(
            f"layer {record.name}: encoding {record.encoding} takes "
            f"{record.hidden_size if entry.calibrated else 'no'} channel scales, got {num_scales}"
        )


def _describe(record: LayerRecord) -> str:
    text = f"{record.encoding} of hidden size {record.hidden_size}"
    if record.packing is not None:
        text += f", packed with {record.packing}"
    if record.channel_scales is None:
        return text
    return f"{text}, channel scales {hash(record.channel_scales) % 2**32:08x}"
