"""Output of the commands: data on stdout as text or JSON, the rest on stderr, an exit code for each kind of error.

Run ids, names of tensors and replicas, and messages of stores and servers are untrusted. All text for people goes
through `say` or a drawing, which remove terminal control characters; JSON has its own escapes, and stays exact.
"""

import errno
import json
import logging
import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from secrets import token_hex
from typing import IO, Any, NoReturn

import click

from deltawire import errors
from deltawire.redact import redacted

# Click itself exits with 2 where the usage is wrong.
FAILURE, MISMATCH = 1, 3

# Where a command keeps its --format and --quiet, in click's context.
FORMAT, QUIET = "deltawire.format", "deltawire.quiet"

# No column of a table is cut below this.
LEAST_COLUMN = 8

Hints = list[tuple[type[errors.DeltawireError], str]]

# What to do next, by type of error; the first that matches is shown.
_FILE_HINTS: Hints = [
    (errors.BaseMismatch, "see which version you have with: deltawire verify CHECKPOINT"),
    (errors.DigestMismatch, "fetch or create the file again, then check it with: deltawire verify"),
    (errors.UnsupportedFormat, "check that it is the right file; one from a newer release needs a newer deltawire"),
    (errors.CorruptObject, "fetch or create the file again"),
]
_RUN_HINTS: Hints = [
    (errors.BaseMismatch, "leave --base out to have the weights fetched, or publish all weights with --anchor"),
    (errors.SignatureMismatch, "pass the run's key: --public-key to read, --sign-key to write; nothing was changed"),
    (errors.DigestMismatch, "list everything that is damaged with: deltawire verify {url}"),
    (errors.CorruptObject, "list everything that is damaged with: deltawire verify {url}"),
    (errors.Fenced, "see what the other writer published with: deltawire ls {url}; then publish again"),
    (errors.MissingAnchor, "publish all weights with: deltawire publish CHECKPOINT --to {url} --anchor"),
    (errors.BrokenChain, "see what is missing with: deltawire verify {url}; publish with --anchor to start over"),
    (errors.ObjectMissing, "list the versions with: deltawire ls {url}"),
    (errors.StoreUnavailable, "check the URL, the network and the credentials, then try: deltawire ls {url}"),
    (errors.AddressUnavailable, "choose another one with --port or --listen; port 0 picks a free one"),
    (errors.UnknownParameter, "if names have changed, publish all weights with --anchor"),
    (errors.ShapeMismatch, "if shapes or dtypes have changed, publish all weights with --anchor"),
]
# The extra that installs a package, for commands that import it directly.
_EXTRAS = {
    "torch": "torch", "huggingface_hub": "hub", "hf_xet": "hub", "cryptography": "signing", "httpx": "agent",
    "starlette": "agent", "uvicorn": "agent", "prometheus_client": "agent", "vllm": "vllm", "trl": "trl",
    "openenv": "demo", "pydantic": "demo",
}  # fmt: skip


