"""Any web server or CDN as a store to read from: objects are asked for by name; nothing is listed or written.

What a server sends is never trusted: no more is read than was asked for, ranges must be the ones asked for, and a
redirect is followed on the same host only, or to hosts that the user names.
"""

import os
import re
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn
from urllib.parse import quote

from deltawire.errors import MissingDependency, ObjectMissing, ReadOnlyStore, StoreUnavailable
from deltawire.hosts import split_url
from deltawire.store.base import MOST_GET_BYTES, Buffer, Pieces, Stat, check_key, check_range, check_size
from deltawire.store.failures import shorten
from deltawire.store.retry import retried

HEADERS, REDIRECT_HOSTS = "DELTAWIRE_WEB_HEADERS", "DELTAWIRE_WEB_REDIRECT_HOSTS"
MOST_REDIRECTS = 5
# A server that sends less is given up: no single wait of such a drip is long enough for a timeout.
SLOWEST_BYTES_PER_SECOND = 1 << 10

_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x20-\x7e]*)")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")


def _read_headers(text: str) -> dict[str, str]:
    """Headers, one `Name: value` a line. Values are secrets and never shown."""
    found = [_HEADER.fullmatch(line.strip()) for line in text.splitlines() if line.strip()]
    if None in found:
        raise ValueError(f"headers must be written as 'Name: value', one per line: check {HEADERS}, or config")
    return {match[1]: match[2] for match in found if match is not None}


