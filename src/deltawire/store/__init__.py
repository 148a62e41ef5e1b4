"""Places for objects: a folder, memory, S3, Google, Azure and Hugging Face buckets, web servers; one protocol.

Begin with `base.py` (the calls), then `object.py`; `retry.py` is the retry policy, and how versions come to exist.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote

from deltawire.disk import local_path
from deltawire.hosts import split_url
from deltawire.redact import redacted
from deltawire.store.base import Buffer, Pieces, Stat, Store

__all__ = ["Buffer", "Pieces", "Stat", "Store", "open_store"]

SPECS = (
    "a folder, file:///folder, memory:NAME, s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, "
    "hf://buckets/owner/name/prefix or, to read only, https://host/run"
)
# Where the Hub keeps large files of models, and redirects to.
HUB_HOSTS = "cdn-lfs.huggingface.co cdn-lfs.hf.co cdn-lfs-us-1.hf.co cdn-lfs-eu-1.hf.co cas-bridge.xethub.hf.co"
CLOUD_SCHEMES = {"s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss"}


def open_store(
    url: str | Path | Store, *, timeout_seconds: float = 20.0, retries: int = 5, config: Mapping[str, str] | None = None
) -> Store:
    """Open the store at a URL or folder.

    Credentials and endpoints come from the environment variables of each cloud's own tools. Nothing is read or written
    yet, so a missing bucket is only noticed at the first request.

    Args:
        url: A folder, `file:///folder`, `memory:NAME`, `s3://bucket/prefix`, `gs://bucket/prefix`,
            `az://container/prefix`, `hf://buckets/owner/name/prefix`, or `https://host/run`, which can only be read. A
            `Store` is returned unchanged.
        timeout_seconds: How long a cloud store or web server may be silent before a request fails.
        retries: How often a failed request to a cloud store is repeated.
        config: Settings for the client of the cloud, which take precedence over the environment; for a web server
            `headers`, one `Name: value` per line, and `redirect_hosts`, the other hosts that it may redirect to.

    Returns:
        The store.

    Raises:
        ValueError: The URL is not supported, or contains credentials.
        StoreUnavailable: No credentials were found.
        MissingDependency: An optional package is needed for this kind of store.
    """
    if not isinstance(url, str | Path):
        if not all(hasattr(url, name) for name in ("put", "create", "get", "list")):
            raise TypeError(f"{type(url).__name__} is not a store: use {SPECS}, or your own Store object")
        return url
    scheme = scheme_of(url)
    if scheme in ("", "file"):
        return _open_folder(url)
    if scheme == "memory":
        from deltawire.store.object import open_memory

        name, _, prefix = str(url).partition(":")[2].lstrip("/").partition("/")
        return open_memory(name, prefix)
    _refuse_credentials(str(url), query=scheme not in ("http", "https"))
    if scheme in ("http", "https"):
        from deltawire.store.web import WebStore

        return WebStore(str(url), config or {}, timeout_seconds=timeout_seconds)
    if scheme == "hf":
        return _open_hub(str(url), config or {})
    if scheme in CLOUD_SCHEMES:
        from deltawire.store.clouds import open_cloud

        return open_cloud(str(url), config or {}, timeout_seconds=timeout_seconds, retries=retries)
    raise ValueError(f"{redacted(str(url))!r} is not a store: use {SPECS}")


def scheme_of(url: str | Path) -> str:
    """The scheme of a store's URL, in small letters; empty for the path of a folder."""
    if isinstance(url, Path):
        return ""
    if not url:
        raise ValueError(f"an empty URL is not a store: use {SPECS}")
    # A single letter before the colon is a Windows drive.
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):", url)
    return found[1].lower() if found else ""


def _refuse_credentials(url: str, *, query: bool) -> None:
    """Reject URLs with credentials, or a query: URLs are shown and logged, and the credentials would not be used."""
    checked = url if query else url.partition("?")[0]
    if redacted(checked) != checked or "?" in checked:
        raise ValueError(
            f"{redacted(url)!r} has a password or a query: remove it from the URL. Credentials come from the "
            "environment, where the cloud's own tools look for them"
        )


def _open_folder(url: str | Path) -> Store:
    from deltawire.store.object import FolderStore

    if isinstance(url, Path) or not url.lower().startswith("file:"):
        return FolderStore(local_path(url))
    parts = split_url(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ValueError(f"{url!r} is not a folder: write file:///folder, with three slashes")
    if "#" in url or "?" in url:
        raise ValueError(f"{url!r} ends at its '#' or '?': write %23 or %3F, or the path of the folder")
    return FolderStore(Path(unquote(parts.path)))


def _open_model(name: str, revision: str, config: Mapping[str, str]) -> Store:
    """The files of a model on the Hub, to read only."""
    from deltawire.store.web import WebStore

    endpoint = config.get("endpoint") or os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    token = config.get("token") or os.environ.get("HF_TOKEN")
    hosts = config.get("redirect_hosts", os.environ.get("DELTAWIRE_WEB_REDIRECT_HOSTS", ""))
    headers = f"Authorization: Bearer {token}" if token else ""
    settings = {"headers": headers, "redirect_hosts": f"{hosts} {HUB_HOSTS}"}
    return WebStore(f"{endpoint}/{name}/resolve/{revision}", settings, timeout_seconds=60.0)


def _open_hub(url: str, config: Mapping[str, str]) -> Store:
    match = re.fullmatch(r"hf://buckets/([^/]+/[^/]+)/?(.*)", url)
    if match is None and (model := re.fullmatch(r"hf://([^/@]+/[^/@]+)@([A-Za-z0-9_.-]+)", url)):
        return _open_model(model[1], model[2], config)
    if match is None:
        raise ValueError(f"{url!r} is not a bucket: write hf://buckets/owner/name/prefix, or hf://owner/model@revision")
    from deltawire.store.hub import HubStore

    return HubStore(match[1], match[2].strip("/"), token=config.get("token"), endpoint=config.get("endpoint"))
