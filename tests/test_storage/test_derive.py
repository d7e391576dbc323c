from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from storage.derive import derive_store
from storage.encodings import encoding_of_layer
from storage.errors import StoreError
from storage.reader import open_store
from storage.verify import verify_store


@pytest.mark.parametrize("encoding", ["int8", "int4", "bf16"])
def test_a_derived_store_holds_the_same_sequences(
    filled_dir: Path, tmp_path: Path, encoding: str
) -> None:
    target_dir = tmp_path / encoding
    seen: list[tuple[int, int]] = []
    derive_store(filled_dir, target_dir, encoding=encoding, progress=lambda *c: seen.append(c))
    assert seen[-1][0] == seen[-1][1]
    assert verify_store(target_dir, full=True).ok
    source, target = open_store(filled_dir), open_store(target_dir)
    assert target.identity == source.identity
    assert list(target.layers) == list(source.layers)
    for name, record in target.layers.items():
        assert record.encoding == encoding_of_layer(name, encoding)
    assert target.head_bytes("tokenizer/tokenizer.json") == b"{}"
    old, new = source.snapshot(), target.snapshot()
    for index in range(old.num_sequences):
        name = old.sequence_id(index)
        one, two = old.read_tokens(index), new.read_tokens(new.index_of(name))
        np.testing.assert_array_equal(one[0], two[0])
        np.testing.assert_array_equal(one[1], two[1])
        before = source.sequence(name).hidden_states(layers=["1", "9"])
        after = target.sequence(name).hidden_states(layers=["1", "9"])
        error = np.linalg.norm(after - before) / np.linalg.norm(before)
        assert error < {"int8": 0.02, "int4": 0.2, "bf16": 0.005}[encoding]


def test_deriving_goes_on_where_it_stopped(
    filled_dir: Path, tmp_path: Path, making: SimpleNamespace
) -> None:
    whole = derive_store(filled_dir, tmp_path / "whole", encoding="int8")
    target_dir = tmp_path / "stopped"

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        derive_store(filled_dir, target_dir, encoding="int8", progress=stop)
    first = {path: path.stat().st_mtime_ns for path in target_dir.glob("commits/*/*")}
    again = derive_store(filled_dir, target_dir, encoding="int8")
    assert len(first) == 2
    assert all(path.stat().st_mtime_ns == time for path, time in first.items())
    assert again.units() == whole.units()
    digest = open_store(tmp_path / "whole").content_digest()
    assert open_store(target_dir).content_digest() == digest


def test_skipped_sequences_stay_skipped(
    store_dir: Path, tmp_path: Path, making: SimpleNamespace
) -> None:
    store = making.make_store(store_dir, num_units=1)
    (unit,) = store.units()
    with store.start_shard(unit) as shard:
        first, *rest = store.sequences_of(unit)
        shard.skip(sequence_id=first, reason="NaN")
        for name in rest:
            shard.append(**making.make_sequence(name))
        assert shard.seal()
    derive_store(store_dir, tmp_path / "derived", encoding="bf16")
    assert open_store(tmp_path / "derived").snapshot().skipped() == {first: "NaN"}


def test_a_target_with_another_encoding_is_refused(filled_dir: Path, tmp_path: Path) -> None:
    derive_store(filled_dir, tmp_path / "derived", encoding="bf16")
    with pytest.raises(StoreError, match="stored as bf16"):
        derive_store(filled_dir, tmp_path / "derived", encoding="fp8")
