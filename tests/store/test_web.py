"""Web servers as stores: what is sent to them, and what they cannot do to a reader."""

import subprocess
import sys
import threading
import time

import pytest

from deltawire.errors import LimitExceeded, ObjectMissing, ReadOnlyStore, StoreUnavailable
from deltawire.store import open_store
from support.web_servers import answering, certificate

pytestmark = pytest.mark.process

TEN = b"0123456789"


def reply(status="200 OK", body=TEN, **headers):
    named = {"Content-Length": len(body), **{name.replace("_", "-"): value for name, value in headers.items()}}
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in named.items() if value is not None)]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body


def opened(port, path="/run", scheme="http", **options):
    return open_store(f"{scheme}://127.0.0.1:{port}{path}", **options)


def test_headers_and_the_query_are_sent_with_every_request_and_never_shown(monkeypatch):
    asked = []

    def answer(request):
        asked.append(request)
        return reply("401 Unauthorized") if "none" in request else reply()

    monkeypatch.setenv("DELTAWIRE_WEB_HEADERS", "Authorization: Bearer hidden\nX-More: hidden")
    with answering(answer) as port:
        store = opened(port, "/run?sig=hidden&b=%2F")
        store.get("a/b")
        store.stat("a/b")
        with pytest.raises(StoreUnavailable, match=r"refused \(401\).*DELTAWIRE_WEB_HEADERS") as caught:
            store.get("none")
        other = opened(port, config={"headers": "X-Other: value"})
        other.get("a")
    assert [each.split(" HTTP")[0] for each in asked] == [
        "GET /run/a/b?sig=hidden&b=%2F",
        "HEAD /run/a/b?sig=hidden&b=%2F",
        "GET /run/none?sig=hidden&b=%2F",
        "GET /run/a",
    ]
    assert all("Authorization: Bearer hidden\r\nX-More: hidden" in each for each in asked[:3])
    assert "X-Other: value" in asked[3]
    assert "hidden" not in asked[3]
    assert "hidden" not in repr(store) + store.url + str(caught.value) + str(caught.value.fields)


@pytest.mark.parametrize("config", [{"headers": "hidden"}, {"headers": "A: b\x7fhidden"}, {"token": "hidden"}])
def test_settings_that_are_not_understood(config):
    with pytest.raises(ValueError, match="headers") as caught:
        open_store("https://host/run", config=config)
    assert "hidden" not in str(caught.value)
    for url in ("https://user:hidden@host/run", "https://hidden@host/run"):
        with pytest.raises(ValueError, match=r"password|without a user") as caught:
            open_store(url)
        assert "hidden" not in str(caught.value)


def test_nothing_is_written_or_listed():
    store = open_store("https://host.invalid/run")
    for call in (lambda: store.put("a", b""), lambda: store.create("a", b""), lambda: store.delete(["a"])):
        with pytest.raises(ReadOnlyStore, match="cannot be written to"):
            call()
    with pytest.raises(ReadOnlyStore, match="cannot be listed"):
        store.list()


def endless(head):
    def answer(_request):
        yield head
        while True:
            yield b"10000\r\n" + b"x" * 65536 + b"\r\n"

    return answer


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_an_announced_size_above_the_limit_is_not_read():
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n"
    with answering(endless(head)) as port, pytest.raises(LimitExceeded, match="1000000000000 bytes"):
        opened(port).get("a")


def test_an_endless_body_is_read_up_to_the_limit():
    with answering(endless(CHUNKED)) as port:
        with pytest.raises(LimitExceeded, match="more than the limit of 1000"):
            opened(port).get("a", limit=1000)
        assert opened(port).get_range("a", 5, 100_000) == b"x" * 100_000


def test_an_endless_range_is_read_as_far_as_was_asked():
    head = CHUNKED.replace(b"200 OK", b"206 Partial Content\r\nContent-Range: bytes 5-14/99")
    with answering(endless(head)) as port:
        assert opened(port).get_range("a", 5, 10) == b"x" * 10


@pytest.mark.parametrize("stated", ["bytes 1-4/10", "bytes 0-9/10", "bytes 0-1/10", "bytes 0-1/*", "bytes 3-0/10",
                                    "items 0-3/10", "bytes 0-3", "", "bytes 0-" + "9" * 5000 + "/*"])  # fmt: skip
def test_another_range_than_was_asked_for(stated):
    with answering(lambda _: reply("206 Partial Content", Content_Range=stated)) as port:
        with pytest.raises(StoreUnavailable, match="bytes 0-3 of a were requested") as caught:
            opened(port).get_range("a", 0, 4)
        assert len(str(caught.value)) < 500


def test_a_server_without_ranges():
    with answering(lambda _: reply()) as port:
        assert opened(port).get_range("a", 0, 4) == b"0123"
        assert opened(port).get_range("a", 8, 4) == b"89"
        assert opened(port).get_range("a", 20, 4) == b""


