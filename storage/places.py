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
    """Raises StoreError where a store would be written onto itself."""
    if isinstance(source, LocalFiles) and isinstance(target, LocalFiles):
        is_same = source.root.resolve() == target.root.resolve()
    else:
        is_same = repr(source).rstrip("/") == repr(target).rstrip("/")
    if is_same:
        raise StoreError(f"{target} is the source itself; name another place to write to")


def _folder_of(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise StoreError(f"{url}: expected file:///absolute/path, of this machine")
    return Path(unquote(parts.path))
