"""The estimate command: what a run will cost, before it starts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from deltawire.cli.options import PATH, only_with, output_options
from deltawire.cli.pages import show_page
from deltawire.terminal import pairs_text, show, speaking_errors, table

POSITIVE = click.FloatRange(0, min_open=True)
AMOUNT = click.FloatRange(0)


@click.command("estimate")
@click.option("--params", metavar="SIZE", help="The size of the model, such as 8b, 0.6b or 1t.")
@click.option("--config", type=PATH, help="The model's config.json, to count its weights from.")
@click.option("--lr", type=POSITIVE, help="The learning rate, from which the share of changed weights follows.  "
              "[default: 1e-6]")  # fmt: skip
@click.option("--density", type=click.FloatRange(0, 1, min_open=True), help="The share of weights that a step changes, "
              "as your run has recorded it, instead of --lr.")  # fmt: skip
@click.option("--steps-per-day", type=POSITIVE, default=1440.0, show_default=True, help="Versions that are published.")
@click.option("--replicas", type=click.IntRange(1), default=8, show_default=True, help="Replicas, of all sites.")
@click.option("--sites", type=click.IntRange(1), default=1, show_default=True, help="Sites, each with a line of its "
              "own.")  # fmt: skip
@click.option("--trainer-mbits", type=POSITIVE, default=1000.0, show_default=True, help="The trainer's line to the "
              "store, in Mbit/s.")  # fmt: skip
@click.option("--site-mbits", type=POSITIVE, default=1000.0, show_default=True, help="The line of a site to the store, "
              "in Mbit/s.")  # fmt: skip
@click.option("--inside-mbits", type=POSITIVE, default=10_000.0, show_default=True, help="What a site's cache serves "
              "to all its replicas together, in Mbit/s.")  # fmt: skip
@click.option("--round-trip", type=AMOUNT, default=50.0, show_default=True, help="To the store, in milliseconds.")
@click.option("--poll", type=POSITIVE, default=1.0, show_default=True, help="How often replicas look for a version "
              "that is due, in seconds.")  # fmt: skip
@click.option("--joins-per-day", type=AMOUNT, default=0.0, show_default=True, help="Replicas that start with nothing: "
              "new ones, and restarts.")  # fmt: skip
@click.option("--machine", type=click.Choice(["gpu", "cpu"]), default="gpu", show_default=True, help="H200s with at "
              "most 8.19 B weights each, or two cores.")  # fmt: skip
@click.option("--store", type=click.Choice(["s3", "gcs", "r2", "own"]), default="s3", show_default=True,
              help="Whose list prices to use; own: a store that costs nothing.")  # fmt: skip
@click.option("--egress-price", type=AMOUNT, help="USD for a GB that leaves the store, instead.")
@click.option("--storage-price", type=AMOUNT, help="USD for a GB and a month, instead.")
@click.option("--put-price", type=AMOUNT, help="USD for 1000 writes or listings, instead.")
@click.option("--get-price", type=AMOUNT, help="USD for 1000 reads, instead.")
@click.option("--keep-days", type=AMOUNT, default=30.0, show_default=True, help="How long objects are kept.")
@click.option("--versions", "num_versions", type=click.IntRange(1, 200), default=5, show_default=True,
              help="How many versions to simulate.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="For the simulation.")
@click.option("--page", is_flag=True, help="Serve a page with sliders on this machine, until Ctrl-C, instead.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, show_default="a free one", help="The port of the page."
)
@click.option("--open/--no-open", "opens", default=False, show_default=True, help="Open the page in a browser.")
@output_options
def estimate_command(
    params: str | None, config: Path | None, lr: float | None, density: float | None, steps_per_day: float,
    replicas: int, sites: int, trainer_mbits: float, site_mbits: float, inside_mbits: float, round_trip: float,
    poll: float, joins_per_day: float, machine: str, store: str, egress_price: float | None,
    storage_price: float | None, put_price: float | None, get_price: float | None, keep_days: float,
    num_versions: int, seed: int, page: bool, port: int, opens: bool,
) -> None:  # fmt: skip
    """Estimate what a run takes before it starts: bytes, seconds and money, a step and a day.

    For deltas and for all weights, each with a cache at every site and without. Sizes and times are fitted to what
    this project has measured; --format json says what from. How soon replicas serve a version comes from a simulation
    of the whole fleet, which is the same for the same --seed.
    """
    only_with("--page", page, "port", "opens")
    from deltawire.estimate.architecture import count_weights, read_size
    from deltawire.estimate.bill import estimate
    from deltawire.estimate.plan import Plan, density_of
    from deltawire.estimate.prices import PRICES
    from deltawire.estimate.report import head_of, table_of

    if page:
        from deltawire.pages.estimate import serve, url_of

        with speaking_errors(), serve(port) as server:
            show_page(server, url_of(server), opens)
        return
    if (params is None) == (config is None):
        raise click.UsageError("give the model's size, as --params 8b or as --config config.json")
    if lr is not None and density is not None:
        raise click.UsageError("--lr and --density say the same: leave one out")
    with speaking_errors():
        weights, num_tensors = count_weights(config) if config is not None else (read_size(params or ""), 400)
        plan = Plan(
            weights, density_of(1e-6 if lr is None else lr) if density is None else density, steps_per_day,
            sites=sites, replicas=replicas, trainer_mbits=trainer_mbits, site_mbits=site_mbits,
            replica_mbits=inside_mbits, round_trip_ms=round_trip, poll_seconds=poll, joins_a_day=joins_per_day,
            machine=machine, num_tensors=num_tensors, keep_days=keep_days,
        )  # fmt: skip
        given = {"storage": storage_price, "put_1000": put_price, "get_1000": get_price,
                 "egress": None if egress_price is None else [(0.0, egress_price)]}  # fmt: skip
        chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        data = estimate(plan, replace(PRICES[store], **chosen), num_versions=num_versions, seed=seed)
        show(data, lambda: f"{pairs_text(head_of(data))}\n\n{table(*table_of(data))}")
