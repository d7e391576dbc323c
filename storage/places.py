"""Where a store lies: a folder, or a prefix of an object store."""

from pathlib import Path

from storage.files import Files, LocalFiles


def files_at(place: str | Path) -> Files:
    """The files of a store: a URL (`s3://bucket/prefix`) is an object store, else a folder."""
    if isinstance(place, str) and "://" in place:
        # Imported when needed: obstore takes a tenth of a second.
        from storage.object_files import ObjectFiles

        return ObjectFiles.at(place)
    return LocalFiles(place)
