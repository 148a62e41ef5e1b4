"""The command line. Each command is a thin layer over the library: it parses options, calls, and prints.

Begin with `SECTIONS` here.
"""

import os
from typing import Any

import click

from deltawire import __version__
from deltawire.cli.attach import attach_command
from deltawire.cli.chain import info_command, ls_command, route_command, status_command
from deltawire.cli.demo import demo_command
from deltawire.cli.estimate import estimate_command
from deltawire.cli.files import apply_command, diff_command, inspect_command, verify_command
from deltawire.cli.hello import completion_command, hello_command, warmup_command
from deltawire.cli.pages import dashboard_command, explain_command
from deltawire.cli.prove import prove_command
from deltawire.cli.runs import export_command, keygen_command, publish_command, pull_command
from deltawire.cli.upkeep import compact_command, gc_command
from deltawire.cli.watch import watch_command
from deltawire.terminal import running, writing

SECTIONS = {
    "Runs": [
        publish_command, pull_command, watch_command, attach_command, prove_command, status_command, dashboard_command,
        ls_command, info_command, route_command, verify_command, gc_command, compact_command, export_command,
        keygen_command,
    ],
    "Files": [diff_command, apply_command, inspect_command],
    "Trying it out": [hello_command, demo_command, explain_command, estimate_command],
    "This machine": [warmup_command, completion_command],
}  # fmt: skip

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}


class Sections(click.Group):
    """Lists its commands in sections."""

    def main(self, *args: Any, **options: Any) -> Any:
        with running(), writing():  # click itself prints help and versions
            return super().main(*args, **options)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        limit = formatter.width - 6 - max(len(name) for name in self.commands)
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(str(each.name), each.get_short_help_str(limit)) for each in commands])


@click.group(cls=Sections, context_settings=SETTINGS)
@click.version_option(__version__, prog_name="deltawire")
def main() -> None:
    """Ship RL weights as deltas: find the changed bits, pack them, verify the result.

    \b
    A run is a chain of versions in a store. Any number of replicas can follow it:
        deltawire publish checkpoint/ --to s3://bucket/run
        deltawire watch s3://bucket/run --to mirror/
        deltawire attach --engine vllm --url http://127.0.0.1:8000 --from s3://bucket/run

    \b
    A delta turns one checkpoint into another, bit for bit:
        deltawire diff old/ new/ -o step1.safetensors
        deltawire apply old/ step1.safetensors -o rebuilt/

    A URL is a folder, file:///folder, s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or
    hf://buckets/owner/name/prefix; to read only, also https://host/run. Credentials come from the environment, as for
    each cloud's own tools.
    """
    # If colorama is installed, numba makes it write to the terminal when the program ends.
    os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")


for commands in SECTIONS.values():
    for command in commands:
        main.add_command(command)
