"""A drafter compiles into its own folder, filled from its own archive or from its shape's."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import stage2_train
from stage2_train.compile_cache import (
    DIR_VARIABLE,
    INDUCTOR,
    TRITON,
    own_folder,
    packed,
    primed_archive,
    shape_key,
    use_compile_cache,
)
from stage2_train.prime import prime
from storage.files import replace_whole


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch, tmp_path):
    """Leave the variables of this process as they were."""
    for name in (INDUCTOR, TRITON):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv(DIR_VARIABLE, str(tmp_path / "local"))


def compile_something(text: str) -> None:
    """What a compiler leaves in the folders that the environment names."""
    for name in (INDUCTOR, TRITON):
        folder = Path(os.environ[name]) / "ab"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernel.best_config").write_text(text)
        (folder / "locks").mkdir(exist_ok=True)
        (folder / "locks" / "held").write_text("by a process")


def choice() -> str:
    return (Path(os.environ[INDUCTOR]) / "ab" / "kernel.best_config").read_text()


def test_a_drafter_goes_on_with_the_choices_it_made(make_run, monkeypatch, tmp_path):
    run = make_run()
    cache = use_compile_cache(run)
    compile_something("first choice")
    cache.pin(say=print)
    # On another machine, or after its disk was emptied.
    monkeypatch.setenv(DIR_VARIABLE, str(tmp_path / "elsewhere"))
    again = use_compile_cache(run)
    assert again.folder != cache.folder
    assert choice() == "first choice"
    assert not list(again.folder.rglob("locks"))


def test_drafters_of_one_shape_start_from_one_primed_cache_each_in_its_own(make_run):
    first, second = make_run(name="first"), make_run(name="second", train={"seed": 7})
    cache = use_compile_cache(first)
    compile_something("primed")
    replace_whole(primed_archive(first), packed(cache.folder))
    own = use_compile_cache(second)
    assert own.folder != cache.folder
    assert choice() == "primed"
    compile_something("changed by the second")
    use_compile_cache(first)
    assert choice() == "primed"


def test_a_drafters_own_archive_goes_before_its_shapes(make_run, monkeypatch, tmp_path):
    run = make_run()
    cache = use_compile_cache(run)
    compile_something("own")
    cache.pin(say=print)
    compile_something("primed later")
    primed_archive(run).write_bytes(packed(cache.folder))
    shutil.rmtree(tmp_path / "local")
    use_compile_cache(run)
    assert choice() == "own"


def test_what_is_pinned_changes_only_when_more_was_compiled(make_run):
    cache = use_compile_cache(make_run())
    cache.pin(say=print)
    assert not cache.archive.exists()
    compile_something("first choice")
    cache.pin(say=print)
    before = cache.archive.read_bytes()
    compile_something("a later choice")
    cache.pin(say=print)
    assert cache.archive.read_bytes() == before
    (cache.folder / "inductor" / "validation").write_text("a new kernel")
    cache.pin(say=print)
    assert cache.archive.read_bytes() != before


def test_a_cache_that_cannot_be_kept_is_said_and_stops_nothing(make_run):
    cache = use_compile_cache(make_run())
    compile_something("a choice")
    cache.archive.mkdir(parents=True)
    said = []
    cache.pin(say=said.append)
    assert len(said) == 1
    assert str(cache.archive) in said[0]


def test_a_folder_half_filled_by_a_killed_process_is_in_nobodys_way(make_run):
    run = make_run()
    folder = own_folder(run, rank=0)
    (folder.parent / f".{folder.name}.{os.getpid()}.partial").mkdir(parents=True)
    assert use_compile_cache(run).folder.is_dir()


def test_ranks_have_folders_of_their_own(make_run):
    run = make_run()
    assert use_compile_cache(run).folder != use_compile_cache(run, rank=1).folder


def test_folders_that_a_batch_job_names_are_used(make_run, monkeypatch, tmp_path):
    monkeypatch.delenv(DIR_VARIABLE)
    monkeypatch.setenv(INDUCTOR, str(tmp_path / "node"))
    assert use_compile_cache(make_run()).folder.is_relative_to(tmp_path / "node")


def test_only_what_kernels_depend_on_makes_a_shape(make_run):
    key = shape_key(make_run())
    assert (
        shape_key(make_run(name="b", train={"seed": 3, "optimizer": {"learning_rate": 0.1}})) == key
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"train": {"batch_tokens": 64}},
        {"train": {"fp8": True}},
        {"train": {"loss": {"kind": "kl"}}},
        {"drafter": {"num_layers": 3}},
    ],
)
def test_another_shape_has_another_cache(make_run, changes):
    plain = {"dtype": "bfloat16"}
    changed = make_run(**(changes | {"train": plain | changes.get("train", {})}))
    assert shape_key(changed) != shape_key(make_run(train=plain))


def test_priming_leaves_the_archive_of_the_shape_and_nothing_else(make_run):
    run = make_run(name="first")
    assert prime(run)
    assert os.environ[INDUCTOR]
    assert [path.name for path in run.drafter_dir.parent.iterdir()] == [primed_archive(run).name]


COMPILED = """
import sys
from pathlib import Path
import torch
from torch._dynamo.utils import counters
from stage2_train.compile_cache import packed, primed_archive, use_compile_cache
from stage2_train.config import DrafterConfig, DrafterRun, TrainConfig

def run_of(name):
    drafter = DrafterConfig(name=name)
    folder = Path(sys.argv[2])
    return DrafterRun(
        drafter=drafter, train=TrainConfig(), store_dir=folder, drafter_dir=folder / name
    )

name = sys.argv[3]
run = run_of(name)
run.drafter_dir.mkdir()
cache = use_compile_cache(run)
double = torch.compile(lambda x: (2 * x).sin(), fullgraph=True)
torch.testing.assert_close(double(torch.ones(64)), torch.full((64,), 2.0).sin())
hits, misses = (counters["inductor"][f"fxgraph_cache_{kind}"] for kind in ("hit", "miss"))
assert (hits, misses) == ((0, 1) if name == "first" else (1, 0)), (hits, misses)
if name == "first":
    primed_archive(run).write_bytes(packed(cache.folder))
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
def test_a_copied_cache_gives_a_real_compiler_its_hits(tmp_path):
    for name in ("first", "second"):
        done = subprocess.run(
            [sys.executable, "-c", COMPILED, "cpu", str(tmp_path), name],
            env=os.environ | {"PYTHONPATH": str(Path(stage2_train.__file__).parents[1])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
