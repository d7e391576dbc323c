"""Other projects' caches become the store that an extraction of our own would have made."""

import gzip
import io
import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from dflash_offline.cli import main
from dflash_offline.config import RunConfig, extract_run
from dflash_offline.foreign_caches import load_tensors, open_cache, tell_layout
from dflash_offline.import_cache import ImportSettings, import_cache, read_masks
from stage1_extract.target import load_target
from storage.reader import open_store

Writer = Callable[[Path, str, dict[str, torch.Tensor]], None]


@pytest.fixture(scope="session")
def own(tiny_run: RunConfig) -> dict[str, dict[str, torch.Tensor]]:
    """Tokens, mask and states of some sequences of our own store, final states on both sides."""
    store = open_store(extract_run(tiny_run).store_dir)
    snapshot, target = store.snapshot(), load_target(tiny_run.target)
    found = {}
    for index in range(6):
        name = snapshot.sequence_id(index)
        token_ids, loss_mask = snapshot.read_tokens(index)
        states = target.plain_hidden_states(token_ids, layers=["0", "1", "2", "lm_head_input"])
        found[name] = {
            "token_ids": torch.from_numpy(token_ids.copy()).long(),
            "loss_mask": torch.from_numpy(loss_mask.copy()).long(),
            "states": torch.stack([states["0"], states["1"]], dim=1).to(torch.bfloat16),
            "before_norm": states["2"].clone(),
            "normed": states["lm_head_input"].clone(),
        }
    return found


def write_specforge(folder: Path, name: str, one: dict[str, torch.Tensor]) -> None:
    raw = {
        "input_ids": one["token_ids"],
        "loss_mask": one["loss_mask"],
        "hidden_states": one["states"].flatten(1)[None],
        "target_last_hidden_states": one["normed"][None],
    }
    (folder / "rows_0-2000").mkdir(exist_ok=True)
    buffer = io.BytesIO()
    torch.save(raw, buffer)
    if name.endswith("1"):
        (folder / f"rows_0-2000/{name}.ckpt.gz").write_bytes(gzip.compress(buffer.getvalue()))
    else:
        (folder / f"rows_0-2000/{name}.ckpt").write_bytes(buffer.getvalue())


def write_eagle(folder: Path, name: str, one: dict[str, torch.Tensor]) -> None:
    raw = {
        "input_ids": one["token_ids"],
        "loss_mask": one["loss_mask"],
        "aux_hidden_state": one["states"].flatten(1)[None],
        "hidden_state": one["normed"][None],
    }
    torch.save(raw, folder / f"{name}.ckpt")


def write_speculators(folder: Path, name: str, one: dict[str, torch.Tensor]) -> None:
    states = torch.cat([one["states"], one["before_norm"][:, None].to(torch.bfloat16)], dim=1)
    save_file(
        {"token_ids": one["token_ids"], "hidden_states": states.contiguous()},
        folder / f"hs_{name[1:]}.safetensors",
    )


def write_model_optimizer(folder: Path, name: str, one: dict[str, torch.Tensor]) -> None:
    raw = {
        "input_ids": one["token_ids"],
        "hidden_states": one["normed"],
        "aux_hidden_states": one["states"].flatten(1),
        "conversation_id": name,
    }
    torch.save(raw, folder / f"{name}.pt")


def write_deepspec(folder: Path, sequences: dict[str, dict[str, torch.Tensor]]) -> None:
    data, index = b"", b""
    for name, one in sequences.items():
        parts = [
            one["token_ids"].int().numpy().tobytes(),
            bytes([1] * len(one["token_ids"])),
            one["loss_mask"].to(torch.uint8).numpy().tobytes(),
            one["states"].contiguous().view(torch.uint16).numpy().tobytes(),
            one["normed"].to(torch.bfloat16).contiguous().view(torch.uint16).numpy().tobytes(),
        ]
        offsets = len(data) + np.cumsum([0, *map(len, parts[:-1])])
        index += struct.pack("<QIIQQQQQ", int(name[1:]), 0, len(one["token_ids"]), *offsets)
        data += b"".join(parts)
    (folder / "shard-00000.bin").write_bytes(data)
    (folder / "samples.idx").write_bytes(index)
    manifest = {
        "version": 2,
        "num_samples": len(sequences),
        "target_layer_ids": [0, 1],
        "hidden_dtype": "bfloat16",
        "hidden_size": 32,
        "shards": [{"shard_id": 0, "file_name": "shard-00000.bin"}],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))


def run_for(tiny_run: RunConfig, tmp_path: Path, **store: Any) -> Any:
    settings = tiny_run.store.model_copy(update={"dir": str(tmp_path / "store"), **store})
    return extract_run(tiny_run.model_copy(update={"store": settings}))


def masks_file(own: dict[str, Any], tmp_path: Path, id_of: Callable[[str], str]) -> Path:
    lines = [
        json.dumps({"id": id_of(name), "loss_mask": one["loss_mask"].tolist()})
        for name, one in own.items()
    ]
    (tmp_path / "masks.jsonl").write_text("\n".join(lines))
    return tmp_path / "masks.jsonl"


