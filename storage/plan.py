"""Data generations: which sequence belongs to which unit, fixed before any work starts."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from storage import layout
from storage.errors import DamagedShardError
from storage.files import Files
from storage.records import create_record, read_record
from storage.schema import UnitId, ids_digest, unit_index


def create_generation(
    files: Files, number: int, sequence_ids: Sequence[str], *, num_units: int
) -> bool:
    """Records a generation exclusively; False if another one has this number already."""
    text = "".join(f"{name}\n" for name in sequence_ids)
    if text.count("\n") != len(sequence_ids) or "\n" in sequence_ids or "" in sequence_ids:
        raise ValueError("sequence ids must be non-empty and hold no line break")
    digest = ids_digest(sequence_ids)
    # The list lies under its digest, so that racing planners cannot disturb each other.
    files.create(layout.planned_ids(digest), text.encode())
    units = {unit_index(i, generation=number, num_units=num_units) for i in sequence_ids}
    plan = {
        "num_units": num_units,
        "num_units_in_use": len(units),
        "num_sequences": len(sequence_ids),
        "ids_sha256": digest,
    }
    return create_record(files, layout.generation(number), plan)


def read_generation(files: Files, number: int) -> dict[UnitId, list[str]]:
    """Sorted ids by unit of one generation."""
    plan = read_record(files, layout.generation(number))
    path = layout.planned_ids(plan["ids_sha256"])
    try:
        ids = files.read(path).decode().split("\n")[:-1]
    except (FileNotFoundError, UnicodeDecodeError) as error:
        what = "is missing" if isinstance(error, FileNotFoundError) else "is damaged"
        raise DamagedShardError(f"{files}/{path} {what}; restore it from a copy") from error
    if ids_digest(ids) != plan["ids_sha256"]:
        raise DamagedShardError(
            f"{files}/{path} is damaged (its digest does not match); restore it from a copy"
        )
    units: dict[UnitId, list[str]] = {}
    for sequence_id in ids:
        index = unit_index(sequence_id, generation=number, num_units=plan["num_units"])
        units.setdefault(UnitId(number, index), []).append(sequence_id)
    return units


def planned_counts(files: Files) -> list[int]:
    """Units that hold a sequence, by generation."""
    numbers = range(len(files.names(layout.GENERATIONS)))
    return [read_record(files, layout.generation(n))["num_units_in_use"] for n in numbers]


def planned_sequences(files: Files) -> int:
    """Sequences of all generations, by their records: reads no ids.

    Those of a given-up unit count again where they were planned anew.
    """
    numbers = range(len(files.names(layout.GENERATIONS)))
    return sum(read_record(files, layout.generation(n))["num_sequences"] for n in numbers)


def complete_generations(files: Files, generation: Int32[np.ndarray, " shards"]) -> int:
    """How many generations, from the first on, have all their units among these shards."""
    committed = np.bincount(generation, minlength=1)
    planned = planned_counts(files)
    for number, wanted in enumerate(planned):
        if number >= len(committed) or committed[number] < wanted:
            return number
    return len(planned)
