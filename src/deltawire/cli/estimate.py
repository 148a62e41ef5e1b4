"""The estimate command: what a run will cost, before it starts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from deltawire.cli.options import PATH, only_with, output_options
from deltawire.cli.pages import show_page
from deltawire.estimate.plan import LIMITS, Plan, density_of
from deltawire.terminal import pairs_text, progress_bar, show, speaking_errors, table

POSITIVE = click.FloatRange(0, min_open=True)
AMOUNT = click.FloatRange(0)


def limited(name: str) -> click.FloatRange:
    return click.FloatRange(*LIMITS[name])


@click.command("estimate")
@click.option("--params", metavar="SIZE", help="Size of the model, such as 8b, 0.6b or 1t.")
@click.option("--config", type=PATH, help="The model's config.json, from which its weights are counted.")
@click.option("--lr", type=POSITIVE, help="Learning rate, which determines the share of weights that a step changes.  "
              "[default: 1e-6]")  # fmt: skip
@click.option("--density", type=click.FloatRange(0, 1, min_open=True), help="Share of weights that a step changes, as "
              "measured in your run; replaces --lr.")  # fmt: skip
@click.option("--steps-per-day", "steps_a_day", type=limited("steps_a_day"), default=1440.0,
              help="Versions published per day.")  # fmt: skip
@click.option("--replicas", type=click.IntRange(1), default=8, help="Number of replicas, all sites together.")
@click.option("--sites", type=click.IntRange(1), default=1, help="Number of sites, each with its own connection.")
@click.option("--trainer-mbits", type=limited("trainer_mbits"), default=1000.0,
              help="Bandwidth from trainer to store, in Mbit/s.")  # fmt: skip
@click.option("--site-mbits", type=limited("site_mbits"), default=1000.0,
              help="Bandwidth from store to each site, in Mbit/s.")  # fmt: skip
@click.option("--inside-mbits", "replica_mbits", type=limited("replica_mbits"), default=10_000.0,
              help="Bandwidth from a site's cache to all its replicas together, in Mbit/s.")  # fmt: skip
@click.option("--round-trip", "round_trip_ms", type=limited("round_trip_ms"), default=50.0,
              help="Round trip to the store, in ms.")  # fmt: skip
@click.option("--poll", "poll_seconds", type=limited("poll_seconds"), default=1.0,
              help="Seconds between a replica's polls while a version is due.")  # fmt: skip
@click.option("--joins-per-day", "joins_a_day", type=limited("joins_a_day"), default=0.0,
              help="Replicas that start from nothing per day: new ones and restarts.")  # fmt: skip
@click.option("--machine", type=click.Choice(["gpu", "cpu"]), default="gpu",
              help="gpu: H200s with at most 8.19 B weights each; cpu: two cores each.")  # fmt: skip
@click.option("--store", type=click.Choice(["s3", "gcs", "r2", "own"]), default="s3",
              help="Whose list prices to use; own: a store that costs nothing.")  # fmt: skip
@click.option("--egress-price", type=AMOUNT, help="USD per GB that leaves the store; overrides the list price.")
@click.option("--storage-price", type=AMOUNT, help="USD per GB and month; overrides the list price.")
@click.option("--put-price", type=AMOUNT, help="USD per 1000 writes or listings; overrides the list price.")
@click.option("--get-price", type=AMOUNT, help="USD per 1000 reads; overrides the list price.")
@click.option("--keep-days", type=limited("keep_days"), default=30.0, help="How many days objects are kept.")
@click.option("--versions", "num_versions", type=click.IntRange(1, 200), default=5,
              help="Number of versions to simulate.")  # fmt: skip
@click.option("--seed", type=int, default=0, help="Random seed of the simulation.")
@click.option("--page", is_flag=True, help="Serve a page with sliders on this machine instead, until Ctrl-C.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default="a free port",
              help="The port of the page.")  # fmt: skip
@click.option("--open/--no-open", "opens", default=False, help="Open the page in a browser.")
@output_options
def estimate_command(
    params: str | None, config: Path | None, lr: float | None, density: float | None, store: str,
    egress_price: float | None, storage_price: float | None, put_price: float | None, get_price: float | None,
    num_versions: int, seed: int, page: bool, port: int, opens: bool, **planned: Any,
) -> None:  # fmt: skip
    """Estimate the bytes, time and cost of a run before it starts.

    Per step and per day, for deltas and for all weights, each with and without a cache at every site. Sizes and times
    are fitted to this project's measurements; --format json names the source of each. How soon replicas serve a version
    comes from a simulation of the whole fleet, which is deterministic for a given --seed.
    """
    only_with("--page", page, "port", "opens")
    from deltawire.estimate.architecture import count_weights, read_size
    from deltawire.estimate.bill import WAYS, estimate
    from deltawire.estimate.prices import PRICES
    from deltawire.estimate.report import head_of, table_of

    if page:
        from deltawire.pages.estimate import EstimateHandler
        from deltawire.pages.explain import PageServer

        with speaking_errors(), PageServer(port, EstimateHandler) as server:
            show_page(server, opens)
        return
    if (params is None) == (config is None):
        raise click.UsageError("give the model's size, either as --params 8b or as --config config.json")
    if lr is not None and density is not None:
        raise click.UsageError("--lr and --density set the same value: leave one out")
    with speaking_errors():
        weights, num_tensors = count_weights(config) if config is not None else (read_size(params or ""), 400)
        share = density_of(1e-6 if lr is None else lr) if density is None else density
        plan = Plan(weights, share, num_tensors=num_tensors, **planned)
        given = {"storage": storage_price, "put_1000": put_price, "get_1000": get_price,
                 "egress": None if egress_price is None else [(0.0, egress_price)]}  # fmt: skip
        chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        with progress_bar("estimate", len(WAYS) * num_versions) as progress:
            data = estimate(
                plan, replace(PRICES[store], **chosen), num_versions=num_versions, seed=seed, progress=progress
            )
        show(data, lambda: f"{pairs_text(head_of(data))}\n\n{table(*table_of(data))}")
