"""A loopback double of the Hugging Face Hub: the Buckets API and the Xet content store behind it.

The unmodified `huggingface_hub` and `hf_xet` upload, list, stat, download, range-read and delete through it. Checked:

- Hub calls: the bearer token (401 without or with an unknown one, 403 on a bucket of another user), the bucket;
- content calls: only a token that this server issued, for this bucket's reads or writes, until it expires (a Hub
  token is refused); a data URL is good for exactly the bytes it was signed for;
- all content, as `hub_cas.py` says; a batch may only name content that was uploaded.

Not like the real Hub: every file is served by this one host (no CDN), global deduplication knows nothing, xorb
grants and version 2 of the shard call are answered with 404 (the client then uses version 1), a read token reads any
content whose hash is known, and names are not checked. How the real Hub answers when a missing file is deleted is not
known; here the batch says that it failed.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from tempfile import TemporaryDirectory
from typing import Any, ClassVar
from unittest.mock import patch
from urllib.parse import parse_qs, unquote, urlsplit

from support.hub_cas import Cas, Rejected

TREE_PAGE = 1000


@dataclass
class Reply:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class Refused(Exception):
    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.reply = Reply(status, json.dumps({"error": message}).encode(), headers)


def answer(value: object, **headers: str) -> Reply:
    return Reply(200, json.dumps(value).encode(), {"Content-Type": "application/json", **headers})


@dataclass
class Fault:
    kind: str
    count: int
    on: str


@dataclass
class Bucket:
    owner: str
    files: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Grant:
    """What a token for the content store allows."""

    bucket: str
    scope: str
    expires: float


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, list[str]]
    headers: Any
    body: bytes

    @property
    def bearer(self) -> str:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ")

    def byte_range(self, num_bytes: int) -> tuple[int, int] | None:
        """From the Range header: where to start, and the end, which is not part of it."""
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if not match:
            return None
        start = int(match[1])
        if start >= num_bytes:
            raise Refused(416, "range not satisfiable")
        return start, min(int(match[2]) + 1, num_bytes) if match[2] else num_bytes


class HubDouble:
    """The state of the server, and what it answers."""

    def __init__(self) -> None:
        self.token, self.other_token = f"hf_{secrets.token_hex(8)}", f"hf_{secrets.token_hex(8)}"
        self.requests: list[str] = []
        self.cas = Cas()
        self.cas_token_seconds = 3600.0
        self.retry_after = "1"
        self.locked: set[str] = set()
        """Paths that a batch may not change."""
        self.endpoint = ""
        # A client keeps what it has uploaded in a cache by content URL: no two servers may share one.
        self.cas_path = f"/cas-{secrets.token_hex(8)}"
        self._users = {self.token: "me", self.other_token: "other"}
        self._buckets: dict[str, Bucket] = {}
        self._grants: dict[str, Grant] = {}
        self._faults: list[Fault] = []
        self._secret = secrets.token_bytes(16)
        self._lock = threading.RLock()

    def create_bucket(self, name: str, *, owner: str = "me") -> None:
        """`owner` is "me", who has `token`, or "other", who has `other_token`."""
        self._buckets[name] = Bucket(owner)

    def fill(self, name: str, paths: Iterable[str]) -> None:
        """Many empty files, without a client."""
        for path in paths:
            self._apply({"type": "addFile", "path": path, "xetHash": "0" * 64, "mtime": 0}, self._buckets[name])

    def fail_next(self, kind: str, count: int = 1, *, on: str = "/api/buckets/") -> None:
        """The next requests whose path has `on` in it fail.

        kind: a status such as "503" ("200" is a page of something else); "429" also says when to come back; "lost"
        does what was asked, then answers 500; "drop" closes the connection without an answer.
        """
        self._faults.append(Fault(kind, count, on))

    def num_requests(self, start: str) -> int:
        return sum(line.startswith(start) for line in self.requests)

    def handle(self, request: Request) -> Reply | None:
        with self._lock:
            self.requests.append(f"{request.method} {request.path}")
            fault = self._next_fault(request.path)
            if fault not in ("", "lost"):
                return self._failure(fault)
            try:
                reply = self._route(request)
            except Refused as refused:
                reply = refused.reply
            except Rejected as rejected:
                reply = Refused(400, str(rejected)).reply
            return self._failure("500") if fault else reply

    def _next_fault(self, path: str) -> str:
        for fault in self._faults:
            if fault.count and fault.on in path:
                fault.count -= 1
                return fault.kind
        return ""

    def _failure(self, kind: str) -> Reply | None:
        if kind == "drop":
            return None
        headers = {"Retry-After": self.retry_after} if kind == "429" else {}
        return Reply(int(kind), b"<html>as asked</html>", headers)

    def _route(self, request: Request) -> Reply:
        if request.path.startswith(self.cas_path):
            return self._route_cas(request, request.path.removeprefix(self.cas_path))
        for method, pattern, handler in ROUTES:
            match = re.fullmatch(pattern, request.path)
            if match and request.method in method:
                name = unquote(match["bucket"])
                return handler(
                    self, request, name, self._bucket(request, name), unquote(match.groupdict()["rest"] or "")
                )
        raise Refused(404, f"no such route: {request.method} {request.path}")

    def _bucket(self, request: Request, name: str) -> Bucket:
        user = self._users.get(request.bearer)
        if user is None:
            raise Refused(401, "Invalid username or password.")
        if name not in self._buckets:
            raise Refused(404, "Repository not found", "RepoNotFound")
        if self._buckets[name].owner != user:
            raise Refused(403, "Forbidden: you don't have access to this bucket")
        return self._buckets[name]

    def info(self, request: Request, name: str, bucket: Bucket, rest: str) -> Reply:
        sizes = [entry["size"] for entry in bucket.files.values()]
        about = {"id": name, "private": True, "createdAt": _now(), "size": sum(sizes), "totalFiles": len(sizes)}
        return answer(about)

    def xet_token(self, request: Request, name: str, bucket: Bucket, rest: str) -> Reply:
        token, expires = f"xet_{secrets.token_hex(8)}", time.time() + self.cas_token_seconds
        self._grants[token] = Grant(name, rest, expires)
        return answer({"accessToken": token, "exp": int(expires), "casUrl": self.endpoint + self.cas_path})

    def tree(self, request: Request, name: str, bucket: Bucket, rest: str) -> Reply:
        found = [entry for path, entry in bucket.files.items() if path.startswith(rest)]
        if request.query.get("recursive") != ["true"]:
            found = _one_level(found, rest)
        start = int(request.query.get("cursor", ["0"])[0])
        page, headers = found[start : start + TREE_PAGE], {}
        if start + TREE_PAGE < len(found):
            where = f"{self.endpoint}{request.path}?recursive={request.query.get('recursive', ['false'])[0]}"
            headers["Link"] = f'<{where}&cursor={start + TREE_PAGE}>; rel="next"'
        return answer(page, **headers)

    def paths_info(self, request: Request, name: str, bucket: Bucket, rest: str) -> Reply:
        paths = json.loads(request.body)["paths"]
        if len(paths) > 1000:
            raise Refused(400, "too many paths")
        return answer([bucket.files[path] for path in paths if path in bucket.files])

    def batch(self, request: Request, name: str, bucket: Bucket, rest: str) -> Reply:
        steps = [json.loads(line) for line in request.body.splitlines()]
        if len(steps) > 1000:
            raise Refused(400, "too many operations")
        failed = [{"path": step["path"], "error": why} for step in steps if (why := self._apply(step, bucket))]
        reply = answer({"success": not failed, "succeeded": len(steps) - len(failed), "failed": failed})
        reply.status = 422 if len(failed) == len(steps) else 200
        return reply

    def _apply(self, step: dict[str, Any], bucket: Bucket) -> str:
        """One operation of a batch; why it failed."""
        path = step["path"]
        if path in self.locked:
            return "locked"
        if step["type"] == "deleteFile":
            return "" if bucket.files.pop(path, None) else "file not found"
        if step["type"] != "addFile":
            return f"unknown operation {step['type']}"
        if step["xetHash"] not in self.cas.files:
            return f"content {step['xetHash']} was never uploaded"
        size = self.cas.files[step["xetHash"]].num_bytes
        mtime = _time(datetime.fromtimestamp(step["mtime"] / 1000, UTC))
        entry = {"type": "file", "path": path, "size": size, "xetHash": step["xetHash"]}
        bucket.files[path] = entry | {"mtime": mtime, "uploadedAt": _now()}
        return ""

    def resolve(self, request: Request, name: str, bucket: Bucket, rest: str) -> Reply:
        entry = bucket.files.get(rest)
        if entry is None:
            raise Refused(404, "Entry not found", "EntryNotFound")
        refresh = f"{self.endpoint}/api/buckets/{name}/xet-read-token"
        headers = {"X-Xet-Hash": entry["xetHash"], "X-Linked-Size": str(entry["size"])}
        headers["Link"] = f'<{refresh}>; rel="xet-auth"'
        if request.method == "HEAD":
            return Reply(200, b"", headers)
        data, span = self.cas.read(entry["xetHash"]), request.byte_range(entry["size"])
        if span is None:
            return Reply(200, data, headers)
        headers["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{entry['size']}"
        return Reply(206, data[slice(*span)], headers)

    def _route_cas(self, request: Request, path: str) -> Reply:
        if request.bearer in self._users:
            raise Refused(401, "a token of the Hub is not for the content store")
        parts = path.strip("/").split("/")
        match (request.method, *parts):
            case ("GET", "data", xorb):
                return self._xorb_bytes(request, xorb)
            case ("GET", "v1" | "v2" as version, "reconstructions", name):
                self._grant(request, "read")
                return self._reconstruction(request, name, int(version[1]))
            case ("POST", "v1", "xorbs", "default", name):
                self._grant(request, "write")
                return answer({"was_inserted": self.cas.put_xorb(name, request.body)})
            case ("POST", "v1", "shards"):
                self._grant(request, "write")
                self.cas.put_shard(request.body)
                return answer({"result": 1})
        self._grant(request, "read")
        raise Refused(404, f"no such route: {request.method} {path}")

    def _grant(self, request: Request, scope: str) -> None:
        grant = self._grants.get(request.bearer)
        if grant is None or grant.expires <= time.time():
            raise Refused(401, "not a token of the content store, or expired")
        if scope == "write" and grant.scope != "write":
            raise Refused(403, "a read token cannot write")

    def _reconstruction(self, request: Request, name: str, version: int) -> Reply:
        if name not in self.cas.files:
            raise Refused(404, "no such file")
        num_bytes = self.cas.files[name].num_bytes
        start, end = request.byte_range(num_bytes) or (0, num_bytes)
        return answer(self.cas.reconstruction(name, start, end, self._signed_url, version))

    def _signed_url(self, xorb: str, start: int, end: int) -> str:
        return f"{self.endpoint}{self.cas_path}/data/{xorb}?range={start}-{end}&sign={self._sign(xorb, start, end)}"

    def _sign(self, xorb: str, start: int, end: int) -> str:
        return hmac.new(self._secret, f"{xorb} {start} {end}".encode(), hashlib.sha256).hexdigest()

    def _xorb_bytes(self, request: Request, xorb: str) -> Reply:
        raw = self.cas.xorbs[xorb].raw
        start, end = request.byte_range(len(raw)) or (0, len(raw))
        if request.query.get("sign") != [self._sign(xorb, start, end - 1)]:
            raise Refused(403, "signed for other bytes")
        return Reply(206, raw[start:end], {"Content-Range": f"bytes {start}-{end - 1}/{len(raw)}"})


BUCKET = r"/api/buckets/(?P<bucket>[^/]+/[^/]+)"
ROUTES = [
    ("GET", BUCKET + r"(?P<rest>)", HubDouble.info),
    ("GET", BUCKET + r"/xet-(?P<rest>read|write)-token", HubDouble.xet_token),
    ("GET", BUCKET + r"/tree(?:/(?P<rest>.*))?", HubDouble.tree),
    ("POST", BUCKET + r"/paths-info(?P<rest>)", HubDouble.paths_info),
    ("POST", BUCKET + r"/batch(?P<rest>)", HubDouble.batch),
    (("GET", "HEAD"), r"/buckets/(?P<bucket>[^/]+/[^/]+)/resolve/(?P<rest>.*)", HubDouble.resolve),
]


def _time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _now() -> str:
    return _time(datetime.now(UTC))


def _one_level(entries: list[dict[str, Any]], prefix: str) -> list[dict[str, Any]]:
    """Files and folders directly below a prefix."""
    is_folder = any(entry["path"].startswith(prefix + "/") for entry in entries)
    folder = prefix if is_folder else prefix.rpartition("/")[0]
    at = len(folder) + 1 if folder else 0
    files = [entry for entry in entries if "/" not in entry["path"][at:]]
    folders = {entry["path"][: entry["path"].index("/", at)] for entry in entries if "/" in entry["path"][at:]}
    return files + [{"type": "directory", "path": path, "uploadedAt": _now()} for path in sorted(folders)]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    double: ClassVar[HubDouble]

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        reply = self.double.handle(Request(self.command, url.path, parse_qs(url.query), self.headers, body))
        if reply is None:
            self.close_connection = True
            return
        self.send_response(reply.status)
        for key, value in ({"Content-Length": str(len(reply.body))} | reply.headers).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    do_GET = do_POST = do_HEAD = _serve  # noqa: N815

    def log_message(self, *args: Any) -> None:
        """Nothing: `requests` has them all."""


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


@contextmanager
def hub_double() -> Iterator[HubDouble]:
    """A running server on a free port, and an environment in which its clients send nothing elsewhere.

    Set while it runs: HF_XET_TELEMETRY_ENABLED=0 and HF_HUB_DISABLE_TELEMETRY=1 (no reports, and no question to
    huggingface.co about the program that runs), HF_XET_CACHE (what hf_xet remembers goes to a folder of this test).
    hf_xet reads its variables when a session starts, huggingface_hub when it is first imported.
    """
    double = HubDouble()
    handler = type("BoundHandler", (Handler,), {"double": double})
    server = Server(("127.0.0.1", 0), handler)
    double.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        with TemporaryDirectory(ignore_cleanup_errors=True) as cache, _quiet_clients(cache):
            yield double
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def _quiet_clients(cache: str) -> Iterator[None]:
    variables = {"HF_XET_TELEMETRY_ENABLED": "0", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_XET_CACHE": cache}
    with patch.dict(os.environ, variables):
        from huggingface_hub import constants

        with patch.object(constants, "HF_HUB_DISABLE_TELEMETRY", True):
            yield
