"""The prove command: whether a server computes from the parameters that it would be updated in."""

import time
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from deltawire.cli import options
from deltawire.cli.attach import api_key_of
from deltawire.terminal import MISMATCH, age_text, count_text, plain, progress_bar, show, speaking_errors, table

if TYPE_CHECKING:
    from deltawire.engines.prove import Proof


@click.command("prove")
@click.option("--engine", type=click.Choice(["vllm"]), required=True, help="The kind of server.")
@click.option("--url", "address", metavar="URL", required=True, help="The server's URL, such as http://127.0.0.1:8000.")
@click.option("--again", is_flag=True, help="Check again, even with a result for the same model, flags and versions.")
@click.option("--api-key-env", metavar="NAME", help="Environment variable that holds the engine token.")
@options.output_options
def prove_command(engine: str, address: str, again: bool, api_key_env: str | None) -> None:
    """Check that a server's answers depend on every parameter.

    The server must have no other traffic. It may compute from a copy of a parameter that it made at startup and that no
    update reaches. So each parameter of each worker is changed, a request is sent, and the bits are restored; for
    experts, tokens are routed to one at a time. The result is kept for this model, with these flags and versions. Exits
    with 3 if the answers do not depend on a parameter.
    """
    from deltawire.engines.prove import DEAD, prove, remember, remembered
    from deltawire.engines.vllm.probe import VllmProbe

    with speaking_errors(), closing(VllmProbe(address, api_key=api_key_of(api_key_env))) as server:
        subject = server.subject()
        proof = None if again else remembered(subject.about)
        if proof is None:
            total = sum(each.num_parts or 1 for each in subject.parameters)
            with progress_bar("proving", total) as progress:
                proof = prove(server, progress)
            remember(proof)
    show({"holds": proof.holds, **asdict(proof)}, lambda: text(proof))
    if proof.count(DEAD):
        click.get_current_context().exit(MISMATCH)


def text(proof: "Proof") -> str:
    from deltawire.engines.prove import ALIVE, DEAD, UNTOLD

    counts = ", ".join(f"{proof.count(state)} {state}" for state in (DEAD, UNTOLD) if proof.count(state))
    age = age_text(max(time.time() - proof.proven, 0))
    lines = f"{count_text(len(proof.found), 'parameter')} and experts, checked {age} ago: {counts or 'all alive'}"
    rows = [
        [str(each.rank), plain(each.name), "-" if each.part is None else str(each.part), each.prefill, each.decode]
        for each in proof.found
        if (each.prefill, each.decode) != (ALIVE, ALIVE)
    ]
    header = ["worker", "parameter", "expert", "prompt", "next token"]
    return f"{lines}\n\n{table(header, rows)}" if rows else lines
