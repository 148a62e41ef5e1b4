"""Starts the server; its address is the first line of the output. Its token, if it has one, is in WORDLE_TOKEN."""

import os
import re
import socket

import click

from deltawire.hosts import is_loopback

TOKEN_VARIABLE = "WORDLE_TOKEN"  # noqa: S105


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on; 0.0.0.0 for all.")
@click.option("--port", type=click.IntRange(0, 65535), default=8001, show_default=True, help="0 picks a free port.")
@click.option("--max-sessions", type=click.IntRange(1), default=512, show_default=True,
              help="Most games at a time, for OpenEnv and for batches each.")  # fmt: skip
@click.option("--expire", type=click.FloatRange(0, min_open=True), default=600.0, show_default=True,
              help="Drop a game after this many seconds without a request.")  # fmt: skip
def main(host: str, port: int, max_sessions: int, expire: float) -> None:
    """Serve Wordle as an OpenEnv environment. Ctrl-C ends it.

    With WORDLE_TOKEN set, clients must send it as a bearer token; an address that other machines reach needs one.
    """
    token = os.environ.get(TOKEN_VARIABLE) or None
    if (token is None and not is_loopback(host)) or (token and not re.fullmatch("[A-Za-z0-9_-]{16,200}", token)):
        raise click.ClickException(f"{TOKEN_VARIABLE} must be 16 to 200 characters from A-Z a-z 0-9 _ -")
    try:
        listening = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024
        )
    except OSError as error:
        raise click.ClickException(f"cannot listen on {host} port {port}: {error.strerror}; choose another") from None
    try:
        import uvicorn

        from deltawire_demo.wordle.server import create
    except ImportError as error:
        raise click.ClickException(f"{error.name} is missing: pip install 'deltawire[wordle]'") from None
    application = create(max_sessions=max_sessions, expire_seconds=expire, token=token)
    address = f"[{host}]" if ":" in host else host
    click.echo(f"http://{address}:{listening.getsockname()[1]}")
    config = uvicorn.Config(
        application, log_level="warning", access_log=False, ws_max_size=1 << 16, backlog=1024,
        timeout_graceful_shutdown=2,
    )  # fmt: skip
    uvicorn.Server(config).run([listening])


if __name__ == "__main__":
    main(prog_name="python -m deltawire_demo.wordle")
