"""What each page must keep to, in every width and theme."""

from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

# Others may need the cores, too.
PATIENCE_SECONDS = 120
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
WIDTHS = (360, 1440)
THEMES = ("light", "dark")
# Each width and each theme; and the other pairs of them.
LOOKS = [
    *zip(WIDTHS, THEMES, strict=True),
    *(pytest.param(*look, marks=pytest.mark.slow) for look in zip(WIDTHS, reversed(THEMES), strict=True)),
]


def axe_findings(page):
    """What axe finds, however small, as text."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [f"{each['id']}: {each['help']}: {node['html'][:200]}" for each in found for node in each["nodes"]]


def fits(page):
    """Whether nothing sticks out of the page at the side."""
    return page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


@contextmanager
def opened(chromium, url, *, width=1440, theme="light", height=900, reduced_motion="no-preference"):
    """A page; on leaving, nothing may have gone wrong in it or left loopback."""
    context = chromium.new_context(
        viewport={"width": width, "height": height}, color_scheme=theme, reduced_motion=reduced_motion
    )
    context.set_default_timeout(1000 * PATIENCE_SECONDS)
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
    assert not problems, problems
    away = [each for each in asked if urlsplit(each).hostname not in (None, "127.0.0.1")]
    assert not away, "the page asks another machine"
