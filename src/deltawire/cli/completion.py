"""The completion command: what a shell needs to complete commands, options and paths."""

import click
from click.shell_completion import get_completion_class

from deltawire.cli.options import output_options
from deltawire.terminal import show

PLACES = {
    "bash": "~/.local/share/bash-completion/completions/deltawire",
    "zsh": "a folder of $fpath, as _deltawire",
    "fish": "~/.config/fish/completions/deltawire.fish",
}


@click.command("completion")
@click.argument("shell", type=click.Choice(list(PLACES)))
@output_options
def completion_command(shell: str) -> None:
    """Print the script that completes commands and options in a shell.

    \b
    deltawire completion bash > ~/.local/share/bash-completion/completions/deltawire
    deltawire completion fish > ~/.config/fish/completions/deltawire.fish
    deltawire completion zsh > a folder of $fpath, as _deltawire
    """
    kind = get_completion_class(shell)
    root = click.get_current_context().find_root()
    # A script of click's names the program and the variable by which it asks for completions.
    script = "" if kind is None else kind(root.command, {}, "deltawire", "_DELTAWIRE_COMPLETE").source()
    show({"shell": shell, "place": PLACES[shell], "script": script}, lambda: script)
