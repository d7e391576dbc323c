"""Try out a machine and a place for a store, and say what is wrong before work is lost to it."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash_offline.config import load_run_file, store_dir_of
from storage.errors import StoreError, StoreNotFoundError
from storage.files import LocalFiles
from storage.layout import TEMPORARY
from storage.places import files_at
from storage.probe import check_mark, leave_mark, probe_place
from storage.reader import open_store
from storage.verify import verify_store

EXIT_FINE, EXIT_PROBLEM = 0, 2
PACKAGES = ("torch", "triton", "transformers", "numpy", "zarr", "obstore", "safetensors")
LOW_SPACE_BYTES = 10_000_000_000
RATE_BYTES = 64 * 2**20
"""Bytes written to measure a place's rate."""
MOST_CHECKED_SHARDS = 4096
"""More than these take minutes to look at."""
SHOWN_PROBLEMS = 5
COMPILE_TIMEOUT_S = 300
SHARED_FILE_SYSTEMS = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "fuse.weka")

COMPILE = """
import torch
double = torch.compile(lambda x: torch.nn.functional.silu(x @ x) * 2, fullgraph=True)
x = torch.randn(64, 64, device="cuda", requires_grad=True)
double(x).sum().backward()
torch.cuda.synchronize()
"""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    verdict: Literal["ok", "note", "BAD"]
    """`note`: worth knowing; `BAD`: runs would fail or harm a store."""
    text: str


def diagnose(place: str | None, *, leave: bool, mark: str | None) -> int:
    """Looks at this machine, and at a place for a store if one is given; prints what it finds.

    Args:
        place: a folder or URL, or a run file, whose store's place is meant; None looks at the
            machine alone.
        leave: leave a mark at the place for another host to find.
        mark: the mark that another host left, to be checked from here.

    Returns:
        0, or 2 if something is BAD.
    """
    if place is None and (leave or mark is not None):
        raise ValueError("--leave and --find need the PLACE that both hosts share")
    if place is not None and place.endswith(".toml"):
        place = str(store_dir_of(load_run_file(Path(place))))
    findings = []
    for finding in _look(place, leave=leave, mark=mark):
        print(f"{finding.verdict:4} {finding.text}", flush=True)
        findings.append(finding)
    num_bad = sum(finding.verdict == "BAD" for finding in findings)
    print(f"{num_bad} problems" if num_bad else "nothing wrong")
    return EXIT_PROBLEM if num_bad else EXIT_FINE


def _look(place: str | None, *, leave: bool, mark: str | None) -> Iterator[Finding]:
    checks: list[Callable[[], Iterator[Finding]]] = []
    if mark is None:
        checks += [_packages, _gpus, _compile_caches, _slurm]
    if place is not None:
        checks += [lambda: _place(place), lambda: _store(place)] if mark is None else []
        checks += [lambda: _leave(place)] if leave else []
        checks += [lambda: _find(place, mark)] if mark is not None else []
    for check in checks:
        yield from check()


def _packages() -> Iterator[Finding]:
    found = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    yield Finding("ok", f"python {platform.python_version()}, {found}")
    try:
        requirements = importlib.metadata.requires("dflash-offline") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("note", "dflash-offline is not installed: versions were not compared")
        return
    for requirement in requirements:
        match = re.match(r"([A-Za-z0-9_-]+)>=([0-9.]+)", requirement)
        if match is None or "extra ==" in requirement:
            continue
        name, wanted = match[1], match[2]
        version = _version(name)
        if version == "none" and "sys_platform" not in requirement:
            yield Finding("BAD", f"{name} is not installed: pip install '{name}>={wanted}'")
        elif version != "none" and _numbers(version) < _numbers(wanted):
            yield Finding("BAD", f"{name} {version} is too old: pip install '{name}>={wanted}'")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def _gpus() -> Iterator[Finding]:
    import torch

    driver = _driver_version()
    count = torch.cuda.device_count()
    if count == 0:
        if driver is None:
            yield Finding("note", "no GPU: fine for the demo and small runs, uncompiled")
        else:
            yield Finding(
                "BAD",
                f"driver {driver} shows GPUs, but torch {torch.__version__} (CUDA "
                f"{torch.version.cuda}) can use none: install a torch for this driver",
            )
        return
    yield Finding(
        "ok", f"driver {driver or 'unknown'}, torch for CUDA {torch.version.cuda}, {count} GPUs"
    )
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        used = f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
        yield Finding("ok" if free > 0.9 * total else "note", f"GPU {index}: {name}, {used}")
    yield _try_to_compile()


def _driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return result.stdout.split("\n")[0].strip() or None if result.returncode == 0 else None


