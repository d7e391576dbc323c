"""A store in S3, against a real server on loopback: its laws, its failures, its requests."""

import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from storage import object_access, object_files
from storage.catalog import fold, read_catalog
from storage.errors import StoreError, StoreWriteError
from storage.object_files import ObjectFiles
from storage.probe import probe_place
from storage.reader import open_store
from storage.verify import verify_store

pytestmark = pytest.mark.slow


@pytest.fixture
def url(s3_server: Any) -> str:
    """Give the place of a store in an empty bucket."""
    return s3_server.make_bucket()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up soon, and wait little before."""
    few = {**object_access.RETRY, "max_retries": 1}
    monkeypatch.setattr(object_access, "RETRY", few)
    monkeypatch.setattr(object_files, "CREATE_WAIT_S", 0.001)


def failing_times(count: int, status: str, *, method: str = "PUT") -> Any:
    """A fault that hits the first so many requests."""
    left = iter(range(count))

    def fault(environ: dict[str, Any]) -> str | None:
        is_hit = environ["REQUEST_METHOD"] == method and next(left, None) is not None
        return status if is_hit else None

    return fault


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


def test_of_many_writers_one_wins(url: str) -> None:
    files = ObjectFiles.at(url)
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda i: files.create("record", b"%d" % i), range(8)))
    assert won.count(True) == 1
    assert files.read("record") == b"%d" % won.index(True)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("status", ["409 Conflict", "503 Slow Down", "500 Internal Server Error"])
def test_creation_outlives_races_and_failures(url: str, s3_server: Any, status: str) -> None:
    files = ObjectFiles.at(url)
    s3_server.fault = failing_times(5, status)
    assert files.create("record", b"ours")
    s3_server.fault = failing_times(3, status)
    assert not files.create("record", b"theirs")
    assert files.read("record") == b"ours"


@pytest.mark.usefixtures("impatient")
def test_a_creation_whose_answer_was_lost_counts_as_ours(url: str, s3_server: Any) -> None:
    files = ObjectFiles.at(url)
    s3_server.fault, s3_server.forgets = failing_times(1, "503 Slow Down"), True
    assert files.create("record", b"ours")
    assert files.read("record") == b"ours"


@pytest.mark.usefixtures("impatient")
def test_reads_and_uploads_outlive_failures(url: str, s3_server: Any) -> None:
    files = ObjectFiles.at(url)
    data = bytes(range(256)) * (object_files.PART_BYTES // 256 + 1)
    s3_server.fault = failing_times(1, "503 Slow Down", method="POST")
    stream = files.append_stream("large")
    stream.write(data)
    stream.close()
    s3_server.fault = failing_times(1, "500 Internal Server Error", method="GET")
    part = bytearray(100)
    files.range_reader("large").read_into(len(data) - 100, [memoryview(part)])
    assert bytes(part) == data[-100:]


@pytest.mark.parametrize("status", ["429 Too Many Requests", "408 Request Timeout"])
def test_a_server_that_is_too_busy_is_asked_again(url: str, s3_server: Any, status: str) -> None:
    files = ObjectFiles.at(url)
    s3_server.fault = failing_times(1, status)
    assert files.create("record", b"ours")
    s3_server.fault = failing_times(1, status, method="GET")
    assert files.read("record") == b"ours"


def test_a_server_that_does_not_answer_is_asked_again(
    url: str, s3_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_access, "REQUEST_TIMEOUT", "1s")
    files = ObjectFiles.at(url)
    for use in (lambda: files.create("record", b"ours"), lambda: files.read("record")):
        waits = iter([2.0])
        s3_server.fault = lambda environ, waits=waits: time.sleep(next(waits, 0.0))
        assert use() in (True, b"ours")
        assert next(waits, None) is None


@pytest.mark.usefixtures("impatient")
def test_what_does_not_end_is_one_clear_line(url: str, s3_server: Any) -> None:
    files = ObjectFiles.at(url)
    s3_server.fault = lambda environ: "503 Slow Down"
    with pytest.raises(StoreWriteError, match=r"cannot write s3://.*503.*run the same command"):
        files.create("record", b"ours")
    with pytest.raises(StoreError, match="cannot read s3://"):
        files.read("record")
    s3_server.fault = lambda environ: "403 Forbidden"
    with pytest.raises(StoreError, match="AWS_SKIP_SIGNATURE"):
        files.read("record")
    s3_server.fault = lambda environ: "409 Conflict" if environ["REQUEST_METHOD"] == "PUT" else None
    with pytest.raises(StoreWriteError, match="refuses it as taken"):
        files.create("record", b"ours")


def test_a_missing_bucket_and_a_wrong_url_are_one_clear_line(s3_server: Any) -> None:
    with pytest.raises(StoreWriteError, match="no such bucket"):
        ObjectFiles.at("s3://not-there/x").create("record", b"")
    with pytest.raises(StoreError, match="no place for a store"):
        ObjectFiles.at("ftp://host/x")


def test_public_buckets_need_no_credentials(
    url: str, s3_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ObjectFiles.at(url).create("record", b"ours")
    path = url.removeprefix("s3:/")
    headers = {"x-amz-acl": "public-read", "Authorization": "AWS test:test"}
    urllib.request.urlopen(
        urllib.request.Request(
            f"{s3_server.endpoint}{path}/record?acl", method="PUT", headers=headers
        )
    )
    signed = Counter[bool]()

    def watch(environ: dict[str, Any]) -> None:
        signed["HTTP_AUTHORIZATION" in environ] += 1

    s3_server.fault = watch
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    assert ObjectFiles.at(url).read("record") == b"ours"
    assert signed == {False: 1}


def test_profiles_of_the_aws_sdk_are_heard(
    url: str, s3_server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("boto3")
    text = "[work]\naws_access_key_id = key-of-work\naws_secret_access_key = secret\n"
    (tmp_path / "credentials").write_text(text)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    headers: list[str] = []
    s3_server.fault = lambda environ: headers.append(environ["HTTP_AUTHORIZATION"])
    assert ObjectFiles.at(url).create("record", b"")
    assert "Credential=key-of-work/" in headers[0]


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_each_variable_for_the_endpoint_is_heard(
    url: str, s3_server: Any, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv(variable, s3_server.endpoint)
    assert ObjectFiles.at(url).create("record", b"")


def test_requests_are_counted_as_the_server_counts_them(
    url: str, s3_server: Any, making: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    store = making.make_store(url)
    unit = store.units()[0]
    before = _counted(s3_server, store.files)
    making.fill_unit(store, unit)
    written = _counted(s3_server, store.files) - before
    making.fill(store)

    fold(store.files, read_catalog(store.files))
    opened = open_store(url)
    snapshot = opened.snapshot()
    at_opening = _counted(s3_server, opened.files)
    layers = list(opened.layers)
    before = _counted(s3_server, opened.files)
    snapshot.read(0, layers=layers)
    first = _counted(s3_server, opened.files) - before
    before = _counted(s3_server, opened.files)
    snapshot.read(1, layers=layers)
    second = _counted(s3_server, opened.files) - before
    with capsys.disabled():
        print(f"\na store opened {dict(at_opening)}")
        print(f"requests with {len(layers)} layers: a shard written {dict(written)}")
        print(f"a sequence read: of a new shard {dict(first)}, of an open one {dict(second)}")
    # Identity and catalog file, its size; names of tombstones, catalog files, generations.
    assert at_opening == {"get": 2, "head": 1, "list": 3}
    # The tokens, the data and zarr.json of each layer and of the scales, then the commit.
    assert written["put"] == 2 + 2 * (len(layers) + 1)
    # The commit record, the tokens, the scales, each layer.
    assert first == {"get": 3 + len(layers)}
    assert second == {"get": 2 + len(layers)}


def test_an_upload_in_parts_is_counted_in_parts(url: str, s3_server: Any) -> None:
    files = ObjectFiles.at(url)
    stream = files.append_stream("large")
    for _ in range(5):
        stream.write(bytes(object_files.PART_BYTES // 2))
    stream.close()
    assert _counted(s3_server, files)["put"] == 5  # Start, three parts, completion.
    assert files.size("large") == 5 * object_files.PART_BYTES // 2


def test_what_is_too_large_for_one_put_goes_in_parts(
    url: str, s3_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_files, "SINGLE_PUT_BYTES", 10)
    files = ObjectFiles.at(url)
    assert files.create("head", b"more than ten bytes")
    assert files.create("head", b"more than ten bytes")
    assert not files.create("head", b"more than ten other")


def _counted(s3_server: Any, files: ObjectFiles) -> Counter[str]:
    """Requests so far as the client counts them, held against what the server saw."""
    seen = Counter[str]()
    for method, path, query in s3_server.requests:
        is_listing = method == "GET" and "list-type" in query
        kind = {"PUT": "put", "HEAD": "head", "GET": "list" if is_listing else "get"}
        if method == "POST":
            seen["delete" if "delete" in query else "put"] += 1
        elif path.count("/") > 1 or is_listing:
            seen[kind[method]] += 1
    counted = Counter({kind: count for kind, count in files.requests.items() if count})
    if not hasattr(files, "_seen_before"):
        files._seen_before = seen - counted
    assert seen - files._seen_before == counted
    return counted