class WebStore:
    """Objects under an http or https URL; `headers` and `redirect_hosts` come from `config` or the environment.

    A query, such as a signature, is sent with every request and never shown.
    """

    conditional = True
    listable = False

    def __init__(self, url: str, config: Mapping[str, str], *, timeout_seconds: float) -> None:
        if unknown := set(config) - {"headers", "redirect_hosts"}:
            raise ValueError(f"the settings of a web store are headers and redirect_hosts, not {min(unknown)!r}")
        self._headers = _read_headers(config.get("headers", os.environ.get(HEADERS, "")))
        self._hosts = config.get("redirect_hosts", os.environ.get(REDIRECT_HOSTS, "")).lower().split()
        base, _, query = url.partition("?")
        parts = split_url(base)
        if not parts.hostname or "@" in parts.netloc or "#" in url:
            raise ValueError("this is not a web server's URL: write https://host/run, without a user and without '#'")
        self.url = base.rstrip("/")
        self._query = f"?{query}" if query else ""
        self._timeout = timeout_seconds
        self._readable: str | None = None
        try:
            import httpx
        except ImportError:
            raise MissingDependency("http(s):// needs another package: pip install 'deltawire[web]'") from None
        self._httpx = httpx
        self._client = self._connect()

    def _connect(self) -> tuple[int, Any]:
        # A user's headers are not the client's: they would be sent to other hosts, too.
        client = self._httpx.Client(headers={"User-Agent": "deltawire"}, timeout=self._timeout)
        weakref.finalize(self, client.close)
        return os.getpid(), client

    def get(self, key: str, *, limit: int = MOST_GET_BYTES) -> bytes:
        def get() -> bytes:
            with self._answer("GET", key) as answer:
                self._check(answer, key)
                check_size(self.url, key, int(answer.headers.get("Content-Length", 0)), limit)
                data = self._read(answer, key, limit + 1)
            check_size(self.url, key, len(data), limit)
            return data

        return retried(get)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Read a range. A server without ranges is read from 0."""
        check_range(start, length)
        last = start + max(length, 1) - 1  # an empty range cannot be asked for
        with self._answer("GET", key, Range=f"bytes={start}-{last}") as answer:
            if answer.status_code == 416:  # it ends before
                return b""
            self._check(answer, key, 200, 206)
            if answer.status_code == 200:
                return self._read(answer, key, length, skip=start)
            num_bytes = self._check_range(answer, key, start, last)
            data = self._read(answer, key, num_bytes)
        if len(data) != num_bytes:
            raise self._unavailable(f"{len(data)} bytes of {key} came instead of {num_bytes}", key)
        return data[:length]

    def stat(self, key: str) -> Stat:
        def stat() -> Stat:
            with self._answer("HEAD", key) as answer:
                if answer.status_code == 416:  # a cache that fetches in slices, of an empty object
                    return Stat(key, 0, 0.0)
                self._check(answer, key)
                size, modified = answer.headers.get("Content-Length"), answer.headers.get("Last-Modified", "")
            if size is None:
                raise self._unavailable(f"the server does not say how large {key} is", key, refused=True)
            try:
                return Stat(key, int(size), parsedate_to_datetime(modified).timestamp())
            except (ValueError, OverflowError):
                return Stat(key, int(size), 0.0)

        return retried(stat)

    def put(self, key: str, data: Buffer | Pieces) -> None:
        self._refuse("written to")

    def create(self, key: str, data: bytes) -> None:
        self._refuse("written to")

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[Stat]:
        self._refuse("listed")

    def delete(self, keys: Iterable[str]) -> None:
        self._refuse("written to")

    def _refuse(self, what: str) -> NoReturn:
        raise ReadOnlyStore(
            f"{self.url} cannot be {what}: over http(s), objects can only be read by name. Use the bucket or folder "
            "behind it, such as s3://bucket/run",
            url=self.url,
        )

    @contextmanager
    def _answer(self, method: str, key: str, **headers: str) -> Iterator[Any]:
        """The answer to a request, after redirects, with a body that has not been read."""
        if self._client[0] != os.getpid():  # connections do not survive a fork
            self._client = self._connect()
        httpx = self._httpx
        sent = {"Accept-Encoding": "identity", **headers}
        try:
            own = target = httpx.URL(f"{self.url}/{quote(check_key(key))}{self._query}")
            for _ in range(MOST_REDIRECTS + 1):
                mine = self._headers if _origin(target) == _origin(own) else {}
                with self._client[1].stream(method, target, headers=sent | mine) as answer:
                    if not answer.is_redirect:
                        yield answer
                        return
                target = self._redirected(own, target, answer.headers.get("Location", ""), key)
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL) as error:
            # Not chained: it may hold the query.
            said = shorten(str(error)) or type(error).__name__
            raise self._unavailable(f"no answer for {key}: {said}", key) from None
        raise self._unavailable(f"{key} is redirected more than {MOST_REDIRECTS} times", key, refused=True)

    def _redirected(self, own: Any, target: Any, location: str, key: str) -> Any:
        to = target.join(location)
        where = shorten(f"{to.scheme}://{to.host}")
        if to.scheme != "https" and own.scheme == "https":
            raise self._unavailable(f"{key} is redirected from https to {where}, which is refused", key, refused=True)
        if _origin(to) != _origin(own) and to.host.lower() not in self._hosts:
            raise self._unavailable(
                f"{key} is redirected to {where}, which is refused: if that is as it should be, name the host in "
                f"{REDIRECT_HOSTS}",
                key, refused=True,
            )  # fmt: skip
        return to

    def _check(self, answer: Any, key: str, *accepted: int) -> None:
        """Accept an answer, or raise what its status means."""
        status = answer.status_code
        if status in (accepted or (200,)):
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                raise self._unavailable(f"the server sends {key} compressed: turn that off", key, refused=True)
            self._readable = self._readable or key
            return
        if status in (404, 410) or (status == 403 and self._hides_missing(key)):
            raise ObjectMissing(f"{self.url} has no {key}", url=self.url, key=key)
        if status in (401, 403):
            said = f"access to {key} was refused ({status}): check {HEADERS}, or the query of the URL"
            raise self._unavailable(said, key, refused=True)
        refused = 400 <= status < 500 and status not in (408, 425, 429)
        raise self._unavailable(f"the server answered {status} for {key}", key, refused=refused)

    def _hides_missing(self, key: str) -> bool:
        """Whether 403 stands for a missing object, as in buckets without listing: what was read first still can be."""
        if self._readable is None or self._readable == key:
            return False
        with self._answer("HEAD", self._readable) as answer:
            return bool(answer.status_code == 200)

    def _check_range(self, answer: Any, key: str, start: int, last: int) -> int:
        """The number of bytes in an answer that must be the range asked for, or all of it that there is."""
        stated = answer.headers.get("Content-Range", "")
        if found := _CONTENT_RANGE.fullmatch(stated):
            first, end, ends_there = int(found[1]), int(found[2]), found[3] == str(int(found[2]) + 1)
            if first == start <= end and (end == last or (end < last and ends_there)):
                return end - start + 1
        said = f"bytes {start}-{last} of {key} were requested, but the server sent {shorten(stated)!r}"
        raise self._unavailable(said, key)

    def _read(self, answer: Any, key: str, most: int, *, skip: int = 0) -> bytes:
        """Up to `most` bytes of the body, after some that are skipped. The connection is closed if more would come."""
        data, num_read, started = bytearray(), 0, time.monotonic()
        for piece in answer.iter_raw():
            data += piece[max(skip - num_read, 0) :]
            num_read += len(piece)
            if len(data) >= most:
                break
            seconds = time.monotonic() - started
            if seconds > self._timeout and num_read < seconds * SLOWEST_BYTES_PER_SECOND:
                raise self._unavailable(f"{key} arrives too slowly: {num_read} bytes in {seconds:.0f} s", key)
        return bytes(memoryview(data)[:most])

    def _unavailable(self, message: str, key: str, *, refused: bool = False) -> StoreUnavailable:
        return StoreUnavailable(f"{self.url}: {message}", url=self.url, key=key, refused=refused, uncertain=False)

    def __repr__(self) -> str:
        return f"WebStore({self.url!r})"


def _origin(url: Any) -> tuple[str, str, int]:
    return url.scheme, url.host, url.port or {"http": 80, "https": 443}.get(url.scheme, 0)
