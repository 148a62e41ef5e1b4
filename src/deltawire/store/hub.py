"""Hugging Face Buckets: the Hub stores names, and its content store (Xet) stores and deduplicates the bytes.

This uses the session, token and headers of `huggingface_hub`, and `hf_xet` for the transfer of content. The five calls
on names are sent from here, because those of `HfApi` draw progress bars that only a global switch turns off, have no
timeout, and wait as long as the server asks.

There is no conditional write: see `create`.
"""

import importlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from datetime import datetime
from itertools import islice
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

from deltawire.errors import Conflict, MissingDependency, ObjectMissing, StoreUnavailable
from deltawire.store import base
from deltawire.store.base import MOST_GET_BYTES, Buffer, Pieces, Stat, check_key, check_range, check_size, slices
from deltawire.store.failures import shorten
from deltawire.store.retry import backoff_seconds, create_once

# Up to this size, one plain request is faster than asking the content store for the parts of the object.
PLAIN_BYTES = 8 << 20
PIECE_BYTES = 8 << 20
BATCH_LENGTH = 1000

TIMEOUT_SECONDS = 60.0
NUM_REPEATS = 5
LONGEST_WAIT_SECONDS = 60.0

NO_ANSWER = 0
# After a refusal nothing was done; after the others it may have been.
REFUSED = frozenset({429, 503})
UNSURE = frozenset({NO_ANSWER, 408, 500, 502, 504})
PASSING = REFUSED | UNSURE

# The Hub's description of an object: path, size, xetHash, times.
Entry = dict[str, Any]


class HubStore:
    """A bucket on the Hugging Face Hub, or a folder of it."""

    conditional = False

    def __init__(
        self, owner_and_name: str, prefix: str = "", *, token: str | None = None, endpoint: str | None = None
    ) -> None:
        bucket, folder = owner_and_name.strip("/"), prefix.strip("/")
        if bucket.count("/") != 1:
            raise ValueError(f"a bucket's name is owner/name, not {owner_and_name!r}")
        self.url = f"hf://buckets/{bucket}/{folder}".rstrip("/")
        base.check_prefix(self.url, folder)
        self._folder = folder + "/" if folder else ""
        self._hub = _Hub(self.url, bucket, token, endpoint)

    def put(self, key: str, data: Buffer | Pieces) -> None:
        check_key(key)
        self._add(key, self._hub.upload(key, data), repeated=PASSING)

    def create(self, key: str, data: bytes) -> None:
        # Without a conditional write, two writers that both find nothing may each read back their own bytes before the
        # other replaces them, and both succeed. Writers must be kept apart by other means.
        if self._find(key) is not None:
            raise Conflict(f"{key} already exists in {self.url}", url=self.url, key=key)
        content = self._hub.upload(key, data)

        def write() -> None:
            try:
                self._add(key, content, repeated=REFUSED)
            except StoreUnavailable as error:
                if error.fields.get("status") not in UNSURE:
                    error.fields["refused"] = True
                    raise
            # Also after success: what counts is what is read back.
            raise self._hub.unavailable(f"{key} was written, but is not seen", key)

        create_once(write, lambda: self.get(key, limit=len(data)), data)

    def get(self, key: str, *, limit: int = MOST_GET_BYTES) -> bytes:
        entry = self._entry(key)
        check_size(self.url, key, entry["size"], limit)
        if entry["size"] == 0:
            return b""
        if entry["size"] > PLAIN_BYTES:
            return self._hub.download(key, entry, 0, entry["size"])
        return bytes(self._hub.resolve(self._path(key), key).content)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        if 0 < length <= PLAIN_BYTES:
            reply = self._hub.resolve(self._path(key), key, f"bytes={start}-{start + length - 1}")
            content: bytes = b"" if reply.status_code == 416 else reply.content
            return content if reply.status_code == 206 else content[start : start + length]
        entry = self._entry(key)
        end = min(start + length, entry["size"])
        return self._hub.download(key, entry, start, end) if start < end else b""

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[Stat]:
        # The Hub lists pages in no guaranteed order: all of them are read before the first object is returned.
        found = [self._stat(entry) for entry in self._hub.tree(self._folder + prefix) if entry["type"] == "file"]
        # The Hub's prefix may end anywhere in a name; checked again here, in case that ever changes to whole folders.
        wanted = (stat for stat in found if stat.key.startswith(prefix) and stat.key > after)
        yield from sorted(wanted, key=lambda stat: stat.key)

    def stat(self, key: str) -> Stat:
        return self._stat(self._entry(key))

    def delete(self, keys: Iterable[str]) -> None:
        rest = iter(keys)
        while some := [*islice(rest, BATCH_LENGTH)]:
            steps = [{"type": "deleteFile", "path": self._path(key)} for key in some]
            failed = [failure["path"] for failure in self._hub.batch(steps, some[0], repeated=PASSING)]
            if left := [entry["path"].removeprefix(self._folder) for entry in self._hub.paths_info(failed, some[0])]:
                raise self._hub.unavailable(f"{len(left)} objects were not removed, {left[0]} is one", left[0])

    def _path(self, key: str) -> str:
        return self._folder + check_key(key)

    def _find(self, key: str) -> Entry | None:
        return next(iter(self._hub.paths_info([self._path(key)], key)), None)

    def _entry(self, key: str) -> Entry:
        entry = self._find(key)
        if entry is None:
            raise self._hub.missing(key)
        return entry

    def _stat(self, entry: Entry) -> Stat:
        # `mtime` is set by the writer; `uploadedAt` is the Hub's own clock.
        moment = entry.get("uploadedAt") or entry.get("mtime")
        modified = datetime.fromisoformat(moment).timestamp() if moment else 0.0
        return Stat(entry["path"].removeprefix(self._folder), entry["size"], modified)

    def _add(self, key: str, content: str, *, repeated: Set[int]) -> None:
        """Assign a name to uploaded content."""
        step = {"type": "addFile", "path": self._path(key), "xetHash": content, "mtime": int(time.time() * 1000)}
        for failure in self._hub.batch([step], key, repeated=repeated):
            raise self._hub.unavailable(f"{key} was not written: {failure.get('error')}", key)