@contextmanager
def speaking_errors(url: str | None = None) -> Iterator[None]:
    """Turn errors into a message, a hint and an exit code. DELTAWIRE_DEBUG=1 shows the traceback.

    `url` is the run that the command works on, if it does.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "deltawire"):
            raise
        wanted = repr(f"deltawire[{_EXTRAS[package]}]") if package in _EXTRAS else package
        _end(errors.MissingDependency(f"{package} is not installed: pip install {wanted}"), url)
    except MemoryError as error:
        _end(errors.NotEnoughMemory(f"not enough memory: {error}"), url)
    except ValueError as error:
        raise click.UsageError(plain(error)) from error
    except BrokenPipeError:
        raise  # click ends the program, without a word
    except (errors.DeltawireError, OSError) as error:
        _end(error, url)


def _end(error: Exception, url: str | None) -> NoReturn:
    if os.environ.get("DELTAWIRE_DEBUG") == "1":
        raise error
    said = str(error)
    if isinstance(error, OSError) and error.strerror:
        said = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
        said = f"{error.filename}: {said}" if error.filename else said
    say(f"error: {plain(said)}", err=True)
    if hint := _hint(error, url):
        say(f"hint: {hint}", err=True)
    sys.exit(MISMATCH if isinstance(error, errors.MismatchError) else FAILURE)


def _hint(error: Exception, url: str | None) -> str | None:
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "the disk is full" in str(error):
        return "free some space, then run the same command again"
    if isinstance(error, errors.ObjectMissing) and "path" in error.fields:
        return None
    if isinstance(error, errors.ObjectMissing) and "url" in error.fields and "key" not in error.fields:
        # Nobody can publish to a web server.
        return None if str(url).startswith("http") else f"start it with: deltawire publish CHECKPOINT --to {quote(url)}"
    # A file of this machine, which no hop has brought here.
    is_file = isinstance(error, errors.FormatError) and "path" in error.fields and "hop" not in error.fields
    hints = _FILE_HINTS if url is None or is_file else _RUN_HINTS
    return next((text.format(url=quote(url)) for kind, text in hints if isinstance(error, kind)), None)


def quote(text: object) -> str:
    """An argument as a shell takes it, for a command that is shown to be copied."""
    return shlex.quote(str(text))


def plain(text: object) -> str:
    """Untrusted text on one line, without control characters and secrets."""
    return "".join(each if each.isprintable() else " " for each in redacted(str(text)))


# Between these is a word in a colour. Untrusted text cannot have them: nobody knows them.
_START, _END = f"\x02{token_hex(8)}", "\x03"
_COLOURED = re.compile(f"{_START}([a-z_]+) (.*?){_END}")


class Tinted(str):
    """A word with a colour, as a cell of a table. Without colours, and in JSON, it is the word."""

    colour: str

    def __new__(cls, text: str, colour: str) -> "Tinted":
        word = super().__new__(cls, text)
        word.colour = colour
        return word


def _line(text: str, width: int | None = None) -> str:
    """A line for a terminal, cut to a width: plain but for the colours of `Tinted` cells."""
    done, left = "", sys.maxsize if width is None else width
    # Whether colours are wanted: https://no-color.org.
    colours = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    # In turns: what lies before, a colour, the word in it.
    *parts, last = _COLOURED.split(text)
    for before, colour, word in [*zip(parts[::3], parts[1::3], parts[2::3], strict=True), (last, "", "")]:
        before, word = plain(before)[:left], plain(word)[: max(left - len(plain(before)), 0)]
        left -= len(before) + len(word)
        done += before + (click.style(word, fg=colour) if word and colours else word)
    return done


def say(text: str, *, err: bool = False) -> None:
    """Print lines for people. Click leaves colours out where they do not go to a terminal."""
    _echo("\n".join(map(_line, text.split("\n"))), err=err)


def _echo(text: str, *, err: bool = False) -> None:
    if is_terminal(sys.stderr if err else sys.stdout):
        Drawing.num_said += 1
    with nullcontext() if err else writing():
        click.echo(text, err=err)


class Notices(logging.Handler):
    """Shows what the library logs, on lines of its own: a bar that is being drawn has not ended its line."""

    def emit(self, record: logging.LogRecord) -> None:
        if is_terminal(sys.stderr):
            click.echo("\r\x1b[K", nl=False, err=True)
        say(self.format(record), err=True)


@contextmanager
def running() -> Iterator[None]:
    """What every command runs in. On SIGTERM, as on Ctrl-C, it removes its temporary files before it ends."""
    logger, notices = logging.getLogger("deltawire"), Notices(logging.WARNING)
    logger.addHandler(notices)
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number)) if is_main else None
    try:
        yield
    finally:
        logger.removeHandler(notices)
        if is_main:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def writing() -> Iterator[None]:
    """End the program with a message if what it prints cannot be written."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        _end(error, None)


def hint(text: str) -> None:
    """Name the next command, to someone at a terminal."""
    if not is_quiet() and not wants_json() and is_terminal(sys.stderr):
        say(f"next: {text}", err=True)


def wants_json() -> bool:
    return click.get_current_context().meta.get(FORMAT) == "json"


def is_quiet() -> bool:
    return bool(click.get_current_context().meta.get(QUIET))


