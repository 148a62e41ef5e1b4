"""Opens buckets of S3, Google and Azure with the credentials that their own tools would use."""

import http.client
import importlib.util
import os
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from deltawire.errors import StoreUnavailable
from deltawire.hosts import split_url
from deltawire.redact import redacted
from deltawire.store.failures import shorten
from deltawire.store.object import ObjectStore

CONNECT_SECONDS = 5.0
METADATA_SECONDS = 2.0
RETRY_SECONDS = 60.0
# How much longer than an answer parts of an upload may take: 128 MiB in five minutes with the default timeout.
UPLOAD_PATIENCE = 15


@dataclass(frozen=True, slots=True)
class Cloud:
    """A client, and its configuration. Names are the client's settings; in the environment they have a prefix."""

    kind: Any
    prefixes: tuple[str, ...]
    environment: tuple[str, ...]
    """The variables that an error message suggests when access is refused."""
    credentials: frozenset[str]
    """With any of these settings the client finds credentials."""
    endpoints: tuple[str, ...]

    def settings(self, config: Mapping[str, str]) -> dict[str, str]:
        """Settings from the environment and from `config`, by lower-case name without prefix; `config` wins."""
        found = {}
        for name, value in [*os.environ.items(), *config.items()]:
            plain = name.lower()
            prefix = next((each for each in self.prefixes if plain.startswith(each)), None)
            if prefix is not None or name in config:
                found[plain.removeprefix(prefix or "")] = str(value)
        return found


S3 = Cloud(
    kind=S3Store,
    prefixes=("aws_",),
    environment=("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL"),
    credentials=frozenset({
        "access_key_id", "web_identity_token_file", "container_credentials_relative_uri",
        "container_credentials_full_uri", "skip_signature",
    }),
    endpoints=("endpoint_url_s3", "endpoint_url", "endpoint"),
)  # fmt: skip
GOOGLE = Cloud(
    kind=GCSStore,
    prefixes=("google_",),
    environment=("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY"),
    credentials=frozenset({
        "application_credentials", "service_account", "service_account_path", "service_account_key",
        "bearer_token", "skip_signature",
    }),
    endpoints=("base_url",),
)  # fmt: skip
AZURE = Cloud(
    kind=AzureStore,
    prefixes=("azure_storage_", "azure_"),
    environment=(
        "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_CLIENT_ID",
        "AZURE_STORAGE_CLIENT_SECRET", "AZURE_STORAGE_TENANT_ID", "AZURE_STORAGE_TOKEN",
    ),
    credentials=frozenset({
        "account_key", "access_key", "master_key", "sas_key", "sas_token", "token", "client_secret",
        "federated_token_file", "msi_endpoint", "use_azure_cli", "use_emulator", "skip_signature",
    }),
    endpoints=("endpoint",),
)  # fmt: skip
CLOUDS = {"s3": S3, "s3a": S3, "gs": GOOGLE, "gcs": GOOGLE}


def open_cloud(url: str, config: Mapping[str, str], *, timeout_seconds: float, retries: int) -> ObjectStore:
    parts = split_url(url)
    cloud = CLOUDS.get(parts.scheme.lower(), AZURE)
    bucket = parts.username or parts.netloc
    if not bucket:
        raise ValueError(f"{url!r} names no bucket: write {parts.scheme}://bucket/prefix")
    if "#" in url:
        raise ValueError(f"{url!r} has a '#', at which a URL ends: write a prefix without it")
    settings = dict(config)
    if parts.username and parts.hostname:  # abfss://container@account.dfs.core.windows.net/prefix
        settings.setdefault("account_name", parts.hostname.partition(".")[0])
    prefix = parts.path.strip("/")
    name = f"{parts.scheme}://{parts.netloc}/{prefix}".rstrip("/")
    known = cloud.settings(settings)
    endpoint = next((known[each] for each in cloud.endpoints if known.get(each)), "")
    _check_endpoint(endpoint)
    options = _credentials(name, cloud, known) | {
        "retry_config": {
            "max_retries": retries,
            "retry_timeout": timedelta(seconds=RETRY_SECONDS),
            "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=10), "base": 2},
        }
    }

    def client(silence_seconds: float) -> Any:
        client_options: Any = {
            "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
            "read_timeout": timedelta(seconds=silence_seconds),
            # A limit on the whole request would fail large parts on slow networks; silence is the sign of a dead one.
            "timeout": timedelta(hours=1),
            "allow_http": endpoint.lower().startswith("http://"),
        }
        return cloud.kind(bucket, config=settings, client_options=client_options, **options)

    try:
        quick, patient = client(timeout_seconds), client(timeout_seconds * UPLOAD_PATIENCE)
    except BaseError as error:
        raise _refused(name, f"{shorten(str(error))}; look at", cloud) from None
    return ObjectStore(name, quick, prefix, patient=patient, variables=cloud.environment)


def _check_endpoint(endpoint: str) -> None:
    """Reject what is not a URL, at which the client would panic."""
    parts = split_url(endpoint)
    is_url = parts.scheme in ("http", "https") and parts.hostname and endpoint.isascii() and " " not in endpoint
    if endpoint and not is_url:
        raise ValueError(
            f"the endpoint {redacted(endpoint)!r} is not a URL: write http://host:port or https://host, for S3 in "
            "AWS_ENDPOINT_URL"
        )


def _credentials(url: str, cloud: Cloud, known: Mapping[str, str]) -> dict[str, Any]:
    """What a client needs to be told of credentials: nothing where it finds them among its settings."""
    if cloud.credentials & known.keys():
        return {}
    provider = _boto3_provider(url) if cloud is S3 else None
    if provider is not None:
        return {"credential_provider": provider}
    if not _has_identity(cloud, known):
        raise _refused(url, "no credentials were found; look at", cloud)
    return {}


def _refused(url: str, why: str, cloud: Cloud) -> StoreUnavailable:
    message = f"{url}: {why} {', '.join(cloud.environment)}"
    return StoreUnavailable(message, url=url, key="", refused=True, uncertain=False)


def _boto3_provider(url: str) -> Any:
    """The credentials that boto3 finds (profiles, SSO, roles); None without boto3, or if it finds none."""
    if importlib.util.find_spec("boto3") is None:
        return None
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return Boto3CredentialProvider()
    except ValueError:
        return None
    except Exception as error:  # boto3's own, such as a profile that does not exist
        raise _refused(url, f"{error}; look at", S3) from error


def _has_identity(cloud: Cloud, settings: Mapping[str, str]) -> bool:
    """Whether this machine has an identity of its own. The client would check this too, but with minutes of retries."""
    home = Path.home() / ".config" / "gcloud" / "application_default_credentials.json"
    if cloud is GOOGLE and home.exists():
        return True
    if cloud is S3 and settings.get("ec2_metadata_disabled", "").lower() == "true":
        return False
    return _answers(settings.get("metadata_endpoint", "http://169.254.169.254"))


def _answers(endpoint: str) -> bool:
    connection = http.client.HTTPConnection(split_url(endpoint).netloc, timeout=METADATA_SECONDS)
    with closing(connection), suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/")
        connection.getresponse()
        return True
    return False
