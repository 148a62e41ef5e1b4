"""The demo command: a whole asynchronous RL run on this machine."""

import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deltawire.cli.options import PATH, check_shared, output_options
from deltawire.errors import MissingDependency
from deltawire.terminal import FAILURE, MISMATCH, is_quiet, quote, say, show, speaking_errors, wants_json

if TYPE_CHECKING:
    from deltawire_demo.orchestrate import Options

QUICK = {
    "wordle": {"num_steps": 40, "rounds": 1, "time_limit": 20.0},
    "smollm2": {"num_steps": 5, "rounds": 1, "time_limit": 300.0},
}
# Defaults of a model that differ from those of Options.
DEFAULTS: dict[str, dict[str, Any]] = {
    "wordle": {},
    "smollm2": {"engine": "vllm", "num_steps": 60, "num_replicas": 1, "warmup_steps": 5, "rounds": 3,
                "time_limit": 1800.0},
}  # fmt: skip
NEEDED = ("torch", "openenv", "httpx", "pydantic", "starlette", "uvicorn", "prometheus_client")


@click.command("demo")
@click.option("--model", type=click.Choice(list(DEFAULTS)), default="wordle",
              help="What to train: a small policy that plays Wordle, or SmolLM2-135M, which finds words.")  # fmt: skip
@click.option("--engine", type=click.Choice(["torch", "vllm"]), help="What samples: the demo's own replicas, or real "
              "vLLM servers, each with an agent.  [default: torch; vllm with --model smollm2]")  # fmt: skip
@click.option("--steps", "num_steps", type=click.IntRange(1), help="Number of optimizer steps; each is a version.  "
              "[default: 120; 40 with --quick; 60 with --model smollm2]")  # fmt: skip
@click.option("--quick", is_flag=True, help="Take half a minute: fewer steps, and fewer games to compare.")
@click.option("--replicas", "num_replicas", type=click.IntRange(1, 16), help="Number of replicas.  [default: 2; 1 "
              "with --model smollm2]")  # fmt: skip
@click.option("--store", help="The URL of the run.  [default: a folder next to the log]")
@click.option("--s3", is_flag=True, help="Start a real S3 server (seaweedfs) on this machine, and use it as the store.")
@click.option("--kill-replica-at", type=click.IntRange(0), metavar="STEP", help="Kill a replica at this step; "
              "0: never.  [default: after a sixth of the steps; 0 with vLLM]")  # fmt: skip
@click.option("--late-join-at", type=click.IntRange(0), metavar="STEP", help="Start another replica at this step; 0: "
              "never.  [default: after a third of the steps; 0 with vLLM]")  # fmt: skip
@click.option("--dashboard/--no-dashboard", "has_dashboard", default=True, help="Serve the dashboard during the run.")
@click.option("--keep", "keeps", is_flag=True, help="Keep the dashboard and the S3 server running afterwards, "
              "until Ctrl-C.")  # fmt: skip
@click.option("--no-publish", is_flag=True, help="Control: publish only the initial weights; replicas never change.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Random seed for words and letters.")
@click.option("--folder", type=PATH, help="Folder for logs, the checkpoint and the store; a run that it holds is "
              "resumed.  [default: a temporary folder, which is kept]")  # fmt: skip
@click.option("--cache", type=PATH, help="Where to keep the unpacked model of --model smollm2.  [default: "
              "~/.cache/deltawire/demo]")  # fmt: skip
@click.option("--time-limit", type=click.FloatRange(1), metavar="SECONDS", help="Start no new step after this time.  "
              "[default: 80; 20 with --quick; 1800 with --model smollm2]")  # fmt: skip
@click.option("--evaluate", "rounds", type=click.IntRange(0), metavar="TIMES", help="How often to play each word to "
              "compare the policy before and after training; 0: never.  [default: 2; 1 with --quick; 3 with --model "
              "smollm2]")  # fmt: skip
@output_options
def demo_command(model: str, quick: bool, no_publish: bool, **given: Any) -> None:
    """Run asynchronous RL on this machine.

    The trainer, the replicas and the Wordle server are separate processes that share nothing but a store and HTTP. A
    small policy with bad habits learns to play Wordle with GRPO. Each step is published as a delta, which the replicas
    find, check and apply while they sample. One replica is killed and comes back, another joins late, and the trainer
    keeps training. At the end, every replica's weights are compared with the trainer's, and the whole chain is
    verified. A process that dies is restarted; Ctrl-C stops all of them.

    With --model smollm2, a pretrained language model learns with real vLLM servers, which takes a quarter of an hour.

    --format json prints the summary as JSON. All events are in events.jsonl either way.
    """
    if given["s3"] and given["store"] is not None:
        raise click.UsageError("--s3 starts its own store: leave --store out")
    if given["keeps"] and not given["has_dashboard"]:
        raise click.UsageError("--keep keeps the dashboard running: leave --no-dashboard out")
    if model == "smollm2" and given["engine"] == "torch":
        raise click.UsageError("--model smollm2 is served by vLLM: leave --engine out")
    with speaking_errors():
        need("the demo", NEEDED, "demo")
        from deltawire.store import open_store
        from deltawire_demo.orchestrate import Demo, Interrupted
        from deltawire_demo.summary import shown, summary_text
        from deltawire_demo.view import view_of

        if given["store"] is not None:
            check_shared(given["store"], "--store")
            open_store(given["store"])  # a wrong URL is an error now, not in each of the processes
        options = options_of(model, quick, {**given, "publishes": not no_publish})
        view = view_of(is_quiet() or wants_json())
        demo = Demo(options, view.refresh)
        try:
            demo.run()
        except Interrupted:
            view.close()
            say(f"stopped; resume with: deltawire demo --folder {quote(options.folder)}", err=True)
            sys.exit(130)
        finally:
            view.close()
        summary = shown(demo)
        show(summary, lambda: summary_text(summary))
        if options.keeps:
            say(f"the dashboard keeps running at {demo.story.dashboard} until Ctrl-C", err=True)
            demo.wait()
        if not summary["ok"]:
            sys.exit(MISMATCH if summary["steps"] else FAILURE)


def need(what: str, modules: Sequence[str], extras: str) -> None:
    """Raise MissingDependency if modules are not installed, before anything else happens."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependency(
            f"{what} needs packages that are not installed ({', '.join(missing)}): pip install 'deltawire[{extras}]'"
        )


def options_of(model: str, quick: bool, given: dict[str, Any]) -> "Options":
    """The given options, and defaults for the rest."""
    from deltawire_demo.orchestrate import Options
    from deltawire_demo.smollm2.start import cache_folder

    values: dict[str, Any] = {"cache": cache_folder(), **DEFAULTS[model], **(QUICK[model] if quick else {})}
    asked = {name: value for name, value in given.items() if value is not None}
    asked["folder"] = Path(given["folder"] or tempfile.mkdtemp(prefix="deltawire-demo-")).absolute()
    options = Options(model=model, **(values | asked))
    if options.engine == "vllm":
        return options
    planned: dict[str, Any] = {"kill_replica_at": options.num_steps // 6, "late_join_at": options.num_steps // 3}
    return replace(options, **{name: step for name, step in planned.items() if name not in asked})
