"""Agents are woken up when a version is committed."""

import threading

import numpy as np
import pytest

from deltawire import Publisher
from deltawire.publish.nudges import Nudges
from support.chains import fresh_url, make_weights, step
from support.waiting import PATIENCE, eventually
from support.web_servers import answering

ACCEPTED = b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n"

pytestmark = pytest.mark.process


def test_every_agent_is_nudged_after_each_version():
    asked, weights = [], make_weights()
    url = fresh_url()

    def answer(request):
        asked.append(request)
        return ACCEPTED

    with answering(answer) as one, answering(answer) as other:
        agents = [f"http://127.0.0.1:{one}", f"http://127.0.0.1:{other}/behind/a/proxy/"]
        with Nudges(agents, "s3cret") as nudges, Publisher(url, weights) as publisher:
            publisher.after_commit = nudges
            for number in range(3):
                publisher.publish().wait(PATIENCE)
                eventually(lambda number=number: nudges.num_sent == 2 * (number + 1))
                step(weights, np.random.default_rng(0))
    assert len(asked) == 6
    assert sorted(each.split()[1] for each in asked) == ["/behind/a/proxy/nudge"] * 3 + ["/nudge"] * 3
    assert all(each.startswith("POST ") and "Authorization: Bearer s3cret\r\n" in each for each in asked)


def test_agents_that_are_away_or_refuse_or_redirect_cost_no_version():
    elsewhere, weights = [], make_weights()

    def note(request):
        elsewhere.append(request)
        return ACCEPTED

    with answering(note) as other:
        moved = f"HTTP/1.1 307 Moved\r\nLocation: http://127.0.0.1:{other}/nudge\r\nContent-Length: 0\r\n\r\n".encode()
        with answering(lambda _: moved) as redirecting, answering(lambda _: b"no HTTP\r\n\r\n") as odd:
            agents = [f"http://127.0.0.1:{port}" for port in (redirecting, odd, 9)]
            with Nudges(agents, "s3cret", timeout=5) as nudges, Publisher(fresh_url(), weights) as publisher:
                publisher.after_commit = nudges
                assert publisher.publish().wait(PATIENCE).version == 0
                eventually(lambda: nudges.num_failed == 3)
    assert not elsewhere, "the token went to another server"


def test_one_that_hangs_is_nudged_once():
    go_on, asked = threading.Event(), []

    def hang(request):
        asked.append(request)
        go_on.wait(PATIENCE)
        return ACCEPTED

    with answering(hang) as port, Nudges([f"http://127.0.0.1:{port}"], "s3cret", timeout=PATIENCE) as nudges:
        for version in range(5):
            nudges(version)
            eventually(lambda: asked)
        go_on.set()
        eventually(lambda: nudges.num_sent == 1)
        assert len(asked) == 1


def test_what_after_commit_raises_fails_no_version(caplog):
    with Publisher(fresh_url(), make_weights()) as publisher:
        publisher.after_commit = lambda version: 1 // version
        assert publisher.publish().wait(PATIENCE).version == 0
    assert "after_commit failed for version 0" in caplog.text


@pytest.mark.parametrize(
    ("agents", "token", "error"),
    [
        ("http://a:1", "t", TypeError),
        (["a:1"], "t", ValueError),
        (["http://user:secret@"], "t", ValueError),
        (["http://a:1"], " ", ValueError),
        (["http://a:1"], "t\n", ValueError),
    ],
)
def test_wrong_arguments(agents, token, error):
    with pytest.raises(error) as caught:
        Nudges(agents, token)
    assert "secret" not in str(caught.value)
