"""A store in S3, against moto where it is installed (`pip install "moto[server,s3]"`)."""

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from storage.probe import probe_place
from storage.reader import open_store
from storage.verify import verify_store

pytestmark = pytest.mark.slow


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Give the place of a store in an empty bucket."""
    server_module = pytest.importorskip("moto.server")
    server = server_module.ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT", endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT"))
    yield "s3://bucket/some/prefix"
    server.stop()


def test_a_store_in_s3_is_filled_read_and_verified(
    url: str, tmp_path: Path, making: SimpleNamespace
) -> None:
    assert probe_place(url) == []
    store = making.make_store(url)
    making.fill(store)
    assert verify_store(url, full=True).ok
    unit = store.units()[0]
    assert not making.fill_unit(store, unit)
    local = making.make_store(tmp_path / "local")
    making.fill(local)
    digest = open_store(tmp_path / "local").content_digest()
    assert open_store(url).content_digest() == digest
