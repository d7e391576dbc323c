from pathlib import Path
from types import SimpleNamespace

import pytest

from storage.errors import StoreError, StoreNotFoundError
from storage.files import LocalFiles
from storage.identity import add_layers, create_identity, read_identity, read_layers
from storage.schema import LayerRecord


def test_an_identity_is_read_as_it_was_made(tmp_path: Path, making: SimpleNamespace) -> None:
    files = LocalFiles(tmp_path / "store")
    with pytest.raises(StoreNotFoundError):
        read_identity(files)
    create_identity(files, making.make_identity())
    assert read_identity(files) == making.make_identity()


@pytest.mark.parametrize("name", ["../9", "a b", "", "é", "9.5"])
def test_layer_names_are_plain(tmp_path: Path, name: str) -> None:
    record = LayerRecord(name=name, encoding="bf16", hidden_size=8)
    with pytest.raises(ValueError, match="layer name"):
        add_layers(LocalFiles(tmp_path), [record])


def test_encodings_must_fit_the_hidden_size(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    scales = (1.0,) * 12
    int4 = LayerRecord(name="1", encoding="int4", hidden_size=12, channel_scales=scales)
    with pytest.raises(ValueError, match="divisible by 8"):
        add_layers(files, [int4])
    fp8 = LayerRecord(name="1", encoding="fp8", hidden_size=12, channel_scales=scales)
    with pytest.raises(ValueError, match="takes no channel scales, got 12"):
        add_layers(files, [fp8])
    assert read_layers(files) == {}


def test_other_channel_scales_are_another_layer(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    record = LayerRecord(name="1", encoding="int8", hidden_size=2, channel_scales=(1.0, 2.0))
    add_layers(files, [record])
    add_layers(files, [record])
    other = LayerRecord(name="1", encoding="int8", hidden_size=2, channel_scales=(1.0, 2.5))
    with pytest.raises(StoreError, match="channel scales"):
        add_layers(files, [other])
