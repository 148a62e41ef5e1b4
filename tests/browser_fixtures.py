"""A real browser for the tests of pages, and what each page must keep to."""

import shutil
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def chromium():
    """Debian's, as `make setup` installs it: Playwright's own cannot be had from a package registry.

    Not for the whole session: while it is there, Playwright's event loop runs in this thread, and no other can.
    """
    sync_api = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium):
    """Opens an address, with a width and a theme; on leaving, nothing may have gone wrong in it or left loopback."""

    @contextmanager
    def opened(url, *, width=1440, theme="light", height=900, reduced_motion="no-preference"):
        context = chromium.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme, reduced_motion=reduced_motion
        )
        problems, asked = [], []
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(url)
        try:
            yield page
        finally:
            context.close()
        assert not problems
        away = [each for each in asked if urlsplit(each).hostname not in (None, "127.0.0.1")]
        assert not away, "the page asks another machine"

    return opened
