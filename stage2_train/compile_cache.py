"""Each drafter's own compile cache: filled from a primed one, kept in the run folder.

Compilers write to a folder on the machine's own disk (shared file systems crash Triton's cache),
one for each process. What a drafter compiled, with the choices that autotuning made by the clock,
is kept beside its checkpoints: wherever it goes on, it goes on with the same kernels. A drafter
without such an archive starts from the one that a drafter of the same shape was primed with.
"""

import getpass
import hashlib
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage2_train.config import DrafterRun
from storage.files import replace_whole

ARCHIVE = "compile-cache.tar"
# Where the folders lie; None is the system's folder for temporary files.
DIR_VARIABLE = "DFLASH_OFFLINE_COMPILE_DIR"
INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
# Settings of training that no compiled kernel depends on.
TIMELESS = (
    "seed",
    "epochs",
    "max_steps",
    "data_fraction",
    "window_tokens",
    "read_ahead_bytes",
    "read_threads",
    "read_processes",
    "start_after_shards",
    "wait_for_store_s",
    "on_damage",
    "checkpoint_steps",
    "keep_checkpoints",
    "validation_steps",
    "validation_sequences",
    "log_steps",
    "optimizer",
    "torch_threads",
    "batches_per_step",
)


@dataclass(frozen=True, kw_only=True)
class CompileCache:
    """The folder that this process compiles into, and its archive."""

    folder: Path
    archive: Path

    def pin(self, *, say: Callable[[str], None]) -> None:
        """Keeps the folder as it is now: later runs of this drafter start from it.

        A cache that cannot be kept costs a later run its compilation, not this one its life.
        """
        try:
            paths = cached_files(self.folder)
            if paths and len(paths) > archived_files(self.archive):
                replace_whole(self.archive, packed(self.folder))
        except (OSError, tarfile.TarError) as error:
            say(f"the compile cache was not kept in {self.archive}: {error}")


def use_compile_cache(run: DrafterRun, *, rank: int = 0) -> CompileCache:
    """Makes this process compile into its own folder, filled from the best archive there is.

    Must run before anything is compiled. Where the environment names the folders already (a batch
    job does), they are used, and filled likewise.

    Args:
        run: the drafter.
        rank: this process among those of the drafter; each has its own folder.
    """
    archives = (run.drafter_dir / ARCHIVE, primed_archive(run))
    folder = own_folder(run, rank=rank)
    if not folder.exists():
        # Renamed when it is whole: a process killed in between leaves nothing half full.
        folder.parent.mkdir(parents=True, exist_ok=True)
        attempt = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        for archive in archives:
            if archive.is_file():
                unpack(archive, attempt)
                break
        attempt.rename(folder)
    os.environ[INDUCTOR], os.environ[TRITON] = str(folder / "inductor"), str(folder / "triton")
    return CompileCache(folder=folder, archive=archives[0])


def own_folder(run: DrafterRun, *, rank: int) -> Path:
    """Gives this process's folder: the same each time the drafter runs on this machine."""
    base = os.environ.get(DIR_VARIABLE) or os.environ.get(INDUCTOR)
    if base is None:
        base = f"{tempfile.gettempdir()}/dflash-offline-{getpass.getuser()}"
    # Ours take the place of the variables that it may come from.
    os.environ[DIR_VARIABLE] = base
    place = hashlib.sha256(str(run.drafter_dir).encode()).hexdigest()[:12]
    return Path(base) / f"{run.drafter.name}-{place}" / f"rank-{rank}"


def primed_archive(run: DrafterRun) -> Path:
    """Gives the archive that drafters of this shape share, in the run folder."""
    return run.drafter_dir.parent / f".primed-{shape_key(run)}.tar"


def shape_key(run: DrafterRun) -> str:
    """Names what compiled kernels depend on: equal for drafters that may share them."""
    shape: dict[str, Any] = {
        "drafter": run.drafter.model_dump(mode="json", exclude={"name", "init_from", "train"}),
        "train": run.train.model_dump(mode="json", exclude=set(TIMELESS)),
        "store": str(run.store_dir),
    }
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16]


def cached_files(folder: Path) -> list[Path]:
    """Gives the files of a cache, without locks, which belong to processes."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and "locks" not in p.parts)


def archived_files(archive_path: Path) -> int:
    """Gives how many files an archive holds; none where it is not there."""
    if not archive_path.exists():
        return 0
    with tarfile.open(archive_path) as archive:
        return len(archive.getnames())


def packed(folder: Path) -> bytes:
    """Gives a cache as one archive; compilers may go on writing to it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in cached_files(folder):
            # A file that is written under another name first may be gone since it was listed.
            with suppress(FileNotFoundError):
                archive.add(path, arcname=str(path.relative_to(folder)), recursive=False)
    return buffer.getvalue()


def unpack(archive_path: Path, folder: Path) -> None:
    """Fills a folder from an archive that `packed` made."""
    with tarfile.open(archive_path) as archive:
        archive.extractall(folder, filter="data")
