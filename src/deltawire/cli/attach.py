"""The attach command: an agent next to an inference server, and a table of its updates."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deltawire.cli import options
from deltawire.cli.watch import Watch, view_of
from deltawire.terminal import say, speaking_errors

if TYPE_CHECKING:
    from deltawire.engines.agent import Agent
    from deltawire.engines.engine import Engine

TOKEN_VARIABLE = "DELTAWIRE_TOKEN"  # noqa: S105
NO_MIRROR = Path("none")


def host_and_port(given: str) -> tuple[str, int]:
    host, colon, port = given.rpartition(":")
    if not port.isdecimal() or len(port) > 5 or int(port) >= 1 << 16 or (colon and not host):
        raise click.BadParameter("expected PORT or HOST:PORT, such as 127.0.0.1:9100")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


@click.command("attach")
@click.option("--engine", "kind", type=click.Choice(["vllm", "sglang"]), required=True, help="The kind of server.")
@click.option("--url", "address", metavar="URL", required=True, help="The server's URL, such as http://127.0.0.1:8000.")
@click.option("--from", "url", metavar="URL", required=True, help="The store that holds the run.")
@click.option("--mirror", type=options.PATH, metavar="FOLDER|none", help="Folder for the mirror, the copy of the "
              "weights that deltas are decoded against; it survives restarts. With none, the server decodes against "
              "its own weights.  [default: none if the server can decode all deltas on a GPU, else host "
              "memory]")  # fmt: skip
@click.option("--shared-folder", type=options.PATH, help="Folder for passing changes to the server, which must be "
              "able to read it.  [default: shared memory]")  # fmt: skip
@click.option("--mode", type=click.Choice(["patch", "disk"]),
              help="For sglang: patch writes changes in place, disk reloads the mirror.  [default: patch]")  # fmt: skip
@click.option("--running-requests", type=click.Choice(["recompute", "keep", "abort"]), default="recompute",
              help="What to do with running requests: recompute their context, keep it, or abort them.")  # fmt: skip
@options.base_option
@options.poll_option
@click.option("--listen", type=host_and_port, metavar="[HOST:]PORT", help="Serve /health, /status, /metrics and /nudge "
              "on this address. A port alone means 127.0.0.1; port 0 picks a free one.")  # fmt: skip
@options.allow_host_option
@click.option("--token-file", type=options.PATH,
              help=f"File with the bearer token that /nudge requires.  [default: ${TOKEN_VARIABLE}]")  # fmt: skip
@click.option("--api-key-env", metavar="NAME", help="Environment variable that holds the server's API key.")
@options.name_option
@options.run_option
@options.public_key_option
@options.until_option
@options.output_options
def attach_command(
    kind: str, address: str, url: str, mirror: Path | None, shared_folder: Path | None, mode: str | None,
    running_requests: str, base: Path | None, poll: float, listen: tuple[str, int] | None, allow_host: tuple[str, ...],
    token_file: Path | None, api_key_env: str | None, name: str | None, run_id: str | None, public_key: str | None,
    until: int | None,
) -> None:  # fmt: skip
    """Keep an inference server at the newest version of a run.

    Changes are fetched, checked and decoded while the server keeps serving, then written during a short pause. If the
    server is unavailable, attach waits for it; a server that restarts is brought up to date. Press Ctrl-C to stop. On a
    terminal, a table is redrawn in place; otherwise each update prints a line, or a JSON object with --format json.
    """
    from deltawire.engines.agent import Agent

    if mode is not None and kind != "sglang":
        raise click.UsageError("--mode only works with --engine sglang: leave it out")
    if mode == "disk" and mirror in (None, NO_MIRROR):
        raise click.UsageError("--mode disk needs --mirror: the server loads that folder")
    options.only_with("--listen, which starts the HTTP server", listen is not None, "allow_host", "token_file")
    with speaking_errors(url):
        host, port = listen or ("127.0.0.1", None)
        run, token = options.awaited_run(url, public_key, run_id), token_of(token_file)
        engine = make_engine(
            kind, address, mode=mode or "patch", shared_folder=shared_folder, running_requests=running_requests,
            api_key=api_key_of(api_key_env),
        )  # fmt: skip
        with Agent(
            engine, run, mirror=False if mirror == NO_MIRROR else mirror, name=name, base=base, poll_seconds=poll,
            host=host, port=port, token=token, allowed_hosts=allow_host,
        ) as agent:  # fmt: skip
            if agent.port is not None:
                say(f"listening on {f'[{host}]' if ':' in host else host}:{agent.port}", err=True)
            Attached(agent, f"{engine.kind} at {engine.address}, from {url}", until, poll).run()


class Attached(Watch):
    """Runs an agent in a thread; the main thread draws and handles signals."""

    def __init__(self, agent: "Agent", title: str, until: int | None, poll_seconds: float) -> None:
        super().__init__(agent.replica, view_of(agent.replica, title), until, poll_seconds)
        self._agent = agent

    def follow(self) -> None:
        if not self._stop:
            self._agent.run(self.pulled)

    def silent(self) -> tuple[str, float] | None:
        from deltawire.engines.http_engine import HttpEngine

        engine = self._agent.target.engine
        since = engine.silent_since if isinstance(engine, HttpEngine) else None
        return None if since is None else (f"{engine.kind} at {engine.address}", since)


def make_engine(kind: str, address: str, *, mode: str, **settings: Any) -> "Engine":
    if kind == "sglang":
        from deltawire.engines.sglang.adapter import SglangEngine

        return SglangEngine(address, mode=mode, **settings)
    from deltawire.engines.vllm.adapter import VllmEngine

    return VllmEngine(address, **settings)


def token_of(file: Path | None) -> str | None:
    if file is None:
        return os.environ.get(TOKEN_VARIABLE)
    try:
        token = file.read_text().strip()
    except OSError as error:
        # Without the name: it may be the token itself.
        raise ValueError(
            f"--token-file takes a file that holds the token, but it cannot be read: {error.strerror}"
        ) from None
    if not token:
        raise ValueError(f"{file} is empty: write a token into it")
    return token


def api_key_of(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not os.environ.get(variable):
        # Without what was given: it may be the key itself.
        raise ValueError("--api-key-env takes the name of an environment variable, but no variable of that name is set")
    return os.environ[variable].strip()
