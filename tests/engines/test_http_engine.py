"""What agents have with servers that are driven over HTTP: the connection, and the folder that both see."""

import errno
import json
import socket
import threading
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from deltawire.engines.engine import EngineChange
from deltawire.engines.layout import Layout
from deltawire.engines.sglang.adapter import SglangEngine
from deltawire.engines.shared_folder import SharedFolder
from deltawire.engines.staged import StagedChange
from deltawire.engines.vllm.adapter import VllmEngine
from deltawire.errors import EngineRejected, EngineUnavailable
from deltawire.tensors.digest import Digest, WeightVersion
from support.fused_model import whole

BASE, STATE = WeightVersion("run", 3, Digest(1, 2)), WeightVersion("run", 4, Digest(3, 4))


@contextmanager
def answering(body, status=200):
    """A server that answers everything alike."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST  # noqa: N815

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


ENGINES = {
    "vllm": lambda url, folder: VllmEngine(url, shared_folder=folder, api_key="secret", timeout=0.2, load_timeout=30),
    "patch": lambda url, folder: SglangEngine(url, shared_folder=folder, timeout=0.2, load_timeout=30),
    "disk": lambda url, folder: SglangEngine(url, mode="disk", shared_folder=folder, timeout=0.2, load_timeout=30),
}


@pytest.mark.process
@pytest.mark.parametrize("kind", ["vllm", "disk"])
def test_a_server_that_hangs_is_not_waited_for_as_long_as_a_load(tmp_path, kind):
    """Until then the agent would call it healthy."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with closing(ENGINES[kind](url, tmp_path)) as engine:
            request, waited = engine._server._client.request, []

            def asked(*arguments, timeout, **named):
                waited.append(timeout)
                return request(*arguments, timeout=0.2, **named)

            engine._server._client.request = asked
            with pytest.raises(EngineUnavailable, match="timed out"):
                engine.status()
            assert waited == [0.2]


@pytest.mark.process
@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("body", [b"[]", b"null", b'"x"', b"<html>"])
def test_an_answer_that_is_no_object_is_a_named_error(tmp_path, kind, body):
    with (
        answering(body) as url,
        closing(ENGINES[kind](url, tmp_path)) as engine,
        pytest.raises(EngineUnavailable, match="other than a JSON object"),
    ):
        engine.status()


@pytest.mark.process
def test_another_server_than_vllm_is_a_named_error(tmp_path):
    with (
        answering(b"{}") as url,
        closing(ENGINES["vllm"](url, tmp_path)) as engine,
        pytest.raises(EngineRejected, match="check the URL"),
    ):
        engine.status()


@pytest.mark.process
def test_a_wrong_token_is_not_taken_for_missing_flags(tmp_path):
    with (
        answering(json.dumps({"error": "no"}).encode(), 401) as url,
        closing(ENGINES["vllm"](url, tmp_path)) as engine,
        pytest.raises(EngineRejected, match="the same DELTAWIRE_ENGINE_TOKEN") as caught,
    ):
        engine.status()
    assert "--middleware" not in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOENT])
def test_a_shared_folder_that_cannot_be_written_says_what_to_do(tmp_path, monkeypatch, number):
    """In a container, shared memory has 64 MB if nobody asks for more."""

    def fail(*_, **__):
        raise OSError(number, "as the system says it")

    monkeypatch.setattr(StagedChange, "save", fail)
    monkeypatch.setattr("deltawire.engines.shared_folder.save_anchor", fail)
    layout = Layout({"a": ("U8", (4,))}, [[whole("a", "s", 4)]])
    with closing(SharedFolder(tmp_path, "http://server")) as folder:
        said = "no room left" if number == errno.ENOSPC else "as the system says it"
        with pytest.raises(EngineRejected, match=f"nothing was changed.*{said}.*--shared-folder"):
            folder.change(EngineChange(BASE, STATE, [], {}), layout, "t").__enter__()
        with pytest.raises(EngineRejected, match=f"nothing was changed.*{said}.*--shared-folder"):
            folder.checkpoint({"a": np.zeros(4, np.uint8)}, None, STATE).__enter__()
        assert [path.name for path in folder.folder.iterdir()] == ["lock"]