def same(value: str) -> str:
    return value


CASES: dict[str, tuple[Writer | None, Callable[[str], str], bool]] = {
    "specforge": (write_specforge, lambda name: f"rows_0-2000/{name}", True),
    "eagle": (write_eagle, same, True),
    "speculators": (write_speculators, lambda name: f"hs_{name[1:]}", False),
    "model-optimizer": (write_model_optimizer, same, False),
    "deepspec": (None, lambda name: name[1:], True),
}


@pytest.mark.parametrize("case", CASES)
def test_imported_states_are_the_extracted_ones(
    case: str, own: dict[str, Any], tiny_run: RunConfig, tmp_path: Path
) -> None:
    write, id_of, has_masks = CASES[case]
    source = tmp_path / "cache"
    source.mkdir()
    if write is None:
        write_deepspec(source, own)
    else:
        for name, one in own.items():
            write(source, name, one)
    settings = ImportSettings(
        source=source,
        layer_ids=None if case == "deepspec" else (0, 1),
        loss_masks=None if has_masks else masks_file(own, tmp_path, id_of),
    )
    run = run_for(tiny_run, tmp_path, lm_head_input=True)
    report = import_cache(run, settings)
    assert (report.num_sequences, report.skipped) == (6, {})
    assert report.differences.keys() == {"0", "1", "lm_head_input"}
    assert max(report.differences.values()) < 0.01
    assert any("greedy" in fact for fact in report.taken_from_run)
    store = open_store(run.store_dir)
    snapshot = store.snapshot()
    assert store.identity == open_store(extract_run(tiny_run).store_dir).identity
    assert store.is_complete()
    for name, one in own.items():
        token_ids, loss_mask = snapshot.read_tokens(snapshot.index_of(id_of(name)))
        assert token_ids.tolist() == one["token_ids"].tolist()
        assert loss_mask.tolist() == one["loss_mask"].bool().tolist()
        states = store.sequence(id_of(name)).hidden_states(layers=["0", "1", "lm_head_input"])
        np.testing.assert_array_equal(states[:, :2], one["states"].float().numpy())
        np.testing.assert_allclose(states[:, 2], one["normed"].numpy(), rtol=0.02, atol=0.02)
    again = import_cache(run, settings)
    assert again.num_sequences == 0  # nothing is computed or written twice


def specforge_cache(own: dict[str, Any], tmp_path: Path) -> Path:
    (tmp_path / "cache").mkdir()
    for name, one in own.items():
        write_eagle(tmp_path / "cache", name, one)
    return tmp_path / "cache"


def test_shifted_layers_are_found_and_named(
    own: dict[str, Any], tiny_run: RunConfig, tmp_path: Path
) -> None:
    source = specforge_cache(own, tmp_path)
    run = run_for(tiny_run, tmp_path, target_layer_ids=(1, 2))
    with pytest.raises(ValueError, match="they are those of layer 0: correct --layers"):
        import_cache(run, ImportSettings(source=source, layer_ids=(1, 2)))
    assert not (tmp_path / "store").exists()
    unchecked = ImportSettings(source=source, layer_ids=(1, 2), is_checked=False)
    assert import_cache(run, unchecked).differences == {}


def test_a_final_state_on_the_wrong_side_of_the_norm_is_found(
    own: dict[str, Any], tiny_run: RunConfig, tmp_path: Path
) -> None:
    (tmp_path / "cache").mkdir()
    for name, one in own.items():
        write_speculators(tmp_path / "cache", name, one)
    settings = ImportSettings(source=tmp_path / "cache", layer_ids=(0, 1), final_is_normed=True)
    with pytest.raises(ValueError, match="those of 2: correct --layers or --final-state"):
        import_cache(run_for(tiny_run, tmp_path, lm_head_input=True), settings)


def test_broken_sequences_are_skipped_with_their_reason(
    own: dict[str, Any], tiny_run: RunConfig, tmp_path: Path
) -> None:
    (tmp_path / "cache").mkdir()
    names = sorted(own)
    for name, one in own.items():
        changed = dict(one)
        if name == names[1]:
            changed["states"] = one["states"].clone()
            changed["states"][3, 1, 5] = torch.nan
        if name == names[2]:
            changed["loss_mask"] = one["loss_mask"][:-1]
        if name == names[3]:
            changed["token_ids"] = one["token_ids"] + 100_000
        write_eagle(tmp_path / "cache", name, changed)
    settings = ImportSettings(source=tmp_path / "cache", layer_ids=(0, 1), is_checked=False)
    run = run_for(tiny_run, tmp_path)
    report = import_cache(run, settings)
    assert report.num_sequences == 3
    assert sorted(report.skipped) == [
        "hidden state",
        "numbers of tokens, states and mask differ",
        "token id outside the target's vocabulary",
    ]
    assert open_store(run.store_dir).snapshot().skipped().keys() == set(names[1:4])


