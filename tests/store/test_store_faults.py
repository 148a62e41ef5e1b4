"""What stores do on a bad network: a proxy that misbehaves stands before a real S3 server."""

import hashlib
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from deltawire.errors import Conflict, CorruptObject, ObjectMissing, StoreUnavailable
from deltawire.store import open_store
from deltawire.store.retry import create_once
from deltawire.store.transfer import download
from support.fault_proxy import FaultProxy, Rule
from support.servers import BUCKET, free_ports

BLOB = np.random.default_rng(3).integers(0, 256, 3 << 20, np.uint8).tobytes()


@pytest.fixture
def proxy(s3_server):
    with FaultProxy("127.0.0.1", s3_server.port) as proxy:
        yield proxy


@pytest.fixture
def direct(s3_server, request):
    return open_store(f"s3://{BUCKET}/{request.node.name}", config=s3_server.config)


@pytest.fixture
def through(s3_server, proxy, request):
    """Opens the same prefix as `direct`, through the proxy."""

    def open_(**options):
        config = s3_server.config | {"endpoint": proxy.endpoint}
        return open_store(f"s3://{BUCKET}/{request.node.name}", **{"config": config, "timeout_seconds": 2, **options})

    return open_


def test_busy_servers(proxy, through):
    store = through()
    for method, call in (("PUT", lambda: store.put("a", BLOB)), ("GET", lambda: store.get("a"))):
        rule = Rule("status", method=method, count=3, retry_after=1)
        proxy.rules = [rule]
        call()
        assert rule.hits == 3
    assert store.get("a") == BLOB


def test_a_server_that_stays_busy(proxy, through):
    store = through(retries=1)
    proxy.rules = [rule := Rule("status", count=-1)]
    with pytest.raises(StoreUnavailable, match="503") as caught:
        store.get("a")
    assert rule.hits == 2
    assert not caught.value.refused
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("kind", ["reset", "close"])
def test_connections_that_end_in_a_body(proxy, through, direct, kind):
    direct.put("a", BLOB)
    proxy.rules = [rule := Rule(kind, method="GET", after_bytes=1_000_000, count=2)]
    assert through().get("a") == BLOB
    assert through().get_range("a", 5, 2 << 20) == BLOB[5:][: 2 << 20]
    assert rule.hits == 2


def test_a_body_that_stalls(proxy, through, direct):
    direct.put("a", BLOB)
    proxy.rules = [Rule("stall", method="GET", after_bytes=1_000_000, seconds=60)]
    started = time.monotonic()
    assert through(timeout_seconds=0.5).get("a") == BLOB
    assert time.monotonic() - started < 30


def test_a_server_that_does_not_answer(proxy, through):
    proxy.rules = [Rule("latency", seconds=60, count=-1)]
    started = time.monotonic()
    with pytest.raises(StoreUnavailable):
        through(timeout_seconds=0.3, retries=1).get("a")
    assert time.monotonic() - started < 30


def test_a_slow_line_is_no_stall(proxy, through, direct):
    """The upload takes longer than the server may be silent, and so does the download."""
    store = through(timeout_seconds=1, retries=0)
    proxy.rate_bytes_per_second = 1.2e6
    started = time.monotonic()
    store.put("a", BLOB)
    assert time.monotonic() - started > 2
    assert store.get("a") == BLOB
    assert proxy.stats.by_method == {"PUT": 1, "GET": 1}


@pytest.mark.parametrize("path", ["", "partNumber"])
def test_connections_that_end_in_an_upload(proxy, through, direct, path):
    blob = BLOB * (12 if path else 1)
    proxy.rules = [rule := Rule("reset_upload", method="PUT", path=path, after_bytes=1_000_000, count=2)]
    through().put("a", [blob])
    assert rule.hits == 2
    assert direct.get("a") == blob


