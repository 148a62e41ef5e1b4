"""The folder through which an agent hands changes to a server: one agent for each."""

from contextlib import closing

import pytest

from deltawire.engines.shared_folder import SharedFolder
from deltawire.errors import Conflict


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("http://127.0.0.1:8000", "http://localhost:8000"),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/"),
        ("http://127.0.0.1:8000", "HTTP://LocalHost:8000"),
        ("http://server.example/vllm", "http://Server.Example:80/vllm/"),
        ("https://server.example", "https://server.example:443"),
        ("http://[::1]:8000", "http://[0:0:0:0:0:0:0:1]:8000"),
        ("http://127.0.0.1:8000", "http://***@127.0.0.1:8000"),
    ],
)
def test_two_spellings_of_a_server_are_one(tmp_path, first, second):
    shared = SharedFolder(tmp_path, first)
    with pytest.raises(Conflict, match="another agent drives"):
        SharedFolder(tmp_path, second)
    shared.close()
    SharedFolder(tmp_path, second).close()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8001"),
        ("http://127.0.0.1:8000", "http://127.0.0.2:8000"),
        ("http://127.0.0.1:8000", "http://[::1]:8000"),
        ("http://127.0.0.1:8000", "https://127.0.0.1:8000"),
        ("http://server.example/a", "http://server.example/A"),
        ("http://server.example", "http://server"),
    ],
)
def test_two_servers_have_two_folders(tmp_path, first, second):
    with closing(SharedFolder(tmp_path, first)) as one, closing(SharedFolder(tmp_path, second)) as other:
        assert one.folder != other.folder
