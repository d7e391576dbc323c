"""Tiny stores that the storage tests share."""

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings

from storage.reader import Snapshot, open_store

# How long an example takes says nothing on a machine with other work.
settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")

FILL_STORE = Path(__file__).with_name("fill_store.py")


@pytest.fixture(scope="session")
def making() -> SimpleNamespace:
    """The functions of fill_store.py: make_identity, make_sequence, make_store, fill, ..."""
    return SimpleNamespace(**runpy.run_path(str(FILL_STORE)), path=FILL_STORE)


@pytest.fixture(autouse=True)
def _no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    # Real flushes would be most of the suite's time; test_power_loss shows that they are asked
    # for, and the processes that test_crash kills do them.
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture
def store_dir(tmp_path: Path) -> Path:
    return tmp_path / "a störe with spaces"


@pytest.fixture
def filled_dir(store_dir: Path, making: SimpleNamespace) -> Path:
    making.fill(making.make_store(store_dir))
    return store_dir


@pytest.fixture
def snapshot(filled_dir: Path) -> Snapshot:
    return open_store(filled_dir).snapshot()


@pytest.fixture
def flip_bit() -> Callable[..., Any]:
    """Flip one bit of a file in place."""

    def flip(path: Path, bit: int) -> None:
        data = bytearray(path.read_bytes())
        data[bit // 8] ^= 1 << (bit % 8)
        path.chmod(0o644)
        path.write_bytes(data)

    return flip
