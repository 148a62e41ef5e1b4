"""Reads all weights of a vLLM server, where they live in its workers, and prints version and digest as JSON."""

import json
import sys
from contextlib import closing
from tempfile import TemporaryDirectory
from typing import Any

import click

from deltawire import Replica
from deltawire.engines.vllm.adapter import VllmEngine
from deltawire.tensors.weights import spec


@click.command()
@click.option("--store", required=True, help="The URL of the run, for names, shapes and dtypes.")
@click.option("--url", required=True, help="The server.")
def main(store: str, url: str) -> None:
    """Print the version that a server reports, and the digest of the weights in its memory."""
    weights: dict[str, Any] = {}
    with Replica(store, weights, heartbeat_seconds=None) as replica:
        # Tied names have no weights of their own.
        tied = replica.run.manifest(replica.pull().version).tied
    # Its own folder: the agent drives the server, and this only reads.
    with TemporaryDirectory() as folder, closing(VllmEngine(url, shared_folder=folder)) as engine:
        version = engine.status().version
        engine.bind({name: spec(weights, name) for name in weights if name not in tied})
        found = {"version": int(version) if version and version.isdigit() else None, "digest": str(engine.digest())}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(prog_name="python -m deltawire_demo.measure")
