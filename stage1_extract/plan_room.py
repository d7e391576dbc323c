"""Room: whether a store fits its disk and the limit of the run file, and what to do if not."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from stage1_extract.config import ExtractRun, StoreConfig
from stage1_extract.plan import StoreShape, StoreSize, store_size, ways_to_fit
from stage1_extract.plan_counts import TokenCount

WRITABLE_ENCODINGS: tuple[str, ...] = get_args(StoreConfig.model_fields["encoding"].annotation)
"""Encodings that an extraction can write."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """What a store may take beyond what it holds already; None where nothing limits it."""

    place: str
    free_bytes: int | None
    """Of its disk."""
    free_inodes: int | None
    max_bytes: int | None
    """What `extract.max_store_bytes` leaves."""

    def is_close_to(self, size: StoreSize) -> bool:
        """Whether a limit lies within the error of a size, so that the answer is open."""
        limits = [limit for limit in (self.free_bytes, self.max_bytes) if limit is not None]
        return any(abs(limit - size.num_bytes) < size.num_bytes_error for limit in limits)


def room_of(run: ExtractRun, *, stored_bytes: int) -> Room:
    """The room that disk and run file leave to a store that holds some bytes already."""
    limit = run.extract.max_store_bytes
    free_bytes = free_inodes = None
    if isinstance(run.store_dir, Path):
        free_bytes, free_inodes = free_space(run.store_dir)
    return Room(
        place=str(run.store_dir),
        free_bytes=free_bytes,
        free_inodes=free_inodes,
        max_bytes=None if limit is None else max(0, int(limit) - stored_bytes),
    )


def free_space(folder: Path) -> tuple[int, int | None]:
    """Free bytes and free inodes of the disk that holds a folder, or will hold it.

    File systems that make inodes as they go report none; then there is no limit.
    """
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    status = os.statvfs(existing)
    return status.f_bavail * status.f_frsize, status.f_favail if status.f_files else None


def problem_with_room(
    run: ExtractRun, count: TokenCount, shape: StoreShape, room: Room, *, is_planned: bool = False
) -> str | None:
    """Why an extraction may not start, in one line with the ways out; None if it may.

    `extract.force` overrides the disk, not the limit that the run file itself sets.

    Args:
        run: The run's settings.
        count: What is to be extracted.
        shape: What a token takes in the store.
        room: What the store may take.
        is_planned: Whether the store has a plan: then layers, encoding and conversations stand, and
            no other ones are offered.
    """
    size = store_size(count, shape)

    def ways(max_bytes: int) -> str:
        if is_planned:
            return "use another store folder"
        return fitting(count, shape, max_bytes=max_bytes)

    if room.max_bytes is not None and size.num_bytes > room.max_bytes:
        limit = int(run.extract.max_store_bytes or 0)
        return (
            f"extract.max_store_bytes = {in_units(limit)} leaves {in_units(room.max_bytes)} and the"
            f" store needs about {in_units(size.num_bytes)} more; {ways(room.max_bytes)}, or raise"
            " the limit"
        )
    if run.extract.force:
        return None
    if room.free_bytes is not None and size.num_bytes > room.free_bytes:
        return (
            f"the store needs about {in_units(size.num_bytes)} more and {room.place} has"
            f" {in_units(room.free_bytes)} free; free space, {ways(room.free_bytes)}, or"
            " set extract.force = true"
        )
    if room.free_inodes is not None and size.num_inodes > room.free_inodes:
        return (
            f"the store needs {size.num_inodes:,} files and folders and {room.place} has"
            f" {room.free_inodes:,} inodes free; raise store.shard_bytes, choose another place, or"
            " set extract.force = true"
        )
    return None


def fitting(count: TokenCount, shape: StoreShape, *, max_bytes: int) -> str:
    """The ways to fit a size as part of a sentence."""
    ways = ways_to_fit(count, shape, max_bytes=max_bytes, encodings=WRITABLE_ENCODINGS)
    if not ways:
        return "nothing but another place makes it fit"
    return "fit it by " + " or ".join(f"{way.setting} ({in_units(way.num_bytes)})" for way in ways)


def in_units(num_bytes: int | float) -> str:
    """Bytes for people: `1.5 TB`, `20.5 kB`; powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.1f} PB"
