"""How the commands speak: data on stdout as text or JSON, the rest on stderr, an exit code for each kind of error."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from deltawire import errors

# Click itself exits with 2 where the usage is wrong.
FAILURE, MISMATCH = 1, 3

# What to do next, by kind of error; the first that fits is shown.
_HINTS: list[tuple[type[errors.DeltawireError], str]] = [
    (errors.BaseMismatch, "see which version you have with: deltawire verify CHECKPOINT"),
    (errors.DigestMismatch, "fetch or make the file again, then check it with: deltawire verify"),
    (errors.UnsupportedFormat, "see what the file says of itself with: deltawire inspect FILE"),
    (errors.CorruptObject, "fetch or make the file again"),
]


@contextmanager
def speaking_errors() -> Iterator[None]:
    """Turn errors into a sentence, the next command and an exit code. DELTAWIRE_DEBUG=1 shows the traceback."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except (errors.DeltawireError, OSError) as error:
        if os.environ.get("DELTAWIRE_DEBUG") == "1":
            raise
        click.echo(f"error: {error}", err=True)
        hint = next((text for kind, text in _HINTS if isinstance(error, kind)), None)
        if hint:
            click.echo(f"hint: {hint}", err=True)
        sys.exit(MISMATCH if isinstance(error, errors.MismatchError) else FAILURE)


def show(data: dict[str, Any], text: Callable[[], str], output_format: str) -> None:
    """Print data as JSON, or as text for people."""
    click.echo(json.dumps(data, indent=2) if output_format == "json" else text())


@contextmanager
def progress_bar(label: str, total: int, quiet: bool) -> Iterator[Callable[[str, int], None]]:
    """A bar over elements on stderr; nothing where that is not a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda _name, _count: None
        return
    with click.progressbar(
        length=max(total, 1), label=label, file=sys.stderr, item_show_func=lambda name: name and name[-40:]
    ) as bar:
        yield lambda name, count: bar.update(count, name)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be; the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, ["-" * width for width in widths], *rows]:
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def size_text(num_bytes: float) -> str:
    """Bytes for people, in powers of a thousand."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} TB"


def percent_text(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3f} %" if whole else "-"
