"""An S3 server on loopback (moto) that tests can watch and make misbehave."""

import threading
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

Environ = dict[str, Any]


class S3Server:
    """What a test sees of the server; it may change `fault` and `ignores_conditions` at any time.

    Attributes:
        endpoint: its URL.
        requests: (method, path, query) of every request so far.
        fault: given a request, says how to fail it (`503 Slow Down`), or None to answer it.
        forgets: whether `fault` is only told to the client, after the request was carried out.
        ignores_conditions: whether conditional puts overwrite, as some servers let them.
    """

    def __init__(self) -> None:
        self.endpoint = ""
        self.requests: list[tuple[str, str, str]] = []
        self.fault: Callable[[Environ], str | None] | None = None
        self.forgets = False
        self.ignores_conditions = False

    def answer(self, app: Any, environ: Environ, start_response: Any) -> Iterable[bytes]:
        request = (environ["REQUEST_METHOD"], environ["PATH_INFO"], environ["QUERY_STRING"])
        self.requests.append(request)
        if self.ignores_conditions:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        status = self.fault(environ) if self.fault is not None else None
        if status is None:
            return app(environ, start_response)
        if self.forgets:
            list(app(environ, lambda *_: None))
        else:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response(status, [("Content-Type", "application/xml")])
        return [b"<Error><Code>Injected</Code></Error>"]

    def make_bucket(self) -> str:
        """The URL of a place in a new bucket."""
        bucket = f"bucket-{uuid.uuid4().hex}"
        request = urllib.request.Request(f"{self.endpoint}/{bucket}", method="PUT")
        urllib.request.urlopen(request)
        return f"s3://{bucket}/some/prefix"

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which clients find it."""
        return {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
        }


@contextmanager
def running_s3_server() -> Iterator[S3Server]:
    """Serves until the block ends; ImportError where moto is not installed."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *arguments: object) -> None:
            pass

    app = DomainDispatcherApplication(create_backend_app)
    served = S3Server()
    server = make_server(
        "127.0.0.1",
        0,
        lambda environ, start_response: served.answer(app, environ, start_response),
        threaded=True,
        request_handler=Quiet,
    )
    served.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
