from pathlib import Path

import pytest

from storage.errors import StoreError
from storage.files import LocalFiles
from storage.places import files_at, refuse_same_place


def test_folders_and_file_urls_are_the_same_place(tmp_path: Path) -> None:
    folder = tmp_path / "a störe with spaces"
    for place in (folder, str(folder), folder.as_uri()):
        files = files_at(place)
        assert isinstance(files, LocalFiles)
        assert files.root == folder


@pytest.mark.parametrize("url", ["file://host/folder", "file://relative", "file:relative://x"])
def test_a_file_url_names_a_folder_of_this_machine(url: str) -> None:
    with pytest.raises(StoreError):
        files_at(url)


def test_a_store_is_not_written_into_itself(tmp_path: Path) -> None:
    source = files_at(tmp_path / "store")
    with pytest.raises(StoreError, match="is the source itself"):
        refuse_same_place(source, files_at(tmp_path / "other" / ".." / "store"))
    with pytest.raises(StoreError, match="lies inside the source"):
        refuse_same_place(source, files_at(tmp_path / "store" / "copy"))
    refuse_same_place(source, files_at(tmp_path / "store-2"))
    refuse_same_place(source, files_at(tmp_path))