def test_an_upload_is_repeated_from_its_first_piece(proxy, through, direct):
    class Counted:
        times = 0

        def __iter__(self):
            self.times += 1
            yield from [BLOB] * 12

    pieces = Counted()
    proxy.rules = [Rule("reset_upload", method="PUT", path="partNumber=2", after_bytes=1_000_000)]
    through(retries=0).put("a", pieces)
    assert pieces.times == 2
    assert direct.get("a") == BLOB * 12


def test_the_reply_to_the_last_step_of_an_upload_is_lost(proxy, through, direct):
    proxy.rules = [rule := Rule("drop_reply", method="POST", path="uploadId")]
    through().put("a", [BLOB] * 12)
    assert rule.hits == 1
    assert direct.get("a") == BLOB * 12


def test_a_flipped_bit_is_caught_by_download(proxy, through, direct, tmp_path, monkeypatch):
    direct.put("a", BLOB)
    monkeypatch.setattr("deltawire.store.transfer.PART_BYTES", 1 << 20)
    info = {"num_bytes": len(BLOB), "sha256": hashlib.sha256(BLOB).hexdigest()}
    proxy.rules = [Rule("flip", method="GET", after_bytes=12345)]
    assert through().get("a") != BLOB  # nothing below notices
    proxy.rules = [rule := Rule("flip", method="GET", after_bytes=12345)]
    download(through(), "a", tmp_path / "file", **info)
    assert rule.hits == 1
    assert (tmp_path / "file").read_bytes() == BLOB
    proxy.rules = [Rule("flip", method="GET", after_bytes=12345, count=-1)]
    with pytest.raises(CorruptObject):
        download(through(), "a", tmp_path / "other", **info)


def test_a_lost_reply_to_a_create_is_a_success(proxy, through, direct):
    proxy.rules = [Rule("drop_reply", method="PUT")]
    through().create("a", b"mine")
    assert direct.get("a") == b"mine"
    assert proxy.stats.by_method == {"PUT": 1, "GET": 1}


def test_a_lost_reply_when_another_was_first(proxy, through, direct):
    direct.create("a", b"another's")
    proxy.rules = [Rule("drop_reply", method="PUT")]
    with pytest.raises(Conflict) as caught:
        through().create("a", b"mine")
    assert caught.value.key == "a"
    assert direct.get("a") == b"another's"


def test_a_create_that_never_arrived_is_repeated(proxy, through, direct):
    proxy.rules = [rule := Rule("reset_upload", method="PUT", count=2)]
    through().create("a", b"mine")
    assert rule.hits == 2
    assert direct.get("a") == b"mine"


def test_a_create_that_cannot_be_read_back_is_uncertain(proxy, through, direct):
    proxy.rules = [Rule("drop_reply", method="PUT"), Rule("status", method="GET", count=-1)]
    with pytest.raises(StoreUnavailable, match="not known") as caught:
        through(retries=0).create("a", b"mine")
    assert caught.value.uncertain
    assert direct.get("a") == b"mine"


def test_a_refused_create_is_not_repeated(proxy, through):
    proxy.rules = [rule := Rule("status", status=403, count=-1)]
    with pytest.raises(StoreUnavailable, match="refused") as caught:
        through().create("a", b"mine")
    assert rule.hits == 1
    assert not caught.value.uncertain


def test_a_server_that_is_gone(s3_server):
    config = s3_server.config | {"endpoint": f"http://127.0.0.1:{free_ports(1)[0]}"}
    store = open_store(f"s3://{BUCKET}/x", config=config, retries=2)
    calls = (store.get, store.stat, store.list, lambda key: store.put(key, b""), lambda key: store.delete([key, "b"]))
    for call in (*calls, lambda key: store.create(key, b"")):
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            call("a")
        assert time.monotonic() - started < 30
    said = set()
    for _ in range(2):
        with pytest.raises(StoreUnavailable) as caught:
            store.get("a")
        said.add(str(caught.value))
    assert len(said) == 1, "who watches shows a fault once, and how long it took is not the fault"


