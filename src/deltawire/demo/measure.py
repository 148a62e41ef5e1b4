"""Reads all weights of a vLLM server, where they live in its workers, and prints version and digest as JSON."""

import json
import sys
from contextlib import closing
from tempfile import TemporaryDirectory
from typing import Any

import click

from deltawire import Replica
from deltawire.engines.vllm.client import VllmEngine
from deltawire.weights import form


@click.command()
@click.option("--store", required=True, help="Where the run is: it knows the tensors.")
@click.option("--url", required=True, help="The server.")
def main(store: str, url: str) -> None:
    """Print the version that a server says it serves, and the digest of what it has in memory."""
    weights: dict[str, Any] = {}
    with Replica(store, weights, heartbeat_seconds=None) as replica:
        replica.pull()
    # Its own folder: the agent drives the server, and this only reads.
    with TemporaryDirectory() as folder, closing(VllmEngine(url, stage=folder)) as engine:
        version = engine.look().version
        engine.open({name: form(weights, name) for name in weights})
        told = {"version": int(version) if version and version.isdigit() else None, "digest": str(engine.digest())}
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(prog_name="python -m deltawire.demo.measure")
