from pathlib import Path

import pytest

from storage.errors import StoreError
from storage.files import LocalFiles
from storage.places import files_at


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
