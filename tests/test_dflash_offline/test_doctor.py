"""The doctor says what is wrong, and only that, and its exit code agrees."""

import importlib.metadata
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from dflash_offline import doctor
from dflash_offline.cli import main


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["doctor", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.output


def test_a_good_machine_and_place_have_no_problem(tmp_path: Path) -> None:
    exit_code, text = run(str(tmp_path))
    assert exit_code == 0, text
    assert "nothing wrong" in text
    for word in ("python 3", "torch 2", "GB free", "MB/s", "exclusive creation"):
        assert word in text
    assert list(tmp_path.iterdir()) == []


def test_old_and_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.4.1+cu124", "zarr": "none"}
    really = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name) or really(name))
    exit_code, text = run()
    assert exit_code == 2
    assert re.search(r"BAD +torch 2.4.1\+cu124 is too old: pip install 'torch>=", text)
    assert re.search(r"BAD +zarr is not installed: pip install 'zarr>=", text)
    assert text.count("BAD") == 2


def test_a_package_that_is_only_on_the_path_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.requires", not_found)
    exit_code, text = run()
    assert exit_code == 0
    assert "versions were not compared" in text


def test_a_driver_that_torch_cannot_use_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_driver_version", lambda: "535.104")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    exit_code, text = run()
    assert exit_code == 2
    assert re.search("BAD +driver 535.104 shows GPUs, but torch", text)


def test_compile_caches_on_a_shared_file_system_are_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(doctor, "_file_system", lambda folder: "nfs4")
    exit_code, text = run()
    assert exit_code == 2
    assert re.search(r"BAD +compile caches would lie on nfs4", text)


def test_the_file_system_is_that_of_the_closest_mount() -> None:
    assert doctor._file_system(Path("/proc/self/not/there")) == "proc"
    assert doctor._file_system(Path("/")) != "proc"


def test_a_compile_that_fails_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "COMPILE", "raise RuntimeError('no compiler')")
    found = doctor._try_to_compile()
    assert found.verdict == "BAD"
    assert "RuntimeError: no compiler" in found.text
    monkeypatch.setattr(doctor, "COMPILE", "pass")
    assert doctor._try_to_compile().verdict == "ok"


def test_a_place_that_cannot_be_made_is_bad(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    exit_code, text = run(str(tmp_path / "file" / "store"))
    assert exit_code == 2
    assert "BAD" in text


def test_a_place_that_is_not_there_yet_is_not_left_behind(tmp_path: Path) -> None:
    place = tmp_path / "misspelt" / "store"
    _, text = run(str(place))
    assert "does not exist yet" in text
    assert not (tmp_path / "misspelt").exists()


def test_a_run_file_stands_for_its_store(tmp_path: Path) -> None:
    tables = '[target]\nmodel = "m"\n[data]\nconversations = ["c"]\n[[drafter]]\nname = "d"\n'
    (tmp_path / "run.toml").write_text(f'{tables}[store]\ndir = "{tmp_path}/there"\n')
    exit_code, text = run(str(tmp_path / "run.toml"))
    assert exit_code == 0, text
    assert f"{tmp_path}/there: exclusive creation" in text


def test_the_health_of_a_store_is_told(tmp_path: Path) -> None:
    path = Path(__file__).parents[1] / "test_storage" / "fill_store.py"
    making = SimpleNamespace(**runpy.run_path(str(path)))
    making.fill(making.make_store(tmp_path / "store"))
    exit_code, text = run(str(tmp_path / "store"))
    assert exit_code == 0, text
    assert re.search(r"ok +\S+store: 3 shards, whole by records and sizes", text)
    data = next(p for p in (tmp_path / "store" / "shards").rglob("0") if p.is_file())
    data.write_bytes(data.read_bytes()[:-1])
    exit_code, text = run(str(tmp_path / "store"))
    assert exit_code == 2
    assert re.search(r"BAD +shard 00000-0000\d[ ,:]", text)
    assert "`store repair` gives damaged shards up" in text


def test_two_hosts_find_each_others_marks(tmp_path: Path) -> None:
    exit_code, text = run(str(tmp_path), "--leave")
    assert exit_code == 0
    mark = re.search(r"doctor \S+ --find (\S+)", text)
    assert mark is not None
    exit_code, text = run(str(tmp_path), "--find", mark[1])
    assert exit_code == 0
    assert "was seen here" in text
    exit_code, text = run(str(tmp_path), "--find", mark[1])
    assert exit_code == 2
    assert "must not write one store" in text


@pytest.mark.parametrize("arguments", [["--leave"], ["--find", "x"], ["somewhere", "--find", "x"]])
def test_a_mark_needs_a_place_and_a_name(arguments: list[str]) -> None:
    exit_code, text = run(*arguments)
    assert exit_code == 2
    assert text.startswith("error: ") or "error: " in text


@pytest.mark.slow
def test_an_object_store_that_ignores_conditions_is_refused(s3_server: Any) -> None:
    place = s3_server.make_bucket()
    assert run(place)[0] == 0
    s3_server.ignores_conditions = True
    exit_code, text = run(place)
    assert exit_code == 2
    assert re.search("BAD +s3://.*8 of 8 writers created the same file", text)


@pytest.mark.slow
def test_a_bucket_that_is_not_there_is_one_line(s3_server: Any) -> None:
    exit_code, text = run("s3://nowhere/store")
    assert exit_code == 2
    assert "no such bucket" in text
