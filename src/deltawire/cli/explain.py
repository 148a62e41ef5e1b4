"""The explain command: interactive figures about deltas."""

import signal
from contextlib import suppress
from pathlib import Path

import click

from deltawire.cli.options import PATH, only_with, output_options
from deltawire.terminal import handling_signals, is_quiet, say, show, size_text, speaking_errors


@click.command("explain")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default="a free one", help="The port to "
              "listen on, for this machine only.")  # fmt: skip
@click.option("--open/--no-open", "opens", default=False, show_default=True, help="Open the page in a browser.")
@click.option("--output", "-o", type=PATH, help="Write the page as one HTML file instead, which needs no server.")
@output_options
def explain_command(port: int, opens: bool, output: Path | None) -> None:
    """Show in four interactive figures how deltas work.

    What full weights and deltas cost, why few bf16 weights change, what is in a bucket, and one update from end to end,
    computed from recorded training steps, measured times and your own numbers. Serves the page on this machine
    until Ctrl-C and prints its address, or writes it to a file. Nothing is loaded from the network.
    """
    only_with("the page as it is served, not with --output", output is None, "port")
    from deltawire.pages.explain import serve, single_file, url_of

    with speaking_errors():
        if output is not None:
            text = single_file()
            output.write_text(text, encoding="utf-8")
            data = {"file": str(output), "bytes": len(text.encode())}
            show(data, lambda: f"{output}: {size_text(len(text.encode()))}")
            if opens:
                click.launch(output.absolute().as_uri())
            return
        with serve(port) as server:
            url = url_of(server)
            show({"url": url}, lambda: url)
            if not is_quiet():
                say("Ctrl-C ends it.", err=True)
            if opens:
                click.launch(url)
            with handling_signals(signal.default_int_handler), suppress(KeyboardInterrupt):
                server.serve_forever()