def test_what_is_missing_is_asked_for(
    own: dict[str, Any], tiny_run: RunConfig, tmp_path: Path
) -> None:
    (tmp_path / "cache").mkdir()
    for name, one in own.items():
        write_speculators(tmp_path / "cache", name, one)
    run = run_for(tiny_run, tmp_path)
    source = tmp_path / "cache"
    with pytest.raises(ValueError, match="name its 2 decoder layers, counted from 0, with --layer"):
        import_cache(run, ImportSettings(source=source))
    with pytest.raises(ValueError, match="the cache holds 2 layers, got 1"):
        import_cache(run, ImportSettings(source=source, layer_ids=(0,)))
    with pytest.raises(ValueError, match=r"has layers \[0, 5\], not 1"):
        import_cache(run, ImportSettings(source=source, layer_ids=(0, 5)))
    with pytest.raises(ValueError, match="--loss-masks FILE"):
        import_cache(run, ImportSettings(source=source, layer_ids=(0, 1)))
    everything = ImportSettings(source=source, layer_ids=(0, 1), supervise_all=True)
    report = import_cache(run, everything)
    assert any("every token is learnt" in fact for fact in report.taken_from_run)


def test_masks_are_read_by_lines_whatever_an_id_holds(tmp_path: Path) -> None:
    path = tmp_path / "masks.jsonl"
    entries = [{"id": "one\u2028two", "loss_mask": [False, True]}, {"id": 3, "loss_mask": [True]}]
    text = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
    path.write_text(text, encoding="utf-8")
    found = read_masks(path)
    assert {name: mask.tolist() for name, mask in found.items()} == {
        "one\u2028two": [False, True],
        "3": [True],
    }
    for bad in ('{"id": 1}', "[]", "{", '{"id": 1, "loss_mask": [[1], 2]}'):
        path.write_text(f"{text}{bad}\n", encoding="utf-8")
        with pytest.raises(ValueError, match=r"masks.jsonl:3: expected id and loss_mask"):
            read_masks(path)


def test_speculators_masks_come_from_the_data_set_beside_them(
    own: dict[str, Any], tmp_path: Path
) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow reads the data set's Arrow files")
    (tmp_path / "hidden_states").mkdir()
    ordered = [own[name] for name in sorted(own)]
    for number, one in enumerate(ordered):
        write_speculators(tmp_path / "hidden_states", f"c{number}", one)
    table = pyarrow.table(
        {
            key: [one[name].tolist() for one in ordered]
            for key, name in {"input_ids": "token_ids", "loss_mask": "loss_mask"}.items()
        }
    )
    path = str(tmp_path / "data-00000-of-00001.arrow")
    with pyarrow.OSFile(path, "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    cache = open_cache(tmp_path / "hidden_states", layout=None, hidden_size=32, num_target_layers=3)
    for number, one in enumerate(ordered):
        mask = cache.read(f"hs_{number}").loss_mask
        assert mask is not None
        assert mask.tolist() == one["loss_mask"].bool().tolist()


def test_nothing_in_a_torch_file_is_executed(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "executed",))

    for path, data in {
        "a.ckpt": pickle.dumps({"input_ids": Harmful()}),
        "b.ckpt.gz": gzip.compress(pickle.dumps(Harmful())),
        "c.pt": b"cut off",
    }.items():
        (tmp_path / path).write_bytes(data)
        with pytest.raises(ValueError, match="cannot be read"):
            load_tensors(tmp_path / path)
    assert not (tmp_path / "executed").exists()


def test_a_folder_without_a_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no cache that is known"):
        tell_layout(tmp_path)
    with pytest.raises(ValueError, match="is no folder"):
        open_cache(tmp_path / "no", layout=None, hidden_size=8, num_target_layers=3)


def test_the_commands_say_what_the_cache_lacked(
    own: dict[str, Any], tiny_run: RunConfig, tmp_path: Path
) -> None:
    source = specforge_cache(own, tmp_path)
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        f"""
run_dir = "{tmp_path / "run"}"
[target]
model = "{tiny_run.target.model}"
dtype = "float32"
[data]
conversations = ["unused.jsonl"]
[store]
encoding = "int8"
target_layer_ids = [0, 1]
[[drafter]]
name = "small"
"""
    )
    command = ["store", "import", str(run_file), str(source), "--layers", "0,1"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert "6 sequences" in result.output
    assert "not recorded by the cache, taken from the run" in result.output
    exported = CliRunner().invoke(
        main, ["store", "export", str(tmp_path / "run/store"), str(tmp_path / "out")]
    )
    assert "6 files written" in exported.output
    (tmp_path / "broken").mkdir()
    nan = {name: {**one, "states": one["states"] * float("nan")} for name, one in own.items()}
    command[3] = str(specforge_cache(nan, tmp_path / "broken"))
    settings = (f"run_dir={tmp_path / 'failed'}", "store.encoding=bf16")
    options = [part for each in settings for part in ("--set", each)]
    failed = CliRunner().invoke(main, [*command, "--no-check", *options])
    assert failed.exit_code == 1, failed.output
    assert "100.0% of 6 sequences failed" in failed.output
    refused = CliRunner().invoke(main, [*command[:-1], "x"])
    assert refused.exit_code == 2
    assert refused.output == "error: --layers x: expected numbers such as 1,9,17\n"
