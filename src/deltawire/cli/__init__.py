"""The command line. Each command is a thin layer over the library: it parses, calls, and speaks."""

import click

from deltawire import __version__
from deltawire.cli.files import apply_command, diff_command, inspect_command, verify_command


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="deltawire")
def main() -> None:
    """Ship RL weights as deltas: find the changed bits, pack them, prove the result.

    \b
    A delta turns one checkpoint into another, bit for bit:
        deltawire diff old/ new/ -o step1.safetensors
        deltawire apply old/ step1.safetensors -o rebuilt/
    """


for command in (diff_command, apply_command, verify_command, inspect_command):
    main.add_command(command)
