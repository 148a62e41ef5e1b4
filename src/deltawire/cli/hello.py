"""Commands for the first minute: hello, warmup, and completion in a shell."""

import sys
import tempfile
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import get_completion_class

from deltawire.cli.options import check_shared, output_options
from deltawire.terminal import MISMATCH, is_quiet, pairs_text, progress_bar, show, size_text, speaking_errors

if TYPE_CHECKING:
    from deltawire_demo.hello import Hello

# The widths of RL weights, and all widths: for images, where nothing should be left to compile.
COMMON_BITS, ALL_BITS = (16,), (8, 16, 32, 64)

# Where shells look for completions.
PLACES = {
    "bash": "~/.local/share/bash-completion/completions/deltawire",
    "zsh": "a folder in $fpath, as _deltawire",
    "fish": "~/.config/fish/completions/deltawire.fish",
}


@click.command("hello")
@click.option("--to", "url", metavar="URL", help="The store, which must be empty.  [default: a temporary folder]")
@click.option("--steps", type=click.IntRange(8, 1000), default=20, help="Number of versions to publish.")
@output_options
def hello_command(url: str | None, steps: int) -> None:
    """Run a trainer and two replicas, and compare their weights.

    They are separate processes that share nothing but a store. The trainer updates 17 MB of bf16 weights in small
    steps, each of which changes about 1.4 % of them, and publishes every step. One replica keeps its weights in memory,
    the other in a folder. The second one is killed along the way and comes back; the trainer never waits. At the end,
    the SHA-256 of the weights must be the same in all three. Takes seconds, and needs no GPU, torch or network.

    \b
    Example:
        deltawire hello
        deltawire hello --to s3://bucket/hello
    """
    from deltawire.store import open_store
    from deltawire_demo.hello import say_hello

    with speaking_errors(url), ExitStack() as stack:
        if url is None:
            url = stack.enter_context(tempfile.TemporaryDirectory(prefix="deltawire-hello-")) + "/run"
        check_shared(url)
        if next(iter(open_store(url).list("")), None) is not None:
            raise ValueError(f"--to {url}: the store is not empty; use an empty one")
        _warm_up(COMMON_BITS)
        hello = say_hello(url, steps, (lambda *_: None) if is_quiet() else _print)
        show(hello.as_json(), lambda: _summary(hello))
        if not hello.ok:
            sys.exit(MISMATCH)


def _print(_: "Hello", event: dict[str, Any]) -> None:
    version = event["version"]
    if version is None or "sha256" in event:
        return
    if "killed" in event:
        text = "killed with SIGKILL"
    elif "ready" in event:
        text = "is back, with the weights in its folder"
    elif event["who"] != "trainer":
        text = f"fetched {size_text(event['num_bytes'])}"
    else:
        changed = f"{100 * event['density']:.2f} % changed" if version else "all weights"
        text = f"{changed}, {size_text(event['num_bytes'])}"
    click.echo(f"{event['who']:<8} version {version:>3}  {text}", err=True)


def _summary(hello: "Hello") -> str:
    names = ", ".join(sorted(hello.sha256, key=["trainer", "memory", "folder"].index))
    mean = sum(hello.step_bytes) / len(hello.step_bytes)
    held = "\n".join(f"{name} {digest}" for name, digest in hello.sha256.items())
    weights = f"{names}: SHA-256 {next(iter(hello.sha256.values()))}" if hello.ok else f"DIFFERENT\n{held}"
    return pairs_text(
        [
            ("equal weights", weights),
            ("per step", f"sent {size_text(mean)} instead of {size_text(hello.full_bytes)}"),
            ("in total", f"sent {size_text(hello.uploaded_bytes)} instead of {size_text(hello.all_bytes)}, including "
             "the first version and all documents"),
            ("killed", f"the folder replica at version {hello.killed_at}; it came back with version {hello.back_from}"),
            ("trainer", f"at most {hello.longest_step_seconds:.2f} s from one step to the next"),
        ]
    )  # fmt: skip


@click.command("warmup")
@click.option("--bits", type=click.Choice([str(bits) for bits in ALL_BITS]), multiple=True, help="Width of the weights "
              "in bits: 16 for bf16 and fp16. Repeatable.  [default: all]")  # fmt: skip
@output_options
def warmup_command(bits: tuple[str, ...]) -> None:
    """Compile the kernels ahead of time.

    Otherwise they are compiled on first use, which takes about ten seconds on a new machine. Run this when you build an
    image, or before you time anything. Compiled kernels are kept next to the package, in the user's cache folder, or in
    NUMBA_CACHE_DIR. They are used wherever that folder can be read, and only on the same kind of CPU.

    \b
    Example:
        deltawire warmup
        deltawire warmup --bits 16 --format json
    """
    from deltawire.kernels.cpu.compiled import compiled_here, folders, writable_folder

    with speaking_errors():
        widths = tuple(map(int, bits)) or ALL_BITS
        seconds = _warm_up(widths)
        folder = writable_folder()
        if compiled_here and folder is None:
            places = ", ".join(map(str, folders()))
            raise OSError(f"no kernel was kept, since none of these can be written: {places}; set NUMBA_CACHE_DIR")
        data = {"bits": list(widths), "num_compiled": len(compiled_here), "seconds": round(seconds, 3),
                "folder": None if folder is None else str(folder)}  # fmt: skip
        what = f"compiled {len(compiled_here)} kernels" if compiled_here else "nothing to compile"
        show(data, lambda: f"{what} ({seconds:.1f} s); kernels are in {folder}")


def _warm_up(widths: tuple[int, ...]) -> float:
    from deltawire.kernels.cpu.warmup import TASKS, warm_up

    total = len(widths) * len(TASKS)
    with progress_bar("kernels", total) as advance:
        return warm_up(widths, lambda what, done, _: advance(what, 1 if done else 0))


@click.command("completion")
@click.argument("shell", type=click.Choice(list(PLACES)))
@output_options
def completion_command(shell: str) -> None:
    """Print a script for shell completion.

    \b
    deltawire completion bash > ~/.local/share/bash-completion/completions/deltawire
    deltawire completion fish > ~/.config/fish/completions/deltawire.fish
    deltawire completion zsh > FOLDER/_deltawire    # a FOLDER in $fpath
    """
    kind = get_completion_class(shell)
    root = click.get_current_context().find_root()
    # A script of click's names the program and the variable by which it asks for completions.
    script = "" if kind is None else kind(root.command, {}, "deltawire", "_DELTAWIRE_COMPLETE").source()
    show({"shell": shell, "place": PLACES[shell], "script": script}, lambda: script)
