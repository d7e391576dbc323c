"""Exported hidden states."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from dflash_offline.config import RunConfig, extract_run
from dflash_offline.export_states import export_store
from storage.reader import open_store


def test_an_export_is_read_by_safetensors_alone(tiny_run: RunConfig, tmp_path: Path) -> None:
    place = str(extract_run(tiny_run).store_dir)
    store = open_store(place)
    snapshot = store.snapshot()
    assert export_store(place, tmp_path / "out", layers=["1"]) == snapshot.num_sequences
    assert export_store(place, tmp_path / "out", layers=["1"]) == 0
    with pytest.raises(ValueError, match="other layers or another store"):
        export_store(place, tmp_path / "out", layers=["0", "1"])
    name = snapshot.sequence_id(3)
    tensors = load_file(tmp_path / "out" / f"{name}.safetensors")
    expected = store.sequence(name).hidden_states(layers=["1"])
    np.testing.assert_array_equal(tensors["hidden_states"].float().numpy(), expected)
    token_ids, loss_mask = snapshot.read_tokens(3)
    assert tensors["token_ids"].tolist() == token_ids.tolist()
    assert tensors["loss_mask"].tolist() == loss_mask.astype(int).tolist()