def _try_to_compile() -> Finding:
    """Compiles a little from nothing, in a process and cache folder of its own."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
            "TRITON_CACHE_DIR": f"{cache}/triton",
        }
        start_s = time.monotonic()
        try:
            result = subprocess.run(
                [sys.executable, "-c", COMPILE],
                env=environment,
                capture_output=True,
                text=True,
                timeout=COMPILE_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return Finding("BAD", f"compiling a small function took over {COMPILE_TIMEOUT_S} s")
    if result.returncode != 0:
        why = (result.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding("BAD", f"torch.compile fails: {why}; train with train.compile = false")
    return Finding("ok", f"torch.compile works ({time.monotonic() - start_s:.0f} s from nothing)")


def _compile_caches() -> Iterator[Finding]:
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir())
    kind = _file_system(folder)
    if kind in SHARED_FILE_SYSTEMS:
        yield Finding(
            "BAD",
            f"compile caches would lie on {kind} ({folder}), where they crash: set "
            "TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR to a folder of the node's own disk",
        )
    elif not os.access(_nearest(folder), os.W_OK):
        yield Finding(
            "BAD", f"compile caches cannot be written to {folder}: set its mode, or TMPDIR"
        )
    else:
        yield Finding("ok", f"compile caches: {folder} ({kind}), {_space(folder)}")


def _slurm() -> Iterator[Finding]:
    if shutil.which("sbatch") is None:
        return
    result = subprocess.run(["sbatch", "--version"], capture_output=True, text=True, timeout=30)
    if result.returncode == 0:
        yield Finding("ok", result.stdout.strip())
    else:
        yield Finding("note", f"sbatch does not work here: {' '.join(result.stderr.split())}")


def _place(place: str) -> Iterator[Finding]:
    files = files_at(place)
    if not isinstance(files, LocalFiles):
        yield from _probed(place)
        return
    found = _nearest(files.root)
    if found != files.root:
        yield Finding("note", f"{place} does not exist yet; it is made for the probe and removed")
    yield from _probed(place)
    _remove_empty(files.root, up_to=found)


def _probed(place: str) -> Iterator[Finding]:
    problems = probe_place(place)
    if problems:
        yield from (Finding("BAD", problem) for problem in problems)
        return
    files = files_at(place)
    yield Finding("ok", f"{files}: exclusive creation, listing and reads by range hold")
    yield Finding("ok", f"{files}: {_write_rate(place) / 1e6:,.0f} MB/s written by one stream")
    if not isinstance(files, LocalFiles):
        return
    folder = _nearest(files.root)
    stats = os.statvfs(folder)
    free = stats.f_bavail * stats.f_frsize
    kind = _file_system(folder)
    text = f"{files} ({kind}): {_space(folder)}"
    # File systems without a fixed number of inodes say 0 in all.
    text += f", {stats.f_favail:,} inodes free" if stats.f_files else ""
    yield Finding("note" if free < LOW_SPACE_BYTES else "ok", text)
    if kind in SHARED_FILE_SYSTEMS:
        yield Finding(
            "note",
            f"{files} is shared: for several hosts, run `doctor {place} --leave` on one and what "
            "it prints on another",
        )


def _write_rate(place: str) -> float:
    """Bytes a second that one stream writes, flushed."""
    files = files_at(place)
    folder = f"{TEMPORARY}rate-{os.getpid()}"
    block = os.urandom(2**20)
    start_s = time.monotonic()
    try:
        stream = files.append_stream(f"{folder}/data")
        for _ in range(RATE_BYTES // len(block)):
            stream.write(block)
        stream.close()
        return RATE_BYTES / (time.monotonic() - start_s)
    finally:
        files.remove_tree(folder)


def _store(place: str) -> Iterator[Finding]:
    """The health of the store that lies there, if one does: by records and sizes, not by bytes."""
    try:
        num_shards = open_store(place).snapshot().num_shards
    except StoreNotFoundError:
        return
    except StoreError as error:
        yield Finding("BAD", str(error))
        return
    if num_shards > MOST_CHECKED_SHARDS:
        yield Finding("note", f"{place}: {num_shards:,} shards; `store verify` checks them")
        return
    problems = verify_store(place, full=False).problems
    yield from (Finding("BAD", f"{problem}") for problem in problems[:SHOWN_PROBLEMS])
    if problems:
        yield Finding(
            "note",
            f"{place}: {len(problems)} problems in all; `store repair` gives damaged shards up, "
            "the next `extract` fills them again",
        )
    else:
        yield Finding(
            "ok",
            f"{place}: {num_shards:,} shards, whole by records and sizes (`store verify --full` "
            "reads every byte)",
        )


def _leave(place: str) -> Iterator[Finding]:
    name = leave_mark(place)
    yield Finding("note", f"now run on another host: dflash-offline doctor {place} --find {name}")


def _find(place: str, mark: str) -> Iterator[Finding]:
    if not re.fullmatch(re.escape(TEMPORARY) + r"mark-[0-9a-f]{32}", mark):
        raise ValueError(f"--find {mark}: expected the name that `doctor PLACE --leave` printed")
    start_s = time.monotonic()
    try:
        problems = check_mark(place, mark)
    except StoreError as error:
        problems = [str(error)]
    yield from (Finding("BAD", problem) for problem in problems)
    if not problems:
        waited_s = time.monotonic() - start_s
        yield Finding("ok", f"{place}: the other host's file was seen here within {waited_s:.1f} s")


def _remove_empty(folder: Path, *, up_to: Path) -> None:
    """Removes a folder and those above it that hold nothing, up to one that stays."""
    while folder != up_to and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent


def _nearest(folder: Path) -> Path:
    """The folder itself, or the one above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def _space(folder: Path) -> str:
    usage = shutil.disk_usage(_nearest(folder))
    return f"{usage.free / 1e9:,.0f} of {usage.total / 1e9:,.0f} GB free"


def _file_system(folder: Path) -> str:
    """The kind of file system a folder lies on, as the mount table names it; "unknown" if none."""
    target = _nearest(folder.absolute())
    best, kind = -1, "unknown"
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return kind
    for line in mounts:
        point, found = line.split()[1:3]
        path = Path(point.replace("\\040", " "))
        if len(path.parts) > best and target.is_relative_to(path):
            best, kind = len(path.parts), found
    return kind