class _Hub:
    """The calls to the Hub and its content store for one bucket, with full paths, and the translation of errors."""

    def __init__(self, url: str, bucket: str, token: str | None, endpoint: str | None) -> None:
        for package in ("huggingface_hub", "hf_xet"):
            _load(package)
        self._url, self._bucket, self._token = url, bucket, token
        self._endpoint = (endpoint or _load("huggingface_hub.constants").ENDPOINT).rstrip("/")
        self._session: tuple[int, Any] | None = None

    def batch(self, steps: Iterable[Entry], key: str, *, repeated: Set[int]) -> Any:
        """Run operations and return those that failed. The others were done: a batch is not a transaction."""
        lines = "".join(json.dumps(step) + "\n" for step in steps).encode()
        kind = {"Content-Type": "application/x-ndjson"}
        reply = self._send("POST", self._api("batch"), key, repeated, (422,), headers=kind, content=lines)
        return self._json(reply, key).get("failed", ())

    def paths_info(self, paths: Iterable[str], key: str) -> Any:
        """The entries of the paths that exist."""
        wanted = {"paths": [*paths]}
        if not wanted["paths"]:
            return ()
        return self._json(self._send("POST", self._api("paths-info"), key, json=wanted), key)

    def tree(self, prefix: str) -> Iterator[Entry]:
        """All files whose path starts with `prefix`, page by page."""
        page: str | None = self._api("tree" + ("/" + quote(prefix, safe="") if prefix else "")) + "?recursive=true"
        while page:
            reply = self._send("GET", page, "")
            yield from self._json(reply, "")
            page = reply.links.get("next", {}).get("url")

    def resolve(self, path: str, key: str, wanted: str = "") -> Any:
        """The bytes of a file, without the content store; status 416 if the wanted range starts after its end."""
        url = f"{self._endpoint}/buckets/{self._bucket}/resolve/{quote(path, safe='')}"
        headers = {"Accept-Encoding": "identity"} | ({"Range": wanted} if wanted else {})
        return self._send("GET", url, key, accepted=(416,) if wanted else (), headers=headers)

    def upload(self, key: str, data: Buffer | Pieces) -> str:
        """Upload the bytes that the content store does not have yet, and return the hash of the content."""
        commit = self._native(key, self._xet().new_upload_commit, **self._access("write", key))
        try:
            stream = self._native(key, commit.start_upload_stream, sha256=_load("hf_xet").SKIP_SHA256)
            # hf_xet takes bytes; the pieces are so small that copies do not matter.
            for piece in slices(data, PIECE_BYTES):
                self._native(key, stream.write, bytes(piece))
            result = self._native(key, stream.finish)
            self._native(key, commit.wait_to_finish)
        except BaseException:
            commit.abort()
            raise
        return str(result.xet_info.hash)

    def download(self, key: str, entry: Entry, start: int, end: int) -> bytes:
        """Read a range, over as many connections as hf_xet chooses."""
        info = _load("hf_xet").XetFileInfo(entry["xetHash"], entry["size"])
        group = self._native(key, self._xet().new_download_stream_group, **self._access("read", key))
        stream = self._native(key, group.download_stream, info, start, end)
        content: bytes = self._native(key, b"".join, stream)
        if len(content) != end - start:
            raise self.unavailable(f"{len(content)} bytes of {key} came instead of {end - start}", key)
        return content

    def missing(self, key: str) -> ObjectMissing:
        return ObjectMissing(f"{key} is not in {self._url}", url=self._url, key=key)

    def unavailable(self, message: str, key: str, **fields: Any) -> StoreUnavailable:
        return StoreUnavailable(f"{self._url}: {message}", url=self._url, key=key, **fields)

    def _api(self, call: str) -> str:
        return f"{self._endpoint}/api/buckets/{self._bucket}/{call}"

    def _send(
        self, method: str, url: str, key: str, repeated: Set[int] = PASSING, accepted: Sequence[int] = (), **given: Any
    ) -> Any:
        """Send one request, repeated a few times while the status is one of `repeated`."""
        given["headers"] = self._headers() | given.get("headers", {})
        for attempt in range(NUM_REPEATS + 1):
            reply = self._ask(method, url, key, given)
            if NO_ANSWER < reply.status_code < 400 or reply.status_code in accepted:
                return reply
            wait = _wait_seconds(reply, attempt)
            if reply.status_code not in repeated or wait > LONGEST_WAIT_SECONDS or attempt == NUM_REPEATS:
                break
            time.sleep(wait)
        raise self._refusal(reply, key)

    def _json(self, reply: Any, key: str) -> Any:
        try:
            return reply.json()
        except ValueError as error:
            raise self.unavailable(f"{reply.url} answered, but not what the Hub says", key) from error

    def _ask(self, method: str, url: str, key: str, options: dict[str, Any]) -> Any:
        httpx, session = _load("httpx2"), _load("huggingface_hub.utils").get_session()
        try:
            return session.request(method, url, timeout=TIMEOUT_SECONDS, **options)
        except (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError) as error:
            return SimpleNamespace(status_code=NO_ANSWER, headers={}, error=error)
        except (httpx.HTTPError, OSError) as error:
            raise self.unavailable(f"{self._endpoint} cannot be asked: {shorten(str(error))}", key) from None

    def _headers(self) -> dict[str, str]:
        build = _load("huggingface_hub.utils").build_hf_headers
        return dict(build(token=self._token, library_name="deltawire"))

    def _access(self, scope: str, key: str) -> dict[str, Any]:
        """The address of the content store and a token for it; requested here so that a refusal is explained."""
        url = self._api(f"xet-{scope}-token")
        granted, headers = self._json(self._send("GET", url, key), key), self._headers()
        return {
            "endpoint": granted["casUrl"],
            "token": granted["accessToken"],
            "token_expiry_unix_secs": granted["exp"],
            "token_refresh_url": url,
            "token_refresh_headers": headers,
            # The Hub's token must not be sent to the content store.
            "custom_headers": {name: value for name, value in headers.items() if name.lower() != "authorization"},
        }

    def _xet(self) -> Any:
        """The session of this process; its threads do not survive a fork."""
        if self._session is None or self._session[0] != os.getpid():
            self._session = os.getpid(), _load("hf_xet").XetSession()
        return self._session[1]

    def _native(self, key: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return call(*args, **options)
        except (OSError, RuntimeError, ValueError) as error:
            # Not chained: it may hold signed URLs.
            said = shorten(str(error))
            raise self.unavailable(f"the content of {key} could not be transferred: {said}", key) from None

    def _refusal(self, reply: Any, key: str) -> ObjectMissing | StoreUnavailable:
        status = reply.status_code
        if status == 404 and reply.headers.get("X-Error-Code") == "EntryNotFound":
            return self.missing(key)
        if status == NO_ANSWER:
            said = f"no answer from {self._endpoint}: {reply.error or type(reply.error).__name__}"
        elif status == 404:
            said = f"the bucket does not exist; create it with: hf buckets create {self._bucket}"
        elif status in (401, 403):
            said = f"no access ({status}: {_message(reply)}) with {self._which_token()}"
        else:
            said = f"the Hub answered {status}: {_message(reply)}"
        return self.unavailable(said, key, status=status)

    def _which_token(self) -> str:
        if self._token is not None:
            return "the token that was given"
        if _load("huggingface_hub").get_token() is None:
            return "no token: none was given, HF_TOKEN is not set, and there was no `hf auth login`"
        return "the token from HF_TOKEN or `hf auth login`"


def _load(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependency("hf:// needs huggingface_hub and hf-xet: pip install 'deltawire[hub]'") from error


def _wait_seconds(reply: Any, attempt: int) -> float:
    """How long to wait: what the server asks for in one of the Hub's two headers, or exponential backoff."""
    limit = _load("huggingface_hub.utils").parse_ratelimit_headers(reply.headers)
    if reply.status_code == 429 and limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    asked = reply.headers.get("Retry-After", "")
    return float(asked) if asked.isdecimal() else backoff_seconds(attempt)


def _message(reply: Any) -> str:
    try:
        said = reply.json().get("error")
    except (ValueError, AttributeError):
        said = None
    return str(said or reply.headers.get("X-Error-Message") or reply.reason_phrase)
