"""Take pictures of the pages in a real browser, in every width and theme.

    python tools/screenshots.py [--output FOLDER] [--only explain]

A page is a job: a name, how to serve it, and what to take pictures of. Add one to JOBS.
"""

import argparse
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from playwright.sync_api import Page, sync_playwright

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from support.browser import FLAGS, THEMES

WIDTHS = (390, 1440)


class Shot(NamedTuple):
    """A picture: its name, the element (None: the whole page), and what to do before."""

    name: str
    selector: str | None = None
    prepare: Callable[[Page], Any] | None = None


class Job(NamedTuple):
    name: str
    served: Callable[[], AbstractContextManager[str]]
    """Serves the page while it is open; its address."""
    ready: str
    """A selector that matches when the page is complete."""
    shots: list[Shot]


@contextmanager
def explain() -> Iterator[str]:
    from deltawire.pages.explain import PageServer

    with PageServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def dashboard() -> Iterator[str]:
    """Beside a demo that runs, in which a replica was killed and another one has joined late."""
    from deltawire.pages.dashboard import Dashboard
    from deltawire.pages.feed import Feed
    from deltawire_demo.eventlog import EventLog
    from support.demo_run import started, step_of
    from support.waiting import eventually

    options = ["--steps", "1000", "--evaluate", "0"]
    harm = ["--kill-replica-at", "15", "--late-join-at", "20"]
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "demo"
        with started(folder, *options, *harm):
            for wanted in (1, 10, 20, 30):
                eventually(lambda wanted=wanted: step_of(folder) >= wanted, f"step {wanted}")
            served = Dashboard(Feed(folder / "store", events=EventLog(folder / "events.jsonl")))
            thread = threading.Thread(target=served.run)
            thread.start()
            try:
                yield served.url
            finally:
                served.stop()
                thread.join()


def press(selector: str, *keys: str) -> Callable[[Page], None]:
    """Focus a figure and press keys."""

    def prepare(page: Page) -> None:
        page.focus(selector)
        for key in keys:
            page.keyboard.press(key)

    return prepare


def opened(panel: str, ready: str) -> Callable[[Page], None]:
    """Unfold a panel of the dashboard."""

    def prepare(page: Page) -> None:
        page.click(f"#{panel}-panel summary")
        page.wait_for_selector(ready)

    return prepare


SCENES = ("weight", "packets", "tokens", "bucket")
JOBS = [
    Job("explain", explain, "body[data-ready]", [
        Shot("page", prepare=lambda page: [press(f"#{scene}", "End")(page) for scene in SCENES]),
        Shot("1-weight-close", "#weight", press("#weight", "Home", *["ArrowRight"] * 4)),
        Shot("1-weight", "#weight", press("#weight", "End")),
        Shot("2-packets-way", "#packets", press("#packets", "Home", *["ArrowRight"] * 3)),
        Shot("2-packets", "#packets", press("#packets", "End")),
        Shot("2-packets-inside", "#packets", lambda page: page.click("#packets [data-inside] > summary")),
        Shot("3-tokens-stopped", "#tokens", press("#tokens", "Home", *["ArrowRight"] * 3)),
        Shot("3-tokens", "#tokens", press("#tokens", "End")),
        Shot("3-tokens-yours", "#tokens", lambda page: page.locator("#tokens summary").evaluate_all(
            "all => all.forEach((each) => each.click())")),
        Shot("4-bucket-way", "#bucket", press("#bucket", "Home", *["ArrowRight"] * 4)),
        Shot("4-bucket", "#bucket", press("#bucket", "End")),
    ]),
    Job("dashboard", dashboard, "#replicas-table tr[data-replica]", [
        Shot("page", prepare=lambda page: page.wait_for_timeout(2000)),
        Shot("versions", "#versions-panel", opened("versions", "#versions-table tr.row")),
        Shot("chain", "#chain-panel", opened("chain", "#chain-table tbody tr")),
        Shot("anatomy", "#anatomy-panel", opened("anatomy", "#anatomy-body:not([hidden])")),
    ]),
]  # fmt: skip


def take(browser: Any, job: Job, folder: Path) -> Iterator[Path]:
    with job.served() as url:
        for width in WIDTHS:
            for theme in THEMES:
                context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
                page = context.new_page()
                page.goto(url)
                page.wait_for_selector(job.ready)
                for shot in job.shots:
                    if shot.prepare:
                        shot.prepare(page)
                    path = folder / f"{job.name}-{shot.name}-{width}-{theme}.png"
                    if shot.selector:
                        page.locator(shot.selector).screenshot(path=path)
                    else:
                        page.screenshot(path=path, full_page=True)
                    yield path
                context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("screenshots"))
    parser.add_argument("--only", choices=[job.name for job in JOBS], help="one page")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        for job in JOBS:
            if arguments.only in (None, job.name):
                for picture in take(browser, job, arguments.output):
                    print(picture)  # noqa: T201
        browser.close()


if __name__ == "__main__":
    main()
