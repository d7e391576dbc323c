"""Where a store lies: a folder, or a prefix of an object store."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from storage.errors import StoreError
from storage.files import Files, LocalFiles


def files_at(place: str | Path) -> Files:
    """The files of a store at a folder, a `file://` URL or an object store's URL.

    Object stores are `s3://bucket/prefix` and what else obstore knows (`gs://`, `az://`).
    """
    if not isinstance(place, str) or "://" not in place:
        return LocalFiles(place)
    if place.startswith("file://"):
        return LocalFiles(_folder_of(place))
    # Imported when needed: obstore takes a tenth of a second.
    from storage.object_files import ObjectFiles

    return ObjectFiles.at(place)


def refuse_same_place(source: Files, target: Files) -> None:
    """Raises StoreError where a store would be written onto itself, or into its own folder."""
    if isinstance(source, LocalFiles) and isinstance(target, LocalFiles):
        names = [f"{files.root.resolve()}/" for files in (source, target)]
    else:
        names = [f"{files!r}".rstrip("/") + "/" for files in (source, target)]
    if names[1].startswith(names[0]):
        where = "is the source itself" if names[0] == names[1] else "lies inside the source"
        raise StoreError(f"{target} {where}; name another place to write to")


def _folder_of(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise StoreError(f"{url}: expected file:///absolute/path, of this machine")
    return Path(unquote(parts.path))
