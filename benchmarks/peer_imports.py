"""Import the peers' training models without installing what they need for other work.

    pip install --no-deps --target PEERS speculators==0.9.0 specforge==0.2.0 dflash==0.1.0

puts the peers into a folder of their own; this module adds that folder to the import path and lets
packages that only their data preparation and servers use be empty.
"""

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

PEERS_VARIABLE = "DFLASH_PEERS"
# What the two import beside their models: data preparation, servers, download.
UNUSED_PACKAGES = ("datasets", "hs_connectors", "loguru", "openai")


def peers_dir() -> Path:
    """Folder with the peers: the one in DFLASH_PEERS, else `peers` of the virtual environment."""
    return Path(os.environ.get(PEERS_VARIABLE) or Path(sys.prefix) / "peers")


def import_peer(name: str) -> ModuleType:
    """Import a peer's module.

    Raises:
        ModuleNotFoundError: the peer is not in the folder, or needs a package that is not here.
    """
    if not (peers_dir() / name.partition(".")[0]).is_dir():
        raise ModuleNotFoundError(
            f"no {name.partition('.')[0]} in {peers_dir()}; pip install --no-deps --target it there"
        )
    if str(peers_dir()) not in sys.path:
        sys.path.append(str(peers_dir()))
        sys.meta_path.append(_EmptyPackages(UNUSED_PACKAGES))
    return importlib.import_module(name)


class _EmptyPackages(MetaPathFinder, Loader):
    """Finds the named packages when nothing else does, with anything at all inside."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Answer for the named packages and their modules only."""
        if fullname.partition(".")[0] in self.names:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make a module whose every attribute is a mock."""
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = _anything  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing."""


def _anything(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)