@pytest.mark.parametrize(
    "answer",
    [
        reply(Content_Length=11),
        reply("206 Partial Content", Content_Range="bytes 0-10/11", Content_Length=11),
        reply("206 Partial Content", Content_Range="bytes 0-10/11", Content_Length=None),
        reply(Content_Length="ten"),
        reply(Content_Length="-1"),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: %s\r\n" % (number, b"x" * 1000) for number in range(1000)),
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1_000_000,
        b"SSH-2.0-server\r\n",
        b"",
    ],
    ids=["short", "short range", "short range without length", "length", "negative", "chunks", "headers", "header",
         "protocol", "nothing"],
)  # fmt: skip
def test_broken_answers(answer):
    with answering(lambda _: answer) as port, pytest.raises(StoreUnavailable) as caught:
        opened(port).get_range("a", 0, 11)
    assert (caught.value.refused, caught.value.key) == (False, "a")
    assert len(str(caught.value)) < 500


def test_a_silent_server():
    done = threading.Event()
    with answering(lambda _: done.wait() and b"") as port:
        with pytest.raises(StoreUnavailable, match="no answer for a"):
            opened(port, timeout_seconds=0.2).get_range("a", 0, 1)
        done.set()


def test_a_server_that_drips():
    def answer(_request):
        yield CHUNKED
        while True:
            time.sleep(0.01)
            yield b"1\r\nx\r\n"

    with answering(answer) as port, pytest.raises(StoreUnavailable, match="arrives too slowly"):
        opened(port, timeout_seconds=0.2).get_range("a", 0, 1_000_000)


def test_compressed_answers_are_refused():
    with answering(lambda _: reply(Content_Encoding="gzip")) as port:
        with pytest.raises(StoreUnavailable, match="compressed") as caught:
            opened(port).get("a")
        assert caught.value.refused


def test_requests_are_repeated_where_that_can_help():
    asked = []

    def answer(request):
        asked.append(request.split()[1])
        return reply("404 Not Found" if "none" in request else "503 Busy" if len(asked) < 3 else "200 OK")

    with answering(answer) as port:
        assert opened(port).get("a") == TEN
        with pytest.raises(ObjectMissing):
            opened(port).get("none")
    assert asked == ["/run/a"] * 3 + ["/run/none"]


def test_a_bucket_that_may_be_read_and_not_listed_hides_what_is_missing():
    expired = threading.Event()

    def answer(request):
        return reply("200 OK" if "/run/run.json" in request and not expired.is_set() else "403 Forbidden", b"")

    with answering(answer) as port:
        store = opened(port)
        with pytest.raises(StoreUnavailable, match="403"):
            store.get("a")
        store.get("run.json")
        with pytest.raises(ObjectMissing):
            store.get("a")
        expired.set()
        for key in ("a", "run.json"):
            with pytest.raises(StoreUnavailable, match="403") as caught:
                store.get(key)
            assert caught.value.refused


def test_redirects():
    asked = []

    def answer(request):
        asked.append(request)
        path = request.split()[1]
        to = {"/run/here": "/elsewhere?a=b", "/run/other": f"http://localhost:{port}/x", "/run/round": "round",
              "/run/file": "file:///etc/passwd", "/run/odd": "http://[::"}.get(path.partition("?")[0])  # fmt: skip
        return reply("302 Found", b"", Location=to) if to else reply()

    with answering(answer) as port:
        store = opened(port, "/run?sig=hidden", config={"headers": "X-Token: hidden"})
        assert store.get("here") == TEN
        assert asked[-1].startswith("GET /elsewhere?a=b HTTP")
        for key, said in (("other", "redirected to http://localhost.*DELTAWIRE_WEB_REDIRECT_HOSTS"),
                          ("round", "more than 5 times"), ("file", "redirected to file://")):  # fmt: skip
            with pytest.raises(StoreUnavailable, match=said) as caught:
                store.get(key)
            assert caught.value.refused
        with pytest.raises(StoreUnavailable, match="no answer for odd"):
            store.get_range("odd", 0, 1)
        count = len(asked)
        store = opened(port, "/run?sig=hidden", config={"headers": "X-Token: hidden", "redirect_hosts": "a localhost"})
        assert store.get_range("other", 0, 10) == TEN
        before, after = asked[count:]
        assert "hidden" in before
        assert "hidden" not in after, "a token is for its own host"
        assert "Range: bytes=0-9" in after


def test_https_is_never_left_for_http(tmp_path, monkeypatch):
    with answering(lambda _: reply()) as plain:
        to = f"http://127.0.0.1:{plain}/run/a"
        with answering(lambda _: reply("302 Found", b"", Location=to), certificate(tmp_path)) as port:
            with pytest.raises(StoreUnavailable, match=r"no answer for a.*certificate"):
                opened(port, scheme="https").get_range("a", 0, 1)
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate"))
            store = opened(port, scheme="https", config={"redirect_hosts": "127.0.0.1"})
            with pytest.raises(StoreUnavailable, match=r"redirected from https to http://127\.0\.0\.1") as caught:
                store.get("a")
            assert caught.value.refused


def test_a_forked_process_has_connections_of_its_own(web_server):
    open_store(web_server.folder / "root").put("fork/a", TEN)
    program = (
        f"import os\nfrom deltawire.store import open_store\nstore = open_store('{web_server.url}/fork')\n"
        "store.get('a')\nchild = os.fork()\nfor _ in range(50):\n    assert store.get('a') == b'0123456789'\n"
        "assert not child or os.waitstatus_to_exitcode(os.wait()[1]) == 0\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
