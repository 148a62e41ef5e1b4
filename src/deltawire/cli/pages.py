"""Commands that serve pages: the dashboard of a run, and explain, figures about deltas."""

import json
import signal
from contextlib import suppress
from os.path import exists, isfile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

import click

from deltawire.cli.options import PATH, allow_host_option, only_with, output_options, public_key_option
from deltawire.hosts import split_url
from deltawire.terminal import handling_signals, is_quiet, say, show, size_text, speaking_errors, wants_json

if TYPE_CHECKING:
    from deltawire.pages.explain import PageServer
    from deltawire_demo.eventlog import EventLog

MOST_LIMIT = 1000


@click.command("dashboard")
@click.argument("url")
@click.option("--events", type=PATH, help="Event log of a demo, for rewards and faults.  [default: events.jsonl "
              "next to the store, if URL is a demo's folder or its store]")  # fmt: skip
@click.option("--compare", metavar="URL", help="Draw the charts of another run alongside.")
@click.option("--host", default="127.0.0.1",
              help="The address to listen on. There is no login: anyone who can reach it can see the run.")  # fmt: skip
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default="a free port", help="The port to "
              "listen on.")  # fmt: skip
@allow_host_option
@click.option("--open/--no-open", "opens", default=False, help="Open the page in a browser.")
@click.option("--every", type=click.FloatRange(0.1), default=1.0, metavar="SECONDS",
              help="Time between polls of the store.")  # fmt: skip
@click.option("--after", type=click.IntRange(-1), metavar="VERSION", help="With --format json: show versions and steps "
              "after this one.  [default: the newest ones]")  # fmt: skip
@click.option("--limit", type=click.IntRange(1, MOST_LIMIT), default=200, help="With --format json: how many to show.")
@public_key_option
@output_options
def dashboard_command(
    url: str, events: Path | None, compare: str | None, host: str, port: int, allow_host: tuple[str, ...], opens: bool,
    every: float, after: int | None, limit: int, public_key: str | None,
) -> None:  # fmt: skip
    """Show a run in a browser.

    Six charts, alerts, replicas, versions, and the contents of a delta. The dashboard only reads the store. If the
    store does not respond or has no run yet, it keeps polling. URL may be the folder of a demo. Press Ctrl-C to stop.
    With --format json, the current state is printed once, with next_after for the next page.
    """
    is_json = wants_json()
    only_with("--format json", is_json, "after", "limit")
    page_only = ("compare", "host", "port", "allow_host", "opens", "every")
    only_with("the page, and --format json serves none", not is_json, *page_only)
    with speaking_errors(url):
        store, log = places(url, events)
        if events is not None and not exists(events):
            say(f"{events} is not there yet: rewards and faults are shown once it is", err=True)
        if is_json:
            from deltawire.pages.feed import snapshot

            click.echo(json.dumps(snapshot(store, (after, limit), public_key=public_key, events=log), indent=2))
            return
        from deltawire.pages.dashboard import Dashboard
        from deltawire.pages.feed import Feed

        feed, compared = Feed(store, public_key=public_key, events=log), None
        if compare is not None:
            store, log = places(compare)
            compared = Feed(store, events=log)
        for each in (feed, compared):
            if each is not None and not getattr(each.store, "listable", True):
                each.store.list()  # says why it cannot
        dashboard = Dashboard(
            feed, host=host, port=port, every_seconds=every, allowed_hosts=allow_host, compared=compared
        )
        with handling_signals(lambda *_: dashboard.stop()):
            say(dashboard.url)
            if not is_quiet():
                say(f"dashboard of {feed.store.url}; press Ctrl-C to stop", err=True)
            if opens:
                click.launch(dashboard.url)
            dashboard.run()


def places(url: str, events: Path | None = None) -> "tuple[str, EventLog | None]":
    """The store of a URL, and the event log that goes with it: `events`, or the one that lies there."""
    from deltawire.store import scheme_of
    from deltawire_demo.eventlog import EventLog

    if (scheme := scheme_of(url)) in ("", "file"):
        folder = Path(unquote(split_url(url).path)) if scheme else Path(url)
        found = folder.absolute().parent / "events.jsonl"
        # Not with Path, which raises where a name is too long: the store will say so.
        if isfile(folder / "events.jsonl") and not exists(folder / "run.json"):
            url, found = str(folder / "store"), folder / "events.jsonl"
        events = events or (found if isfile(found) else None)
    return url, None if events is None else EventLog(events)


@click.command("explain")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default="a free port", help="The port to "
              "listen on, on this machine only.")  # fmt: skip
@click.option("--open/--no-open", "opens", default=False, help="Open the page in a browser.")
@click.option("--output", "-o", type=PATH, help="Write the page to a single HTML file instead, which needs no server.")
@output_options
def explain_command(port: int, opens: bool, output: Path | None) -> None:
    """Show how deltas work, in four scenes.

    Why few bf16 weights change in a step, how large full weights and deltas are, when engines stop, and what is in a
    bucket. Drawn from recorded training steps, measured times and your own numbers. Serves the page on this machine
    until Ctrl-C and prints its address, or writes it to a file. Nothing is loaded from the network.
    """
    only_with("a served page, not with --output", output is None, "port")
    from deltawire.pages.explain import PageServer, single_file

    with speaking_errors():
        if output is not None:
            text = single_file()
            output.write_text(text, encoding="utf-8")
            data = {"file": str(output), "bytes": len(text.encode())}
            show(data, lambda: f"{output}: {size_text(len(text.encode()))}")
            if opens:
                click.launch(output.absolute().as_uri())
            return
        with PageServer(port) as server:
            show_page(server, opens)


def show_page(server: "PageServer", opens: bool) -> None:
    """Serve a page until Ctrl-C."""
    show({"url": server.url}, lambda: server.url)
    if not is_quiet():
        say("Press Ctrl-C to stop.", err=True)
    if opens:
        click.launch(server.url)
    with handling_signals(signal.default_int_handler), suppress(KeyboardInterrupt):
        server.serve_forever()
