"""What commands share: options, and the run that they work on."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from deltawire.disk import local_path
from deltawire.terminal import FORMAT, QUIET, plain, say, speaking_errors

if TYPE_CHECKING:
    from deltawire.run.run import Run

Command = TypeVar("Command", bound=Callable[..., Any])


class LocalPath(click.Path):
    """A file or folder on this machine, not a URL."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            local_path(value)
        except ValueError as error:
            self.fail(plain(error), param, ctx)
        return super().convert(value, param, ctx)


PATH = LocalPath(path_type=Path)
ENCODING_NAMES = ("auto", "mirrorless", "coo", "gap", "context", "dense")

threads_option = click.option("--threads", type=click.IntRange(1),
                              help="Number of threads.  [default: all cores]")  # fmt: skip
public_key_option = click.option("--public-key", metavar="HEX|FILE", help="Accept only documents signed with this "
                                 "key.")  # fmt: skip
sign_key_option = click.option("--sign-key", type=PATH, help="Sign with this private key; create one with keygen.")
run_option = click.option("--run", "run_id", metavar="ID", help="Accept only the run with this id, and switch weights "
                          "of another run to it.  [default: the run in the store]")  # fmt: skip
base_option = click.option("--base", type=PATH, help="A local checkpoint, such as the model that the run started "
                           "from. A new folder or mirror starts from it instead of fetching an anchor.")  # fmt: skip
name_option = click.option("--name", help="The replica's name in the run.  [default: from host and process]")
until_option = click.option("--until", type=click.IntRange(0), help="Stop once this version or a later one is reached.")
poll_option = click.option("--poll", type=click.FloatRange(0, min_open=True), default=1.0, help="Seconds between "
                           "polls for a new version; up to 10 times longer while none is due, judging by when the "
                           "last ones came.")  # fmt: skip
allow_host_option = click.option("--allow-host", metavar="NAME", multiple=True, help="Also accept HTTP requests for "
                                 "this host name, such as agent.example or *.example. Repeatable.  [default: the names "
                                 "of the host that it listens on]")  # fmt: skip
max_file_bytes_option = click.option("--max-file-bytes", type=click.IntRange(1), default=5_000_000_000,
                                     help="Split anything larger into several files.")  # fmt: skip


def output_options(command: Command) -> Command:
    """Add --format and --quiet, for `show` and the progress bars."""
    quiet = click.option("--quiet", "-q", is_flag=True, help="Hide progress.", callback=_quiet, expose_value=False)
    chosen = click.option("--format", type=click.Choice(["text", "json"]), default="text",
                          help="Output format.", expose_value=False,
                          callback=lambda context, _, value: context.meta.update({FORMAT: value}))  # fmt: skip
    return chosen(quiet(command))


def _quiet(context: click.Context, _: click.Parameter, quiet: bool) -> None:
    """Also silence the log about compiling kernels."""
    context.meta[QUIET] = quiet
    logger = logging.getLogger("deltawire.kernels")
    if quiet and logger.level == logging.NOTSET:
        logger.setLevel(logging.ERROR)
        context.call_on_close(lambda: logger.setLevel(logging.NOTSET))


def only_with(condition: str, holds: bool, *names: str) -> None:
    """Refuse options that were given, by the names of their parameters, if they would be ignored."""
    context = click.get_current_context()
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and not holds and source is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{parameter.opts[0]} only works with {condition}: leave it out")


def check_shared(url: str, option: str = "--to") -> None:
    if url.lower().startswith("memory:"):
        raise click.UsageError(f"{option} {url}: other processes cannot see this store; use a folder or a bucket")


@contextmanager
def open_run(url: str, public_key: str | None = None, sign_key: Path | None = None) -> "Iterator[Run]":
    """The run at a URL, which must exist. Errors in the block are shown, and end the command."""
    from deltawire.run.run import Run
    from deltawire.run.signing import public_key_of

    with speaking_errors(url):
        run = Run(url, public_key=public_key_of(sign_key) if sign_key else public_key, sign_with=sign_key)
        _ = run.id
        yield run


def awaited_run(url: str, public_key: str | None, run_id: str | None) -> "Run":
    """The run at a URL, which may not exist yet. A store that denies access is an error now."""
    from deltawire.run.run import Run

    run = Run(url, public_key=public_key, expected=run_id)
    if not run.exists():
        say(f"waiting for a run at {url}", err=True)
    return run
