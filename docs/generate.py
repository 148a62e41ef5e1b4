"""Writes the parts of the documentation that come from the program itself: `make docs`."""

from pathlib import Path

import click

from deltawire.cli import main

DOCS = Path(__file__).parent

CLI_HEAD = """# Command line

Every command takes `--format json` (data on stdout for programs), `--quiet` and `--help`. Progress and errors go to
stderr. Exit codes: 0 fine, 1 failure, 2 usage, 3 a verification found a mismatch. `DELTAWIRE_DEBUG=1` shows tracebacks.

A checkpoint is a safetensors file, or a folder of them with the usual index. A delta is a safetensors file; one that
was written in parts is named by the path it was saved to, or by any part.
"""


def help_text(command: click.Command, name: str) -> str:
    context = click.Context(command, info_name=name, max_content_width=100, terminal_width=100)
    return command.get_help(context)


def pages() -> dict[Path, str]:
    """The generated pages and what they must say."""
    text = CLI_HEAD + f"\n```\n{help_text(main, 'deltawire')}\n```\n"
    for name, command in main.commands.items():
        text += f"\n## deltawire {name}\n\n```\n{help_text(command, f'deltawire {name}')}\n```\n"
    return {DOCS / "cli.md": text}


if __name__ == "__main__":
    for path, content in pages().items():
        path.write_text(content)
