"""How an object store is reached: endpoint, credentials, time-outs, repetitions."""

import os
from datetime import timedelta
from typing import Any

from obstore.store import from_url

from storage.errors import StoreError

RETRY_S = 180.0
"""Time after which a request is not tried again, in seconds."""
RETRY: Any = {
    "max_retries": 10,
    "backoff": {
        "init_backoff": timedelta(seconds=0.1),
        "max_backoff": timedelta(seconds=15),
        "base": 2,
    },
    "retry_timeout": timedelta(seconds=RETRY_S),
}
"""obstore tries a request again, with back-off and jitter, after a 5xx answer or a lost connection,
and after a time-out where a second request cannot do harm."""
REQUEST_TIMEOUT = "120s"


def open_object_store(url: str) -> Any:
    """The store of obstore at a URL, with what it does not take from the environment by itself.

    Credentials, region and endpoint come from the usual AWS variables; `AWS_PROFILE` and other
    sources that only the AWS SDK knows need the package boto3.

    Raises:
        StoreError: boto3 is needed and missing.
        ValueError: obstore does not know the URL, or refuses a setting.
    """
    return from_url(url, **_options(url))


def _options(url: str) -> dict[str, Any]:
    scheme = url.partition("://")[0]
    if scheme not in ("s3", "s3a"):
        return {} if scheme in ("memory", "file") else {"retry_config": RETRY}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or next(
        (os.environ[name] for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT") if name in os.environ),
        "",
    )
    options: dict[str, Any] = {
        "retry_config": RETRY,
        "client_options": {"timeout": REQUEST_TIMEOUT, "allow_http": endpoint.startswith("http:")},
    }
    if endpoint:
        options["endpoint"] = endpoint
    if "AWS_PROFILE" in os.environ and "AWS_ACCESS_KEY_ID" not in os.environ:
        options["credential_provider"] = _sdk_credentials()
    return options


def _sdk_credentials() -> Any:
    """Credentials as the AWS SDK finds them: profiles, single sign-on, processes."""
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise StoreError(
            "AWS_PROFILE needs the package boto3: pip install boto3, or set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY instead"
        ) from error
    return Boto3CredentialProvider()


def first_line(error: Exception) -> str:
    """What obstore says, without its debug output and the server's XML."""
    return " ".join(str(error).partition("\n\nDebug source")[0].partition("<?xml")[0].split())