@contextmanager
def silent_server():
    """Takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_silent_metadata_address_does_not_hold_up(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    started = time.monotonic()
    with silent_server() as endpoint, pytest.raises(StoreUnavailable, match=r"no credentials.*AWS_ACCESS_KEY_ID"):
        open_store("s3://bucket", config={"metadata_endpoint": endpoint})
    assert time.monotonic() - started < 30


class Answers:
    """A write or a read that does one thing after the other."""

    def __init__(self, *steps):
        self.steps = list(steps)

    def __call__(self):
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return step


@pytest.fixture
def no_waits(monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


@pytest.mark.usefixtures("no_waits")
def test_create_once_when_our_first_try_lands_late():
    write = Answers(StoreUnavailable("lost"), Conflict("there"))
    create_once(write, Answers(ObjectMissing("not yet"), b"mine"), b"mine")
    assert write.steps == []


@pytest.mark.usefixtures("no_waits")
def test_create_once_when_a_bit_flips_on_the_way_back():
    create_once(Answers(StoreUnavailable("lost")), Answers(b"nine", b"mine"), b"mine")
    with pytest.raises(StoreUnavailable, match="not known"):
        create_once(Answers(StoreUnavailable("lost")), Answers(b"nine", b"line"), b"mine")
    with pytest.raises(Conflict):
        create_once(Answers(StoreUnavailable("lost")), Answers(b"other", b"other"), b"mine")


@pytest.mark.usefixtures("no_waits")
def test_create_once_gives_up():
    write, read = Answers(*[StoreUnavailable("lost")] * 9), Answers(*[ObjectMissing("no")] * 9)
    with pytest.raises(StoreUnavailable, match="not known") as caught:
        create_once(write, read, b"mine")
    assert caught.value.uncertain
    assert len(write.steps) == 5


class Echo(BaseHTTPRequestHandler):
    """Answers with the body of the request, in chunks; reads it in chunks too."""

    protocol_version = "HTTP/1.1"

    def do_PUT(self):
        body = b""
        if length := self.headers.get("Content-Length"):
            body = self.rfile.read(int(length))
        else:
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))

    def log_message(self, *arguments):
        pass


@pytest.fixture
def echo_proxy():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    with FaultProxy("127.0.0.1", server.server_port) as proxy:
        yield proxy
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_proxy_passes_chunks_and_interim_answers(echo_proxy):
    with socket.create_connection(("127.0.0.1", echo_proxy.port)) as client, client.makefile("rb") as answers:
        for _ in range(2):  # the connection is kept
            client.sendall(b"PUT / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n")
            assert answers.readline() == b"HTTP/1.1 100 Continue\r\n"
            assert answers.readline() == b"\r\n"
            client.sendall(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
            assert answers.readline() == b"HTTP/1.1 200 OK\r\n"
            while answers.readline() != b"\r\n":
                pass
            assert [answers.readline() for _ in range(4)] == [b"5\r\n", b"abcde\r\n", b"0\r\n", b"\r\n"]
    assert (echo_proxy.stats.connections, echo_proxy.stats.requests) == (1, 2)
    assert (echo_proxy.stats.bytes_up, echo_proxy.stats.bytes_down) == (10, 10)


def test_the_rate_is_shared_by_all_connections(proxy, through, direct):
    direct.put("a", BLOB[:500_000])
    store = through()
    store.get("a")
    proxy.rate_bytes_per_second = 1e6
    started = time.monotonic()
    threads = [threading.Thread(target=store.get, args=("a",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started > 1.3


def test_chance_is_seeded():
    class Request:
        method, path = "GET", "/"

    def hits(seed):
        proxy = FaultProxy("127.0.0.1", 1, seed=seed)
        proxy.rules = [Rule("status", probability=0.3, count=-1)]
        try:
            return [proxy._rule_for(Request) is not None for _ in range(100)]
        finally:
            proxy._loop.close()

    assert hits(1) == hits(1) != hits(2)
    assert 10 < sum(hits(1)) < 50