def is_live() -> bool:
    """Whether the command that runs may redraw its output in place."""
    return is_terminal(sys.stdout) and not wants_json() and not is_quiet()


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether this is one; Python has no stream where the program was started without it."""
    return stream is not None and stream.isatty()


def show(data: dict[str, Any], text: Callable[[], str]) -> None:
    """Print data as JSON, or as text for people."""
    if wants_json():
        _echo(json.dumps(data, indent=2))
    else:
        say(text())


@contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[str, int], None]]:
    """A bar over elements on stderr; nothing where that is not a terminal."""
    if is_quiet() or not is_terminal(sys.stderr):
        yield lambda _name, _count: None
        return
    with click.progressbar(
        length=max(total, 1), label=label, file=sys.stderr, item_show_func=lambda name: name and plain(name)[-40:]
    ) as bar:
        yield lambda name, count: bar.update(count, name)


class ByteBar:
    """A line on stderr that shows how many bytes have moved, and how fast; nothing where that is not a terminal."""

    def __init__(self, label: str, after: str = "") -> None:
        self._label, self._after, self._shows = label, after, not is_quiet() and is_terminal(sys.stderr)
        self._started = time.monotonic()
        self._drawn = 0.0
        self._first: int | None = None

    def __call__(self, done: int, total: int | None = None) -> None:
        now = time.monotonic()
        if self._first is None:
            # Bytes that were there before, as when a download is resumed, do not count for the rate.
            self._started, self._first = now, done
        if self._shows and (now - self._drawn > 0.1 or done == total):
            seconds = now - self._started
            rate = f"{size_text((done - self._first) / seconds)}/s" if seconds > 0.2 else ""
            text = size_text(done)
            if total:
                filled = int(24 * min(done / total, 1))
                text = f"[{'#' * filled}{'-' * (24 - filled)}]  {text} of {size_text(total)}"
            self.note(f"{text}  {self._after if done == total else rate}")

    def note(self, text: str) -> None:
        if self._shows:
            self._drawn = time.monotonic()
            line = plain(f"{self._label}  {text}")[: shutil.get_terminal_size().columns - 1]
            click.echo(f"\r{line}\x1b[K", nl=False, err=True)

    def __enter__(self) -> "ByteBar":
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            click.echo("\r\x1b[K", nl=False, err=True)


@contextmanager
def handling_signals(handler: Callable[..., object]) -> Iterator[None]:
    """Handle SIGTERM, and SIGINT, which shells ignore for background jobs, for the duration of a block."""
    before = {each: signal.signal(each, handler) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, previous in before.items():
            signal.signal(each, previous)


class Drawing:
    """A text on a terminal that is redrawn in place, cut to the size of the terminal.

    If something else was printed since it was drawn, such as a warning, it is drawn again below that.
    """

    num_said = 0
    """How often anything was printed to a terminal."""

    def __init__(self) -> None:
        self._height = self._num_said = 0

    def draw(self, text: str) -> None:
        columns, rows = shutil.get_terminal_size()
        lines = [_line(line, columns - 1) for line in text.split("\n")]
        if len(lines) >= rows:
            kept = max(rows - 2, 0)
            lines[kept:] = [f"... and {len(lines) - kept} more lines"]
        up = f"\x1b[{self._height}A" if self._height and self._num_said == Drawing.num_said else ""
        click.echo(up + "".join(f"\r{line}\x1b[K\n" for line in lines) + "\x1b[J", nl=False)
        self._height, self._num_said = len(lines), Drawing.num_said


def fault_text(label: str, fault: object) -> str:
    """What went wrong, in whole: a drawing would cut a line, and what to do comes last."""
    return "\n".join(textwrap.wrap(f"{label}: {plain(fault)}", max(shutil.get_terminal_size().columns - 1, 1)))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A text table; the first column is aligned to the left, the others to the right.

    On a terminal it fits the width: the widest columns are cut, or what has no room at all is continued below.
    """
    texts = [[plain(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in texts) for i in range(len(header))]
    if is_terminal(sys.stdout):
        room = shutil.get_terminal_size().columns - 1 - 2 * (len(widths) - 1)
        end = _columns_that_fit(widths)
        if sum(min(width, LEAST_COLUMN) for width in widths) > room and end < len(widths):
            parts = [[row[:end] for row in texts], [[row[0], *row[end:]] for row in texts]]
            return "\n\n".join(table(part[0], part[1:]) for part in parts)
        while sum(widths) > room and max(widths) > LEAST_COLUMN:
            widths[widths.index(max(widths))] -= 1
    lines = []
    for row, cells in zip([header, *rows], texts, strict=True):
        done = []
        for i, (cell, text) in enumerate(zip(row, cells, strict=True)):
            fitted = text if len(text) <= widths[i] else f"{text[: widths[i] - 1]}…"
            padding = " " * (widths[i] - len(fitted))
            if isinstance(cell, Tinted):
                fitted = f"{_START}{cell.colour} {fitted}{_END}"
            done.append(padding + fitted if i else fitted + padding)
        lines.append("  ".join(done).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _columns_that_fit(widths: Sequence[int]) -> int:
    """How many columns, at least two, fit a terminal uncut, if the first takes at most half of it."""
    room = shutil.get_terminal_size().columns - 1
    left = room - min(widths[0], room // 2)
    ends = accumulate(width + 2 for width in widths[1:])
    return max(1 + sum(end <= left for end in ends), 2)


def size_text(num_bytes: float) -> str:
    """Bytes for people, in powers of a thousand."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} TB"


def changed_text(changed: int, total: int) -> str:
    """How many weights have changed, and what part of all that is."""
    return f"{changed:,} of {total:,} weights ({f'{100 * changed / total:.3f} %' if total else '-'})"


def count_text(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def age_text(seconds: float) -> str:
    """A duration for people, in one unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def pause_text(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"


def pairs_text(rows: Sequence[tuple[str, str]]) -> str:
    """Names and values, one pair on a line."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {plain(value)}" for name, value in rows)
