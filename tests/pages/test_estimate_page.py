"""The page of `deltawire estimate`, in a real browser and over HTTP."""

import json
import urllib.error
import urllib.request
from dataclasses import replace

import pytest

from deltawire.estimate.bill import estimate
from deltawire.estimate.plan import Plan, density_of
from deltawire.estimate.prices import PRICES
from deltawire.estimate.report import head_of, table_of
from deltawire.pages.estimate import EstimateHandler, answer
from deltawire.pages.explain import PageServer
from support.browser import LOOKS, axe_findings, fits
from support.pages import in_a_thread

PLAN = Plan(8e9, density_of(1e-6), 1440, sites=2, replicas=64)


@pytest.fixture(scope="module")
def url():
    with in_a_thread(PageServer(handler=EstimateHandler)) as server:
        yield server.url


def shown(page):
    """The table of the page, once it is that of its sliders."""
    page.wait_for_selector("body[data-asked]")
    return page.evaluate(
        """() => new Promise((done) => { const look = () => document.getElementById("state").textContent === "" ?
            done([...document.querySelectorAll("#table tr")].map((row) => [...row.cells].map((c) => c.textContent)))
            : requestAnimationFrame(look); look(); })"""
    )


def slide(page, name, key, times):
    page.focus(f"#{name}")
    for _ in range(times):
        page.keyboard.press(key)


def expected(plan, store="s3"):
    header, rows = table_of(estimate(plan, PRICES[store], num_versions=3))
    return [header, *rows]


def test_sliders_change_the_table(open_page, url):
    with open_page(url) as page:
        assert shown(page) == expected(PLAN)
        slide(page, "replicas", "ArrowRight", 2)
        slide(page, "trainer_mbits", "End", 1)
        slide(page, "lr", "ArrowRight", 1)
        changed = replace(PLAN, replicas=256, trainer_mbits=400_000, density=density_of(2e-6))
        assert shown(page) == expected(changed)
        page.select_option("#store", "r2")
        assert shown(page) == expected(changed, "r2")
        text = page.inner_text("#head")
        assert all(value in text for _, value in head_of(estimate(changed, PRICES["r2"])))
        assert page.inner_text("label[for=replicas] + output") == "256"


@pytest.mark.parametrize(("width", "theme"), LOOKS)
def test_every_width_and_theme(open_page, url, width, theme):
    with open_page(url, width=width, theme=theme) as page:
        shown(page)
        page.evaluate("document.querySelector('details').open = true")
        assert fits(page)
        assert axe_findings(page) == []


def asked(url):
    with urllib.request.urlopen(url) as reply:
        return reply.status, reply.headers, reply.read()


@pytest.mark.process
def test_the_server_computes_and_serves_its_files_and_nothing_else(url):
    status, headers, body = asked(url + "data?weights=8e9&steps_a_day=1440&sites=2&replicas=64&lr=1e-6&store=s3")
    assert status == 200
    assert headers["Content-Type"].startswith("application/json")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert json.loads(body)["table"] == expected(PLAN)
    assert b"estimate.js" in asked(url)[2]
    for path in ("estimate.js", "estimate.css", "../base.css"):
        assert asked(url + path)[0] == 200
    for path in ("../explain/index.html", "../dashboard/", "nothing", "../../../../estimate.py"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            asked(url + path)


@pytest.mark.process
@pytest.mark.parametrize(
    "query",
    ["", "weights=x", "weights=1e9", "weights=1e9&steps_a_day=10&odd=1", "weights=-1&steps_a_day=10",
     "weights=1e9&steps_a_day=10&replicas=1000000", "weights=nan&steps_a_day=10", "weights=1e9&steps_a_day=10&lr=0",
     "weights=1e9&steps_a_day=10&store=none"],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(url, query):
    with pytest.raises(urllib.error.HTTPError, match="400") as caught:
        asked(f"{url}data?{query}")
    assert json.loads(caught.value.read())["error"]


def test_numbers_that_are_not_given_are_those_of_a_plan():
    assert answer("weights=8e9&steps_a_day=100")["plan"]["replicas"] == 8
