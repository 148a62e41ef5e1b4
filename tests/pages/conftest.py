"""The page of `deltawire explain`, served."""

from contextlib import contextmanager

import pytest

from deltawire.pages.explain import PageServer
from support.pages import in_a_thread


@pytest.fixture(scope="module")
def url():
    with in_a_thread(PageServer()) as server:
        yield server.url


@pytest.fixture
def explain(open_page, url):
    """The page, complete; options as those of `open_page`. A link is what comes after the address."""

    @contextmanager
    def opened(address=url, link="", **options):
        with open_page(address + link, **options) as page:
            page.wait_for_selector("body[data-ready]")
            yield page

    return opened
